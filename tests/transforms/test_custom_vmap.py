"""filter_custom_vmap: when the rule is asked, what it is told, what it must return."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from nests import (
    FORWARD,
    REVERSE,
    Scale,
    agree,
    few,
    in_float64,
    inexact,
    mix,
    mixed_trees,
    nests,
    same_statics,
)

import equinox_like as eqx


def with_rule(f):
    """`f` with a rule that does what JAX would, and notes what it was told."""
    told = []
    g = eqx.filter_custom_vmap(f)

    @g.def_vmap
    def rule(axis_size, in_batched, *args, **kwargs):
        told.append((axis_size, in_batched))
        axes = jtu.tree_map(lambda b: 0 if b else None, in_batched)
        call = eqx.filter_vmap(
            lambda *args: f(*args, **kwargs), in_axes=axes, axis_size=axis_size
        )
        out = call(*args)
        return out, jtu.tree_map(eqx.is_array, out)

    return g, told


def stacked(tree, n=3):
    return jtu.tree_map(
        lambda x: jnp.stack([jnp.asarray(x)] * n) if eqx.is_array(x) else x, tree
    )


@few
@given(mixed_trees(4), nests(REVERSE))
def test_values_and_gradients_are_those_of_the_function(tree, nest):
    def loss(f, x):
        return sum(jnp.sum(y) for y in inexact(f(x)))

    f = nest(with_rule(mix)[0])
    assert same_statics(f(tree), mix(tree))
    assert agree(f(tree), in_float64(lambda f, x: f(x), tree))
    gradient = eqx.filter_grad(lambda x: loss(f, x))(tree)
    assert agree(gradient, in_float64(lambda f, x: jax.grad(loss, 1)(f, x), tree))


@few
@given(mixed_trees(4), nests(FORWARD))
def test_batched_by_the_rule_as_by_jax(tree, nest):
    f, told = with_rule(mix)
    xs = stacked(tree)
    expected = eqx.filter_vmap(mix)(xs)
    out = eqx.filter_vmap(nest(f))(xs)
    assert agree(out, [np.asarray(x) for x in inexact(expected)])
    assert same_statics(out, expected)
    is_batched = jtu.tree_map(eqx.is_array, xs)
    assert told and all(flags == (is_batched,) for _, flags in told)


@few
@given(mixed_trees(3))
def test_gradient_of_a_map_is_the_map_of_gradients(tree):
    f, _ = with_rule(mix)
    xs = stacked(tree)

    def loss(x):
        return sum(jnp.sum(y) for y in inexact(f(x)))

    one = eqx.filter_vmap(eqx.filter_grad(loss))(xs)

    def total(xs):
        return sum(jnp.sum(y) for y in inexact(eqx.filter_vmap(f)(xs)))

    other = eqx.filter_grad(total)(xs)
    assert agree(one, [np.asarray(x) for x in inexact(other)])


def test_rule_is_told_what_is_batched_and_knows_of_nothing_else():
    f, told = with_rule(lambda model, x, text: (model(x), text, 3))
    model = Scale(jnp.ones(2))
    assert f(model, jnp.ones(2), "text")[1:] == ("text", 3) and not told
    call = eqx.filter_vmap(lambda x: f(model, {"x": x}["x"], "text"))
    out, text, n = call(jnp.ones((4, 2)))
    assert out.shape == (4, 2) and text == "text" and n == 3
    ((axis_size, (of_model, of_x, of_text)),) = told
    assert axis_size == 4 and of_model.factor is False
    assert of_x is True and of_text is False


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16])
def test_numpy_arrays_have_the_dtype_that_jax_gives_them(dtype):
    f = eqx.filter_custom_vmap(lambda x, y: 2.0 * x * y)
    f.def_vmap(lambda size, batched, x, y: (2.0 * x * y, True))
    x, y = np.ones(3, dtype), np.ones((), dtype)
    out = jax.vmap(f, in_axes=(0, None))(x, y)
    assert out.tolist() == [2, 2, 2] and out.dtype == jnp.asarray(x).dtype
    g = eqx.filter_custom_vmap(lambda x: 2.0 * x)
    g.def_vmap(lambda size, batched, x: (np.full(3, 2, dtype), True))
    assert jax.vmap(g)(x).tolist() == [2, 2, 2]


def test_rule_decides():
    f = eqx.filter_custom_vmap(lambda x: {"x": x, "sum": jnp.zeros(())})
    f.def_vmap(
        lambda n, batched, x: ({"x": x[::-1], "sum": 0.0}, {"x": True, "sum": False})
    )
    out = eqx.filter_vmap(f)(jnp.arange(3.0))
    assert out["x"].tolist() == [2, 1, 0] and out["sum"].tolist() == [0, 0, 0]
    assert eqx.filter_jit(eqx.filter_vmap(f))(jnp.arange(3.0))["x"].tolist() == [
        2,
        1,
        0,
    ]
    assert jax.vmap(eqx.filter_jit(f))(jnp.arange(3.0))["x"].tolist() == [2, 1, 0]


def test_unbatched_output_stays_so():
    f = eqx.filter_custom_vmap(lambda x: jnp.ones(2))
    f.def_vmap(lambda n, batched, x: (jnp.ones(2), False))
    assert eqx.filter_vmap(f, out_axes=None)(jnp.arange(3.0)).shape == (2,)


def test_axis_is_moved_to_the_front_for_the_rule():
    shapes = []
    f = eqx.filter_custom_vmap(lambda x: x)

    @f.def_vmap
    def rule(n, batched, x):
        shapes.append(x.shape)
        return x, True

    assert eqx.filter_vmap(f, in_axes=1)(jnp.ones((2, 5))).shape == (5, 2)
    assert shapes == [(5, 2)]


def test_nested_maps_ask_once_for_each():
    f, told = with_rule(lambda x, y: x * y)
    both = eqx.filter_vmap(eqx.filter_vmap(f, in_axes=(0, None)), in_axes=(None, 0))
    x, y = jnp.arange(3.0), jnp.arange(2.0)
    assert eqx.tree_equal(both(x, y), jnp.outer(y, x))
    assert (3, (True, False)) in told


def test_without_a_rule_it_is_mapped_as_any_function():
    f = eqx.filter_custom_vmap(lambda x, text: (2 * x, text))
    out, text = eqx.filter_vmap(f)(jnp.arange(3.0), "text")
    assert out.tolist() == [0, 2, 4] and text == "text"
    assert eqx.filter_grad(lambda x: f(x, "")[0])(jnp.asarray(1.0)) == 2


class TestClosures:
    def test_mapped_value_that_is_closed_over_is_mapped(self):
        def outer(x, y):
            f, told = with_rule(lambda x: x * y)
            return f(x), told

        out, told = eqx.filter_vmap(outer)(jnp.arange(3.0), jnp.arange(3.0))
        assert out.tolist() == [0, 1, 4] and not told

    def test_rule_is_asked_if_what_is_closed_over_has_no_batch(self):
        @eqx.filter_jit
        def outer(x, y):
            f, told = with_rule(lambda x: x * y)
            return eqx.filter_vmap(f)(x), len(told)

        out, count = outer(jnp.arange(3.0), jnp.asarray(2.0))
        assert out.tolist() == [0, 2, 4] and count == 1

    def test_gradient_flows_to_what_is_closed_over(self):
        def loss(y, x):
            f, _ = with_rule(lambda x: x * y)
            return eqx.filter_vmap(f)(x).sum()

        assert eqx.filter_grad(loss)(jnp.asarray(2.0), jnp.arange(3.0)) == 3

    def test_gradient_flows_to_the_arrays_of_the_callable(self):
        def loss(model, x):
            f, _ = with_rule(model)
            return eqx.filter_vmap(f)(x).sum()

        gradient = eqx.filter_grad(loss)(Scale(jnp.asarray(2.0)), jnp.arange(3.0))
        assert gradient.factor == 3


class TestKeywords:
    def test_they_are_put_in_their_position(self):
        f, told = with_rule(lambda x, y: x - y)
        out = jax.vmap(lambda x: f(y=x, x=jnp.asarray(1.0)))(jnp.arange(3.0))
        assert out.tolist() == [1, 0, -1] and told == [(3, (False, True))]

    def test_those_without_a_position_reach_the_rule_by_keyword(self):
        f, told = with_rule(lambda x, *, scale: x * scale)
        out = jax.vmap(lambda x: f(x, scale=2))(jnp.arange(3.0))
        assert out.tolist() == [0, 2, 4] and len(told) == 1
        out = jax.vmap(lambda x: f(jnp.asarray(1.0), scale=x))(jnp.arange(3.0))
        assert out.tolist() == [0, 1, 2] and len(told) == 1

    def test_call_that_does_not_fit_is_refused(self):
        with pytest.raises(TypeError, match="missing a required argument: 'x'"):
            with_rule(lambda x, y: x)[0](y=1)


def test_methods_pass_the_instance_to_the_rule():
    class Model(eqx.Module):
        factor: Any

        @eqx.filter_custom_vmap
        def call(self, x):
            return self.factor * x

        @call.def_vmap
        def rule(axis_size, in_batched, self, x):
            assert in_batched[0].factor is False and in_batched[1] is True
            return self.factor * x + 1, True

    assert jax.vmap(Model(2.0).call)(jnp.arange(2.0)).tolist() == [1, 3]
    model = Model(jnp.asarray(2.0))
    assert jax.vmap(model.call)(jnp.arange(2.0)).tolist() == [1, 3]


class TestErrors:
    @pytest.mark.parametrize(
        "returned, message",
        [
            (lambda x: (x, True), r"`out` is a dict.*an array from the rule"),
            (
                lambda x: ({"a": x, "n": 2}, True),
                r"`out\['n'\]` is .*1.* 2 from the rule",
            ),
            (
                lambda x: ({"a": x[0], "n": 1}, True),
                r"`out\['a'\]` is batched.*\[3, 2\]",
            ),
            (
                lambda x: ({"a": x, "n": 1}, False),
                r"`out\['a'\]` is not batched.*\[2\]",
            ),
            (
                lambda x: ({"a": x > 0, "n": 1}, True),
                r"float32\[3, 2\].*is bool\[3, 2\]",
            ),
            (
                lambda x: ({"a": x.T, "n": 1}, True),
                r"`out\['a'\]`.*It is float32\[2, 3\]",
            ),
            (
                lambda x: ({"a": x, "n": 1}, {"b": True}),
                "`out_batched` must be a prefix",
            ),
            (lambda x: ({"a": x, "n": 1}, 1), "`out_batched` is 1|`out_batched.*is 1"),
        ],
        ids=[
            "tree",
            "static",
            "size",
            "unbatched",
            "dtype",
            "axis",
            "flags",
            "1",
        ],
    )
    def test_rule_must_return_what_the_function_does(self, returned, message):
        f = eqx.filter_custom_vmap(lambda x: {"a": x, "n": 1})
        f.def_vmap(lambda n, batched, x: returned(x))
        for call in (eqx.filter_vmap(f), eqx.filter_jit(eqx.filter_vmap(f))):
            with pytest.raises(ValueError, match=message):
                call(jnp.ones((3, 2)))

    def test_rule_must_return_a_pair(self):
        f = eqx.filter_custom_vmap(lambda x: x)
        f.def_vmap(lambda n, batched, x: x)
        with pytest.raises(TypeError, match=r"pair `\(out, out_batched\)`.*\[3,2\]"):
            eqx.filter_vmap(f)(jnp.ones((3, 2)))


def test_name_and_documentation_are_those_of_the_function():
    @eqx.filter_custom_vmap
    def f(x):
        """Doc."""

    assert f.__name__ == "f" and f.__doc__ == "Doc."
    assert repr(f) == "<filter_custom_vmap of f>"


@pytest.mark.parametrize("stage", [jax.jit, jax.checkpoint])
def test_gradient_of_a_compiled_map_over_another_axis_than_the_first(stage):
    f, _ = with_rule(jnp.square)
    xs = jnp.arange(6.0).reshape(2, 3)
    mapped = stage(jax.vmap(f, in_axes=1))
    gradient = jax.grad(lambda xs: jnp.vdot(mapped(xs), jnp.arange(6.0).reshape(3, 2)))
    assert gradient(xs).tolist() == (2 * xs * jnp.arange(6.0).reshape(3, 2).T).tolist()


@pytest.mark.parametrize("stage", [jax.jit, jax.checkpoint])
def test_gradient_of_a_compiled_map_of_a_map(stage):
    matrix = jnp.arange(9.0).reshape(3, 3)
    f = eqx.filter_custom_vmap(lambda x: matrix @ x)
    f.def_vmap(lambda size, batched, xs: (jnp.stack([matrix @ x for x in xs]), True))
    xs = jnp.arange(18.0).reshape(3, 3, 2)

    def loss(mapped, xs):
        return jnp.vdot(mapped(xs), jnp.arange(18.0).reshape(3, 3, 2))

    mapped = jax.vmap(jax.vmap(f, in_axes=1, out_axes=1), in_axes=2, out_axes=2)
    wanted = jax.grad(lambda xs: loss(lambda xs: matrix @ xs.reshape(3, 6), xs))(xs)
    assert jax.grad(loss, 1)(stage(mapped), xs).tolist() == wanted.tolist()


def test_function_may_hold_constants_in_a_rule_for_reverse_mode():
    scale = jnp.asarray([1.0, 2.0])
    times = eqx.filter_custom_vjp(lambda x: scale * x)
    times.def_fwd(lambda perturbed, x: (scale * x, None))
    times.def_bwd(lambda residuals, cotangent, perturbed, x: 10 * scale * cotangent)
    f, _ = with_rule(times)
    assert jax.grad(lambda x: jnp.sum(f(x)))(jnp.ones(2)).tolist() == [10, 20]
