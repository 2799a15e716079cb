"""filter_vmap: which arrays are mapped, and where the axis goes in the outputs."""

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings

import equinox_like as eqx


class Scale(eqx.Module):
    factor: Any
    name: str = eqx.field(static=True, default="scale")

    def __call__(self, x):
        return self.factor * x

    @eqx.filter_vmap
    def each(self, x):
        return self.factor * x


@settings(max_examples=40)
@given(st.data())
def test_equals_a_python_loop_for_all_axes(data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    in_axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    out_axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    f = eqx.filter_vmap(lambda x: 2 * x, in_axes=in_axis, out_axes=out_axis)
    slices = [2 * s for s in np.moveaxis(x, in_axis, 0)]
    expected = np.moveaxis(np.stack(slices), 0, out_axis)
    for mapped in (f, eqx.filter_jit(f), jax.vmap(lambda x: 2 * x, in_axis, out_axis)):
        out = mapped(jax.device_put(x))
        np.testing.assert_array_equal(out, expected, strict=True)


def test_by_default_arrays_are_mapped_and_the_rest_is_passed_on():
    marker = object()

    def f(tree, rest):
        assert rest is marker and tree["k"] == 3
        return tree["x"] * tree["k"], rest, tree["k"]

    out, rest, k = eqx.filter_vmap(f)({"x": jnp.ones((2, 3)), "k": 3}, marker)
    assert out.shape == (2, 3) and rest is marker and k == 3


def test_ensemble_is_made_and_called():
    make = eqx.filter_vmap(lambda key: Scale(jax.random.normal(key, (3,)), name="one"))
    ensemble = make(jax.random.split(jax.random.key(0), 4))
    assert ensemble.factor.shape == (4, 3) and ensemble.name == "one"
    out = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(
        ensemble, jnp.ones(3)
    )
    assert jnp.array_equal(out, ensemble.factor)


def test_arrays_of_the_callable_are_not_mapped():
    assert eqx.filter_vmap(Scale(jnp.ones(3)))(jnp.ones((2, 3))).shape == (2, 3)


def test_methods_map_the_instance_as_the_first_argument():
    assert Scale(jnp.arange(3.0)).each(jnp.ones(3)).tolist() == [0, 1, 2]


def test_axes_by_name_leave_the_others_at_the_default():
    def f(a, b, *rest):
        return a + b

    a, b = jnp.ones(3), jnp.ones((3, 2))
    assert eqx.filter_vmap(f, in_axes={"a": None})(a, b.T).shape == (2, 3)
    assert eqx.filter_vmap(f, in_axes={"b": 1})(jnp.ones(2), b, a[:2]).shape == (2, 3)


def test_axes_by_name_take_keyword_arguments():
    def f(a, b, *, c=1, **extra):
        return a + b + c + extra.get("d", 0)

    x, y, s = jnp.ones(3), jnp.ones((2, 3)), jnp.asarray(1.0)
    by_name = eqx.filter_vmap(f, in_axes={"b": 1, "c": None, "d": lambda leaf: 0})
    expected = jax.vmap(lambda a, b, d: a + b + 1 + d, (0, 1, 0))(x, y, x)
    assert eqx.tree_equal(by_name(x, y, c=s, d=x), expected)
    assert eqx.tree_equal(by_name(b=y, a=x, d=x, c=s), expected)
    assert eqx.tree_equal(eqx.filter_jit(by_name)(x, b=y, c=s, d=x), expected)
    everything_mapped = eqx.filter_vmap(f, in_axes={})
    assert everything_mapped(x, b=x, c=2).tolist() == [4, 4, 4]


def test_keyword_arguments_are_named_in_errors():
    f = eqx.filter_vmap(lambda a, *, model: a, in_axes={"a": 1})
    with pytest.raises(
        ValueError, match=r"`a` has size 3 along axis 1, `model.factor` has size 2"
    ):
        f(jnp.ones((1, 3)), model=Scale(jnp.ones(2)))
    with pytest.raises(
        ValueError, match=r"`model.factor` has shape \(\), so it has no axis"
    ):
        f(jnp.ones((1, 3)), model=Scale(jnp.asarray(1.0)))
    with pytest.raises(ValueError, match=r"names \['other'\].*\['a', 'model'\]"):
        eqx.filter_vmap(lambda a, *, model: a, in_axes={"other": 0})(
            jnp.ones(2), model=None
        )
    with pytest.raises(TypeError, match="missing"):
        f(jnp.ones((1, 3)))


@pytest.mark.parametrize("name", ["unknown", "rest", "c"])
def test_unknown_name_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=rf"{name}.*\['a', 'b'\]"):
        eqx.filter_vmap(lambda a, b, *rest, c=1: a, in_axes={name: 0})(
            jnp.ones(2), jnp.ones(2)
        )


