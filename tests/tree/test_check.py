import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from strategies import Node, Pair, trees

import equinox_like as eqx


class Empty(eqx.Module):
    tag: str = eqx.field(static=True, default="tag")


def refused(tree, *texts):
    with pytest.raises(ValueError) as info:
        eqx.tree_check(tree)
    for text in texts:
        assert text in str(info.value)


# tree_check


@given(trees())
def test_tree_of_fresh_arrays_and_nodes_passes(tree):
    # Unflattening makes the nodes anew, the copy the arrays.
    eqx.tree_check(eqx.tree_copy(jtu.tree_map(lambda x: x, tree)))


@given(trees())
def test_tree_beside_itself_is_refused(tree):
    node = [eqx.tree_copy(tree)]
    refused([0, node, {"again": node}], "`pytree[1]`", "`pytree[2]['again']`")


@pytest.mark.parametrize("module", [np, jnp], ids=["numpy", "jax"])
def test_tied_array_is_refused_by_both_paths(module):
    array = module.ones((2, 3), module.float32)
    model = [Node({"w": array}), Pair(0, Node(None, (array,)))]
    refused(
        model, "float32[2, 3]", "`pytree[0].child['w']`", "`pytree[1].second.other[0]`"
    )
    eqx.tree_check(eqx.tree_at(lambda m: m[0].child["w"], model, module.ones((2, 3))))


def test_tied_key_and_tied_tracer_are_refused():
    key = jax.random.key(0)
    refused((key, key), "key<fry>[]", "`pytree[0]`", "`pytree[1]`")
    jax.jit(lambda x: refused({"a": x, "b": x}, "`pytree['a']`", "`pytree['b']`"))(1.0)


def test_what_has_no_identity_may_repeat():
    number, empty, text = np.float32(1), Empty(), "text"
    eqx.tree_check([7, 7, None, None, number, number, text, text, jnp.tanh, jnp.tanh])
    eqx.tree_check([empty, empty, (), (), *[[]] * 2, *[{}] * 2])
    eqx.tree_check([jnp.ones(2), jnp.ones(2)])
    eqx.tree_check(jnp.ones(2))
    eqx.tree_check(None)


@pytest.mark.parametrize(
    "node", [[1], (1,), {"a": 1}, Node(1), Pair(1, 2), [[]], jtu.Partial(max, 1)]
)
def test_node_at_two_places_is_refused_by_its_type_and_both_paths(node):
    name = type(node).__qualname__
    refused({"a": [node], "b": node}, name, "`pytree['a'][0]`", "`pytree['b']`")


def test_container_of_itself_is_refused():
    items = [1]
    items.append(items)
    refused(items, "list", "`pytree`", "`pytree[1]`", "contains itself")
    refused({"a": (items,)}, "list", "`pytree['a'][0]`", "`pytree['a'][0][1]`")


def test_longer_cycles_are_refused():
    table = {}
    table["a"] = [0, (table,)]
    refused(table, "dict", "`pytree`", "`pytree['a'][1][0]`", "contains itself")
    refused([table], "`pytree[0]`", "`pytree[0]['a'][1][0]`", "contains itself")
    module = Node([0])
    module.child.append(module)
    refused(module, "Node", "`pytree.child[1]`", "contains itself")
    method = eqx.Partial(max, [])
    method.args[0].append(jtu.Partial(max, method))
    refused(method, "`pytree`", "`pytree.args[0][0]", "contains itself")


def test_deep_trees_pass():
    tree = jnp.ones(2)
    for _ in range(400):
        tree = [tree]
    eqx.tree_check(tree)


# tree_flatten_one_level


def is_leaf_structure(treedef):
    return all(map(jtu.treedef_is_leaf, treedef.children()))


@given(trees())
def test_children_put_together_again_give_the_tree(tree):
    children, treedef = eqx.tree_flatten_one_level(tree)
    again = treedef.unflatten(children)
    assert jtu.tree_structure(again) == jtu.tree_structure(tree)
    assert all(map(lambda a, b: a is b, jtu.tree_leaves(again), jtu.tree_leaves(tree)))
    assert treedef.num_leaves == len(children)
    assert is_leaf_structure(treedef) or jtu.treedef_is_leaf(treedef)


def test_children_are_those_of_the_top_node():
    inner = [1, 2]
    children, _ = eqx.tree_flatten_one_level({"b": inner, "a": None, "c": inner})
    assert children[0] is None and children[1] is inner and children[2] is inner
    assert eqx.tree_flatten_one_level(Node(inner, None))[0] == [inner, None]


def test_leaf_is_its_own_child_and_an_empty_node_has_none():
    assert eqx.tree_flatten_one_level(3) == ([3], jtu.tree_structure(3))
    for empty in (None, (), [], {}, Empty()):
        children, treedef = eqx.tree_flatten_one_level(empty)
        assert children == [] and treedef == jtu.tree_structure(empty)


def test_child_of_its_own_is_refused_and_a_longer_cycle_is_not():
    items = [1]
    items.append(items)
    with pytest.raises(ValueError, match="list is its own child"):
        eqx.tree_flatten_one_level(items)
    outer = []
    outer.append([outer])
    assert eqx.tree_flatten_one_level(outer)[0][0] is outer[0]
