import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from hypothesis import given
from strategies import trees

import equinox_like as eqx


class Affine(eqx.Module):
    weight: object
    bias: object = None
    name: object = eqx.field(static=True, default="affine")


@given(trees())
def test_without_updates_the_leaves_are_the_identical_ones(tree):
    updates = jtu.tree_map(lambda _: None, tree)
    new = eqx.apply_updates(tree, updates)
    leaves, treedef = jtu.tree_flatten(tree)
    new_leaves, new_treedef = jtu.tree_flatten(new)
    assert treedef == new_treedef
    assert all(a is b for a, b in zip(leaves, new_leaves, strict=True))


@given(trees())
def test_inexact_arrays_are_added_and_all_else_is_kept(tree):
    updates = eqx.filter(tree, eqx.is_inexact_array)
    new = eqx.apply_updates(tree, updates)
    for x, y in zip(jtu.tree_leaves(tree), jtu.tree_leaves(new), strict=True):
        if eqx.is_inexact_array(x):
            assert y.dtype == x.dtype and jnp.array_equal(y, x + x)
        else:
            assert y is x


def test_none_in_updates_keeps_a_whole_subtree():
    model = {"a": [1, (2, object())], "b": 3}
    new = eqx.apply_updates(model, {"a": None, "b": 4})
    assert new == {"a": model["a"], "b": 7}
    assert new["a"] is model["a"]


FLOATING = ["float16", "bfloat16", "float32", "float64"]
RATE = 0.125


@pytest.mark.parametrize("wide", [*FLOATING, "complex64"])
@pytest.mark.parametrize("narrow", [*FLOATING, "complex64", "complex128"])
@pytest.mark.parametrize("xp", [np, jnp])
def test_each_array_keeps_its_dtype(narrow, wide, xp):
    if wide == "complex64" and "complex" not in narrow:
        return  # an error: see below
    with jax.enable_x64(True):
        model = {"a": xp.ones(2, narrow), "b": xp.ones(2, narrow)}
        new = eqx.apply_updates(model, {"a": xp.full(2, RATE, wide), "b": None})
        assert new["a"].dtype == narrow and (new["a"] == 1 + RATE).all()
        assert new["b"] is model["b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: optax.sgd(rate),
        lambda rate: optax.sgd(rate, momentum=0.9, accumulator_dtype=jnp.float32),
        lambda rate: optax.adam(rate, mu_dtype=jnp.float32),
        lambda rate: optax.adamw(rate),
        lambda rate: optax.lion(rate),
        lambda rate: optax.rmsprop(rate),
        lambda rate: optax.adafactor(rate),
        lambda rate: optax.lamb(rate),
        lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(rate)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_weak", [False, True])
def test_step_of_any_optimiser_is_traced_once_and_changes_no_dtype(
    make, dtype, is_weak
):
    optimiser, traces = make(jnp.float32(1e-2)), []
    model = Affine(jnp.ones((4, 4), dtype), jnp.zeros(4, dtype))
    model = {"linear": model, "scale": jnp.asarray(1.0, None if is_weak else dtype)}
    state = optimiser.init(model)

    def loss(model):
        linear = model["linear"]
        return jnp.sum(
            model["scale"] * (linear.weight @ jnp.ones(4) + linear.bias) ** 2
        )

    @eqx.filter_jit
    def step(model, state):
        traces.append(None)
        updates, _ = optimiser.update(eqx.filter_grad(loss)(model), state, model)
        return eqx.apply_updates(model, updates)

    new = step(model, state)
    step(new, state)
    assert len(traces) == 1
    for before, after in zip(jtu.tree_leaves(model), jtu.tree_leaves(new), strict=True):
        assert jax.typeof(after) == jax.typeof(before)
        assert not jnp.array_equal(before, after)


@pytest.mark.parametrize("ones", [jnp.ones, np.ones])
@pytest.mark.parametrize(
    ("dtype", "update"),
    [("float32", 1j), ("int32", 0.5), ("int32", 1j), ("bool", 1), ("bool", 0.5)],
)
def test_sum_that_the_dtype_cannot_hold_is_refused_by_its_path(ones, dtype, update):
    model = {"a": [ones(2, dtype)]}
    message = rf"model\['a'\]\[0\].* which {dtype} cannot hold. Pass `update.real`"
    with pytest.raises(TypeError, match=message):
        eqx.apply_updates(model, {"a": [ones(2) * update]})


def test_integers_are_kept_where_their_derivative_is_float0():
    model = {"w": jnp.ones(2), "steps": jnp.arange(2)}
    loss = lambda model: jnp.sum(model["w"] * model["steps"])  # noqa: E731
    grads = jax.grad(loss, allow_int=True)(model)
    new = eqx.apply_updates(model, grads)
    assert new["steps"] is model["steps"] and new["w"].tolist() == [1, 2]
    counted = eqx.apply_updates(model, {"w": None, "steps": jnp.ones(2, jnp.int8)})
    assert counted["steps"].dtype == jnp.int32 and counted["steps"].tolist() == [1, 2]


def test_gradients_of_a_module_are_accepted():
    model = Affine(jnp.ones(2), jax.nn.relu)
    grads = eqx.filter_grad(lambda m: jnp.sum(m.weight**2))(model)
    new = eqx.apply_updates(model, grads)
    assert jnp.array_equal(new.weight, 3 * jnp.ones(2))
    assert new.bias is jax.nn.relu and new.name == "affine"


def test_anything_with_plus_can_be_updated():
    assert eqx.apply_updates(["a", 1, True], ["b", 2.5, 1]) == ["ab", 3.5, 2]


def test_structure_mismatch_is_a_value_error_with_the_path():
    with pytest.raises(ValueError, match=r"\['a'\]"):
        eqx.apply_updates({"a": [1, 2]}, {"a": [1]})
    with pytest.raises(ValueError, match="dict"):
        eqx.apply_updates([1], {"a": 1})


def test_update_of_a_none_is_refused_by_its_path():
    with pytest.raises(TypeError, match=r"updates\.bias.*model\.bias.*NoneType"):
        eqx.apply_updates(Affine(1.0, None), Affine(1.0, 1.0))


def test_number_against_a_container_is_refused_by_its_path():
    with pytest.raises(TypeError, match=r"model\['a'\]`, a tuple"):
        eqx.apply_updates({"a": (1, 2)}, {"a": 3})
    with pytest.raises(TypeError, match=r"model\['a'\]`, a list.*the same structure"):
        eqx.apply_updates({"a": [np.ones(3)] * 2}, {"a": np.ones(3)})


def test_shapes_that_do_not_add_are_refused_by_their_path():
    with pytest.raises(TypeError, match=r"model\[1\].*\(2,\).*\(3,\)"):
        eqx.apply_updates([1, jnp.ones(2)], [1, jnp.ones(3)])
    with pytest.raises(TypeError, match=r"model\[1\].*\(2,\).*\(3,\)"):
        eqx.apply_updates([1, np.ones(2)], [1, np.ones(3)])


@pytest.mark.parametrize("ones", [jnp.ones, np.ones])
def test_update_that_changes_the_shape_is_refused_by_its_path(ones):
    # As from the state of an optimiser that was made for a whole ensemble.
    with pytest.raises(TypeError, match=r"model\['w'\].*sum has shape \(3, 4, 2\)"):
        eqx.apply_updates({"w": ones((4, 2))}, {"w": ones((3, 4, 2))})
    assert eqx.apply_updates(ones((4, 2)), ones(2)).shape == (4, 2)