def test_prefix_trees_and_callables_choose_axes():
    tree = {"x": jnp.ones((2, 3)), "y": [jnp.ones((3, 2)), "text"]}
    seen = []

    def f(tree):
        seen.append((tree["x"].shape, tree["y"][0].shape, tree["y"][1]))
        return tree

    by_rank = lambda leaf: 1 if eqx.is_array(leaf) else None  # noqa: E731
    out = eqx.filter_vmap(f, in_axes=({"x": 0, "y": by_rank},))(tree)
    assert seen == [((3,), (3,), "text")] and out["y"][0].shape == (2, 3)


def test_output_without_a_batch_may_be_returned_once():
    f = eqx.filter_vmap(
        lambda x, y: (x, y, "text"), in_axes=(0, None), out_axes=(0, None, None)
    )
    out = f(jnp.ones((2, 3)), jnp.ones(4))
    assert out[0].shape == (2, 3) and out[1].shape == (4,) and out[2] == "text"
    broadcast = eqx.filter_vmap(lambda x, y: y, in_axes=(0, None))(
        jnp.ones(2), jnp.ones(4)
    )
    assert broadcast.shape == (2, 4)
    assert eqx.filter_vmap(lambda x: 1.0, out_axes=0)(jnp.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("axis_name", [None, "batch"])
def test_batched_output_cannot_be_returned_once(axis_name):
    depends = r"`<lambda>`: `out` \(float32\[\]\) depends on a mapped argument"
    with pytest.raises(ValueError, match=depends):
        eqx.filter_vmap(lambda x: x, out_axes=None, axis_name=axis_name)(jnp.ones(2))
    out_axes = (0, {"a": 0, "b": None})
    f = eqx.filter_vmap(
        lambda x: (x, {"a": 1, "b": [2, x]}), out_axes=out_axes, axis_name=axis_name
    )
    with pytest.raises(ValueError, match=r"`out\[1\]\['b'\]\[1\]` .* depends on"):
        f(jnp.ones(2))


def test_error_of_the_function_is_raised_once():
    calls = []

    def fail(x):
        calls.append(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        eqx.filter_vmap(fail)(jnp.ones(2))
    assert len(calls) == 1


def test_error_of_a_vmap_within_is_left_alone():
    f = eqx.filter_vmap(lambda x: jax.vmap(lambda y: (y, [y]), out_axes=(0, None))(x))
    with pytest.raises(ValueError, match=r"at vmap out_axes\[1\]\[0\]"):
        f(jnp.ones((2, 2)))


def test_bool_as_an_axis_is_refused():
    for axes in {"in_axes": True}, {"out_axes": False}, {"in_axes": (lambda _: True,)}:
        (option,) = axes
        with pytest.raises(TypeError, match=f"leaves of `{option}` must be ints"):
            eqx.filter_vmap(lambda x: x, **axes)(jnp.ones(2))


def test_axes_by_name_fit_a_wrapper_with_fewer_parameters():
    def both(x, y):
        return x + y

    @functools.wraps(both)
    def one(x):
        return both(x, 1)

    assert eqx.filter_vmap(one, in_axes={"x": 0})(jnp.ones(2)).tolist() == [2, 2]


def test_axis_size_replicates():
    assert eqx.filter_vmap(lambda: jnp.ones(2), axis_size=3)().shape == (3, 2)
    out = eqx.filter_vmap(lambda x: x, in_axes=None, axis_size=3)(jnp.ones(2))
    assert out.shape == (3, 2)


def test_function_without_arrays_is_repeated_as_often_as_a_size_says(
    without_type_checks,
):
    # The MLP of klax does this with its `out_size`.
    assert eqx.filter_vmap(lambda: jnp.tanh, axis_size="scalar")() is jnp.tanh
    with pytest.raises(TypeError, match="`axis_size` must be an integer; got 'scalar'"):
        eqx.filter_vmap(lambda: jnp.ones(2), axis_size="scalar")()


@pytest.mark.parametrize("transform", [eqx.filter_vmap, eqx.filter_pmap])
def test_axis_size_is_an_integer(transform, without_type_checks):
    function = transform(lambda: 1.0, out_axes=None, axis_size=jnp.array(1))
    assert function() == 1.0
    name = transform.__name__
    with pytest.raises(TypeError, match=f"`{name}`: `axis_size` must be an integer"):
        transform(lambda: 1.0, axis_size=3.0)
    with pytest.raises(ValueError, match=f"`{name}`: `axis_size` must be at least 0"):
        transform(lambda: 1.0, axis_size=-1)


@pytest.mark.parametrize("transform", [eqx.filter_vmap, eqx.filter_pmap])
@pytest.mark.parametrize("options", [{}, {"in_axes": (None, 0)}, {"in_axes": {}}])
def test_missing_argument_is_named_before_sizes_and_prefixes(transform, options, key):
    model = eqx.nn.MLP(2, 3, 4, 1, key=key)
    mapped = transform(lambda model, x: model(x), **options)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        mapped(model)


def test_axes_of_a_builtin_function_are_compared_without_a_signature():
    with pytest.raises(ValueError, match=r"`args\[1\]` has size 3 along axis 0"):
        eqx.filter_vmap(max)(jnp.ones(2), jnp.ones(3))


def test_nothing_mapped_runs_once_if_nothing_asks_for_a_batch():
    f = eqx.filter_vmap(lambda x: x, in_axes=None, out_axes=None)
    assert f(jnp.ones(2)).shape == (2,)
    with pytest.raises(ValueError, match="batch dimension"):
        eqx.filter_vmap(lambda x: x, in_axes=None)(jnp.ones(2))


def test_axis_name_is_known_to_collectives():
    out = eqx.filter_vmap(lambda x: jax.lax.psum(x, "batch"), axis_name="batch")(
        jnp.arange(3.0)
    )
    assert out.tolist() == [3, 3, 3]


def test_other_options_reach_jax():
    f = eqx.filter_vmap(lambda x: x, spmd_axis_name="d")
    assert f(jnp.ones(2)).shape == (2,)
    with pytest.raises(TypeError, match="unknown"):
        eqx.filter_vmap(lambda x: x, unknown=1)(jnp.ones(2))


def test_works_under_and_over_other_transformations():
    f = eqx.filter_vmap(eqx.filter_grad(lambda m, x: m(x).sum()), in_axes=(None, 0))
    gradient = eqx.filter_jit(f)(Scale(jnp.ones(3)), jnp.ones((2, 3)))
    assert gradient.factor.shape == (2, 3)
    loss = eqx.filter_grad(lambda m, x: eqx.filter_vmap(m)(x).sum())
    assert loss(Scale(jnp.ones(3)), jnp.ones((2, 3))).factor.tolist() == [2, 2, 2]
    nested = eqx.filter_vmap(eqx.filter_vmap(lambda x: x + 1))
    assert nested(jnp.ones((2, 3))).shape == (2, 3)


@pytest.mark.parametrize("disabled", [False, True])
def test_gradients_of_maps_agree_without_jit(disabled):
    @eqx.filter_jit
    def f(m, x):
        loss = eqx.filter_grad(lambda m, x: eqx.filter_vmap(m)(x).sum())
        return loss(m, x).factor

    with jax.disable_jit(disabled):
        out = f(Scale(jnp.ones(3)), jnp.ones((2, 3)))
    assert out.tolist() == [2, 2, 2]


class TestErrors:
    def test_sizes_that_differ_are_named_with_their_arguments(self):
        def f(model, x):
            return x

        with pytest.raises(
            ValueError,
            match=r"`model.factor` has size 2 along axis 0.*`x\[0\]` has size 3",
        ):
            eqx.filter_vmap(f)(Scale(jnp.ones(2)), [jnp.ones(3), "text"])
        with pytest.raises(ValueError, match="axis_size is 4"):
            eqx.filter_vmap(f, axis_size=4)(Scale(jnp.ones(2)), None)

    def test_sizes_that_differ_are_named_once_for_each_argument(self):
        def f(model, state, x, *more):
            return x

        model = [Scale(jnp.ones(2)), Scale(jnp.ones(2)), Scale(jnp.ones((2, 3)))]
        with pytest.raises(ValueError) as info:
            eqx.filter_vmap(f)(model, model[:2], jnp.ones(3), jnp.ones(3))
        assert str(info.value) == (
            "`filter_vmap` of `f`: the sizes of the mapped axes differ: "
            "`model[0].factor` and 2 more arrays of `model` have size 2 along axis 0, "
            "`state[0].factor` and 1 more array of `state` have size 2 along axis 0, "
            "`x` has size 3 along axis 0, `more[0]` has size 3 along axis 0. In "
            "`in_axes`, write `None` for an argument that is not mapped."
        )

    def test_axis_out_of_range_is_named_with_its_argument(self):
        with pytest.raises(
            ValueError, match=r"`x` has shape \(\), so it has no axis 0"
        ):
            eqx.filter_vmap(lambda x: x)(jnp.ones(()))
        # As if the state of an optimiser was made from a whole ensemble.
        state = {"count": jnp.asarray(0), "mu": jnp.ones((3, 2))}
        with pytest.raises(ValueError, match=r"or make `s` by `filter_vmap`, too"):
            eqx.filter_vmap(lambda m, s: (m, s))(jnp.ones((3, 2)), state)
        with pytest.raises(ValueError, match=r"`args\[1\]`.*no axis 2"):
            eqx.filter_vmap(lambda *args: args, in_axes=(0, 2))(
                jnp.ones(2), jnp.ones((2, 2))
            )

    def test_keyword_arguments_are_refused(self):
        with pytest.raises(RuntimeError, match=r"keyword arguments \(x\).*dictionary"):
            eqx.filter_vmap(lambda x: x)(x=jnp.ones(2))

    @pytest.mark.parametrize("bad", ["text", 1.5])
    def test_other_axes_are_refused_by_their_path(self, bad):
        with pytest.raises(ValueError, match=r"in_axes\[0\]\['a'\]"):
            eqx.filter_vmap(lambda x: x, in_axes=({"a": bad},))({"a": jnp.ones(2)})
        with pytest.raises(TypeError, match="in_axes"):
            eqx.filter_vmap(lambda x: x, in_axes=lambda leaf: bad)(jnp.ones(2))

    def test_axis_for_what_is_not_an_array_is_refused_with_its_path(self):
        call = eqx.filter_vmap(lambda model, x: model["f"](x), in_axes=(0, None))
        message = (
            r"`model\['f'\]` is .*, not an array.*write `equinox_like.if_array\(0\)`"
        )
        with pytest.raises(TypeError, match=message):
            call({"f": jnp.tanh, "weight": jnp.ones(2)}, jnp.ones(2))

    def test_list_in_place_of_the_tuple_is_refused(self):
        with pytest.raises(ValueError):
            eqx.filter_vmap(lambda x: x, in_axes=[0])(jnp.ones(2))

    def test_string_under_an_output_axis_is_refused_by_its_path(self):
        with pytest.raises(TypeError, match=r"`out\['a'\]` is a str"):
            eqx.filter_vmap(lambda x: {"a": "text"}, out_axes=0)(jnp.ones(2))

    @pytest.mark.parametrize("axis", [2, -3])
    @pytest.mark.parametrize("transform", [eqx.filter_vmap, eqx.filter_pmap])
    def test_output_axis_out_of_range_is_refused_by_its_path(self, transform, axis):
        f = transform(lambda x: {"a": x, "b": x[0]}, out_axes={"a": axis, "b": 0})
        with pytest.raises(ValueError, match=rf"`out\['a'\]` the batch axis {axis},"):
            f(jnp.ones((1, 3)))

    def test_deprecated_arguments_and_what_cannot_be_called_are_refused(self):
        with pytest.raises(ValueError, match="deprecated"):
            eqx.filter_vmap(lambda x: x, default=0)
        with pytest.raises(TypeError, match="in_axis"):
            eqx.filter_vmap(lambda x: x, in_axis=0)
        with pytest.raises(TypeError, match="wraps a function"):
            eqx.filter_vmap(3)


def test_if_array_is_a_value():
    assert eqx.if_array(1) == eqx.if_array(1) != eqx.if_array(0)
    assert hash(eqx.if_array(1)) == hash(eqx.if_array(1))
    assert repr(eqx.if_array(1)) == "if_array(axis=1)"
    assert jtu.tree_leaves(eqx.if_array(1)) == [eqx.if_array(1)]
    assert eqx.if_array(1)(np.ones(2)) == 1 and eqx.if_array(1)("text") is None


def test_no_tracer_is_kept():
    with jax.checking_leaks():
        out = eqx.filter_vmap(lambda x: (2 * x, "static"))(jnp.ones(2))
    assert out[1] == "static"
