"""The laws of taking trees apart: that it loses nothing, and that skeletons are strict."""

import argparse
import dataclasses
import pickle
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given
from strategies import Node, numbers, reference_same, trees

import equinox_like as eqx
from equinox_like._tree.partitioning import leaf_names


def label(x):
    if not eqx.is_array(x):
        return eqx.internal.STATIC
    return "inexact" if eqx.is_inexact_array(x) else "other"


@given(trees())
def test_merge_undoes_split_with_the_identical_leaves(tree):
    again = eqx.internal.merge(*eqx.internal.split(tree, label))
    leaves, treedef = jtu.tree_flatten(tree)
    new_leaves, new_treedef = jtu.tree_flatten(again)
    assert treedef == new_treedef
    assert all(a is b for a, b in zip(leaves, new_leaves, strict=True))


@given(trees(), trees())
def test_equal_skeletons_have_the_same_static_leaves(a, b):
    (_, one), (_, two) = eqx.internal.split(a, label), eqx.internal.split(b, label)
    _, again = eqx.internal.split(jtu.tree_map(lambda x: x, a), label)
    assert one == again and hash(one) == hash(again)
    if one == two:
        assert hash(one) == hash(two)
        assert all(map(reference_same, one.statics, two.statics))


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    logger: Any = dataclasses.field(default=None, compare=False)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda x: x),
        (lambda x: [Node(0, x)], lambda x: x[0].other),
        (lambda x: Node(0, tag=x), lambda x: x.tag),
    ],
)
def test_leaf_that_equals_an_earlier_one_is_not_replaced_by_it(wrap, unwrap):
    first, second = wrap(Named("a", "first")), wrap(Named("a", "second"))
    _, one = eqx.internal.split(first, label)
    groups, two = eqx.internal.split(second, label)
    assert one == two and unwrap(eqx.internal.merge(groups, two)).logger == "second"

    for tree, logger in ((first, "first"), (second, "second")):
        assert eqx.filter_jit(lambda x: unwrap(x).logger)(tree) == logger


@given(
    st.lists(numbers, min_size=1, max_size=3), st.lists(numbers, min_size=1, max_size=3)
)
def test_skeletons_tell_numbers_apart_in_leaves_and_static_fields(a, b):
    same = reference_same(a, b)
    for wrap in (
        lambda x: x,
        lambda x: Node(0, tag=x),
        lambda x: Node(0, tag={"a": (x,)}),
    ):
        (_, one), (_, two) = (
            eqx.internal.split(wrap(a), label),
            eqx.internal.split(wrap(b), label),
        )
        assert (one == two) == same


def test_error_for_a_configuration_says_how_it_gets_a_hash():
    @dataclasses.dataclass
    class Config:
        size: int

    for config in Config(2), argparse.Namespace(size=2):
        match = (
            rf"`\['c'\]` is a {type(config).__name__}.* dataclass with `frozen=True`"
        )
        with pytest.raises(ValueError, match=match):
            eqx.internal.split({"c": config}, lambda x: eqx.internal.STATIC)
    for config in dataclasses.make_dataclass("C", "a", frozen=True)(2), {"size": 2}:
        eqx.internal.split({"c": config}, lambda x: eqx.internal.STATIC)


@pytest.mark.parametrize("where", ["leaf", "label"])
def test_what_cannot_be_hashed_is_refused(where):
    tree = {"model": [1, {"deep": (2, set())}]}
    if where == "leaf":
        match = r"\['model'\]\[1\]\['deep'\]\[1\].* set.* derive it from `Module`"
        with pytest.raises(ValueError, match=match):
            eqx.internal.split(tree, lambda x: eqx.internal.STATIC)
    else:
        with pytest.raises(TypeError, match="unhashable"):
            eqx.internal.split(tree, lambda x: [])


