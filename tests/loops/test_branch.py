"""filter_cond and filter_switch: what is returned, and what two functions must agree on."""

import hypothesis.strategies as st
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


def double(tree):
    return jtu.tree_map(lambda x: 2 * x if eqx.is_inexact_array(x) else x, tree)


def branch(name, pred, f, g, *args):
    """The same choice by each of the two."""
    if name == "cond":
        return eqx.filter_cond(pred, f, g, *args)
    return eqx.filter_switch(jnp.asarray(pred, jnp.int32), [g, f], *args)


names = st.sampled_from(["cond", "switch"])


@few
@given(mixed_trees(), names, st.booleans(), nests(FORWARD))
def test_chosen_function_is_called(tree, name, pred, nest):
    out = nest(lambda x: branch(name, pred, mix, double, x))(tree)
    expected = mix(tree) if pred else double(tree)
    assert agree(out, [np.asarray(x) for x in inexact(expected)])
    assert same_statics(out, expected)


@few
@given(mixed_trees(3), names, st.booleans(), nests(REVERSE))
def test_gradient_is_that_of_the_chosen_function(tree, name, pred, nest):
    def loss(x):
        out = branch(name, jnp.asarray(pred), nest(mix), double, x)
        return sum(jnp.sum(y) for y in inexact(out))

    def plain(f, leaves):
        return sum(jnp.sum(y) for y in (f(leaves) if pred else double(leaves)))

    reference = in_float64(lambda f, x: jax.grad(plain, 1)(f, x), tree)
    assert agree(eqx.filter_grad(loss)(tree), reference)


def test_both_run_where_the_choice_is_mapped():
    f = lambda p, x: eqx.filter_cond(p, jnp.sin, jnp.cos, x)  # noqa: E731
    p, x = jnp.asarray([True, False]), jnp.arange(2.0)
    expected = jnp.where(p, jnp.sin(x), jnp.cos(x))
    assert jnp.allclose(eqx.filter_vmap(f)(p, x), expected)


def test_index_out_of_range_is_the_nearest():
    branches = [lambda i=i: jnp.asarray(i) for i in range(3)]
    out = [int(eqx.filter_switch(jnp.asarray(i), branches)) for i in (-5, 1, 7)]
    assert out == [0, 1, 2]


def test_modules_are_branches_and_arguments():
    two, three = Scale(jnp.asarray(2.0)), Scale(jnp.asarray([3.0]), "three")
    out = eqx.filter_switch(jnp.asarray(1), [two, three, jnp.sin], jnp.ones(1))
    assert out.tolist() == [3]
    out = eqx.filter_cond(True, lambda m, t: (m, t), lambda m, t: (m, t), two, "text")
    assert eqx.tree_equal(out[0], two) and out[1] == "text"


def test_numbers_that_differ_become_an_array():
    for pred in (True, False):
        out, same = eqx.filter_cond(pred, lambda: (1, 2), lambda: (3, 2))
        assert isinstance(out, jax.Array) and out == (1 if pred else 3)
        assert type(same) is int and same == 2
    out = eqx.filter_cond(False, lambda x: x, lambda x: 0.0, jnp.asarray(1.0))
    assert isinstance(out, jax.Array) and out == 0


def test_works_without_jit():
    with jax.disable_jit():
        out = eqx.filter_cond(
            jnp.asarray(False), mix, double, {"x": jnp.ones(2), "n": 1}
        )
    assert out["x"].tolist() == [2, 2] and out["n"] == 1


class TestErrors:
    @pytest.mark.parametrize(
        "other, message",
        [
            (lambda x: {"a": x, "b": "two"}, r"`output\['b'\]` is .*'one'.*'two'"),
            (lambda x: {"a": x[:1], "b": "one"}, r"`output\['a'\]`.*\[2\].*\[1\]"),
            (lambda x: {"a": x > 0, "b": "one"}, r"`output\['a'\]`.*float32.*bool"),
            (lambda x: {"a": x}, r"`output` is .*keys \['a', 'b'\].*keys \['a'\]"),
            (lambda x: None, r"`output` is a dict.*None"),
        ],
        ids=["static", "shape", "dtype", "keys", "none"],
    )
    def test_difference_is_named_by_its_path(self, other, message):
        f = lambda x: {"a": x, "b": "one"}  # noqa: E731
        with pytest.raises(TypeError, match=f"`true_fun` and `false_fun`.*{message}"):
            eqx.filter_cond(True, f, other, jnp.ones(2))
        with pytest.raises(
            TypeError, match=rf"`branches\[0\]` and `branches\[2\]`.*{message}"
        ):
            eqx.filter_switch(jnp.asarray(0), [f, f, other], jnp.ones(2))

    def test_difference_beside_numbers_is_named_all_the_same(self):
        with pytest.raises(TypeError, match=r"`output\[1\]`.*'a'.*'b'"):
            eqx.filter_cond(True, lambda: (1, "a"), lambda: (2, "b"))

    def test_error_of_a_branch_is_the_users(self):
        def bad(x):
            raise TypeError("mine")

        with pytest.raises(TypeError, match=r"^mine"):
            eqx.filter_cond(True, lambda x: x, bad, jnp.ones(2))

    def test_choice_that_is_no_scalar_is_jaxs_to_refuse(self):
        with pytest.raises(TypeError, match="scalar"):
            eqx.filter_cond(jnp.ones(2) > 0, lambda: (1, "a"), lambda: (2, "a"))

    def test_no_branches_are_refused(self):
        with pytest.raises(ValueError, match=r"[Ee]mpty|no branches"):
            eqx.filter_switch(jnp.asarray(0), [])


def test_no_tracer_is_kept():
    x = jnp.asarray(True)
    with jax.checking_leaks():
        out = eqx.filter_cond(x, lambda x: (x, 1), lambda x: (x, 2), x)
        assert out[1] == 1
        assert eqx.filter_switch(jnp.asarray(0), [lambda x: x], x)


@pytest.mark.parametrize("kind", ["varying", "split"])
def test_arrays_that_differ_only_in_the_mesh_are_named_with_the_fix(kind):
    types = jax.sharding.AxisType
    axis_type = types.Auto if kind == "varying" else types.Explicit
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axis_type,))

    def choose(x, y):
        return eqx.filter_cond(True, lambda x, y: {"a": x}, lambda x, y: {"a": y}, x, y)

    run, fix = jax.jit(choose), "jax.sharding.reshard"
    if kind == "varying":
        specs = {"in_specs": (jax.P("d"), jax.P()), "out_specs": jax.P("d")}
        run, fix = jax.shard_map(choose, mesh=mesh, **specs), "jax.lax.pcast"
        x, y = jnp.ones(4), jnp.ones(2)
    else:
        x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("d")))
        y = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P()))
    with pytest.raises(TypeError, match=rf"`output\['a'\]` is .* `{fix}"):
        jax.jit(run)(x, y)
