import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
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


def test_dtype_is_that_of_the_sum():
    model = [jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)]
    new = eqx.apply_updates(model, [jnp.ones(2, jnp.float32), None])
    assert [x.dtype for x in new] == [jnp.float32, jnp.bfloat16]


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
