"""New instances find the structures of earlier ones, and never that of another node."""

import collections
import gc
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from strategies import Node, leaves, same, static_leaves, trees

import equinox_like as eqx
from equinox_like._jit.layout import LayoutTable
from equinox_like._tree import registry as registries
from equinox_like._tree.registry import _MOST_KNOWN, OwnRegistry, registry

pytestmark = pytest.mark.skipif(
    not isinstance(registry, OwnRegistry), reason="there are no structures"
)

structure_of = registry.structure_of


class Layer(eqx.Module):
    weight: Any
    rate: Any = 0.5
    size: Any = eqx.field(static=True, default=3)


@given(trees(leaves))
def test_mapped_nodes_have_the_structure_and_the_children_of_the_first(tree):
    node = Layer(Node(tree, tree), tree)
    expected, structure = node._flat_
    mapped = jax.tree.map(lambda x: x, node)
    children, found = mapped._flat_
    assert found is structure and all(
        map(same, *map(jax.tree.leaves, (children, expected)))
    )


CONFUSABLE = [
    0,
    0.0,
    -0.0,
    False,
    1,
    1.0,
    True,
    "1",
    None,
    math.nan,
    math.inf,
    len,
    max,
]
CONFUSABLE += [jnp.tanh, jax.nn.relu, (0,), (0.0,), (False,), ((0,),), ()]


@given(st.permutations(CONFUSABLE))
def test_leaves_that_differ_have_different_structures(values):
    first = Layer(jnp.ones(2))
    structures = []
    for value in values:  # all have the same aux data
        layer = eqx.tree_at(lambda m: m.rate, first, value, is_leaf=lambda x: x is None)
        structures.append(structure_of(layer))
    assert len(set(map(id, structures))) == len(values)


@given(st.lists(static_leaves, min_size=2, max_size=4))
def test_programs_see_the_leaf_itself(values):
    f = eqx.filter_jit(lambda layer: layer.rate)
    first = Layer(jnp.ones(2))
    for value in values * 2:
        layer = eqx.tree_at(lambda m: m.rate, first, value, is_leaf=lambda x: x is None)
        assert same(f(layer), value) or eqx.tree_equal(f(layer), value)


def test_function_in_the_place_of_one_that_was_freed_is_not_taken_for_it():
    f = eqx.filter_jit(lambda layer: layer.rate(layer.weight))
    first = Layer(jnp.ones(()))
    for i in range(50):

        def rate(x, i=i):
            return i * x

        assert f(eqx.tree_at(lambda m: m.rate, first, rate)) == i
        eqx.clear_caches()
        f.clear_cache()
        del rate
        gc.collect()


def counting(counts, owner, name):
    real = getattr(owner, name)

    def call(*args):
        counts[name] += 1
        return real(*args)

    return call


@pytest.fixture
def counted(monkeypatch):
    """How often each of these slow steps was taken."""
    counts = collections.Counter()
    for owner, name in (
        (registries, "Structure"),
        (registry, "_structure"),
        (registry, "describe"),
        (LayoutTable, "add"),
    ):
        monkeypatch.setattr(owner, name, counting(counts, owner, name))
    return counts


class TestFastPaths:
    """A call of what was seen before makes no structure and no layout."""

    def model(self):
        key = jax.random.key(0)
        blocks = [
            eqx.nn.MLP(2, 2, 2, 1, activation=f, key=key) for f in (jnp.tanh, abs_of)
        ]
        return Node(blocks, (Layer(jnp.ones(2), jax.nn.relu), Point(0.5, "a")))

    def test_equal_models_share_their_structures(self, counted):
        structure = structure_of(self.model())
        counted.clear()
        assert structure_of(self.model()) is structure
        assert counted["Structure"] == 0 < counted["describe"]

    def test_mapped_models_find_their_structures_and_layouts(self, counted):
        model = self.model()
        f = eqx.filter_jit(lambda model: model.child[0].layers[0].weight)
        for turn in range(3):
            f(model)
            if turn:
                assert counted["describe"] == 8
                assert not counted["_structure"] and not counted["add"]
            model = jax.tree.map(lambda x: x, model)
            counted.clear()

    def test_carried_models_are_never_described(self, counted):
        model = self.model()
        step = eqx.filter_jit(lambda m: jax.tree.map(lambda x: x, m), donate="all")
        for turn in range(4):
            counted.clear()
            model = step(model)
            if turn > 1:
                assert not counted


def abs_of(x):
    return abs(x)


class Point(NamedTuple):
    rate: float
    name: str


def test_few_structures_are_remembered():
    first = Layer(jnp.ones(2))
    for i in range(3 * _MOST_KNOWN):
        structure_of(eqx.tree_at(lambda m: m.rate, first, float(i)))
    assert len(first._aux_.structures) <= _MOST_KNOWN


def test_instances_with_plain_static_fields_share_what_is_known():
    a, b, c = (Layer(jnp.ones(2), size=(2, name)) for name in ("x", "x", "y"))
    assert structure_of(a) is structure_of(b) is not structure_of(c)
    assert a._aux_.structures is b._aux_.structures is not c._aux_.structures
    function = Layer(jnp.ones(2), size=lambda: 0)
    assert structure_of(function) is not structure_of(Layer(jnp.ones(2), size=max))