def test_other_values_may_stand_in_for_the_leaves():
    groups, skeleton = eqx.internal.split([jnp.ones(2), "text", 3], label)
    assert groups.keys() == {"inexact"}
    assert eqx.internal.merge({"inexact": ["new"]}, skeleton) == ["new", "text", 3]


@pytest.mark.parametrize(
    "groups", [{}, {"inexact": []}, {"inexact": [1, 2]}, {"inexact": [1], "more": [2]}]
)
def test_merging_other_groups_is_refused(groups):
    _, skeleton = eqx.internal.split([jnp.ones(2)], label)
    with pytest.raises(ValueError, match=r"'inexact': 1"):
        eqx.internal.merge(groups, skeleton)


def test_is_leaf_decides_what_is_split():
    groups, skeleton = eqx.internal.split(
        [(1, 2)], lambda x: "pair", lambda x: type(x) is tuple
    )
    assert groups == {"pair": [(1, 2)]}
    assert eqx.internal.merge(groups, skeleton) == [(1, 2)]


def test_skeleton_is_a_static_argument_of_jax():
    traces = []

    def double(data, skeleton):
        traces.append(skeleton)
        return jax.tree.map(
            lambda x: 2 * x, eqx.internal.merge({"data": data}, skeleton)["x"]
        )

    jitted = jax.jit(double, static_argnums=1)
    for tag in (1, 1, True, 1.0, 1):
        tree = {"x": jnp.ones(2), "tag": tag}
        groups, skeleton = eqx.internal.split(
            tree, lambda x: "data" if eqx.is_array(x) else eqx.internal.STATIC
        )
        assert jitted(groups["data"], skeleton).tolist() == [2, 2]
    assert len(traces) == 3


def test_skeleton_is_immutable():
    _, skeleton = eqx.internal.split([1], label)
    with pytest.raises(AttributeError, match="cannot assign to field 'statics'"):
        skeleton.statics = ()


def test_unpickled_skeleton_is_equal():
    _, skeleton = eqx.internal.split({"a": [jnp.ones(2), 3]}, label)
    again = pickle.loads(pickle.dumps(skeleton))
    assert again == skeleton and hash(again) == hash(skeleton)


def double(x):
    return 2 * x


def test_skeleton_of_a_tree_with_a_compiled_function_is_unpickled():
    _, skeleton = eqx.internal.split([eqx.filter_jit(double), 3], label)
    again = pickle.loads(pickle.dumps(skeleton))
    assert again == skeleton and hash(again) == hash(skeleton)
    assert eqx.internal.merge({}, again)[0](2) == 4


@jtu.register_pytree_node_class
@dataclasses.dataclass
class Checked:
    """A node that takes numbers only."""

    x: Any

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(float(children[0]))


def test_skeleton_of_a_node_that_takes_no_placeholders_is_unpickled():
    _, skeleton = eqx.internal.split(Checked(1.0), label)
    again = pickle.loads(pickle.dumps(skeleton))
    assert again == skeleton and eqx.internal.merge({}, again) == Checked(1.0)


def test_unpickled_label_for_static_is_the_same_object():
    assert pickle.loads(pickle.dumps(eqx.internal.STATIC)) is eqx.internal.STATIC


def test_values_that_split_when_they_are_compared():
    class Value:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            eqx.internal.split((1, "inner"), lambda x: eqx.internal.STATIC)
            return self is other

    for _ in range(3):
        _, skeleton = eqx.internal.split(Value(), lambda x: eqx.internal.STATIC)
        assert skeleton.statics


def test_leaves_of_a_node_whose_aux_data_equal_only_themselves_have_names():
    class Node:
        def __init__(self, x):
            self.x = x

    def flatten(node):
        return ((jtu.GetAttrKey("x"), node.x),), object()

    jtu.register_pytree_with_keys(Node, flatten, lambda _, children: Node(*children))
    treedef = jtu.tree_structure([Node(1), Node((2, 3))])
    assert leaf_names(treedef, "m") == ["m[0].x", "m[1].x[0]", "m[1].x[1]"]
