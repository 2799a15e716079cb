"""Trees as deep as JAX takes them: no function of ours calls itself for each level."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import equinox_like as eqx

# In Python 3.11, JAX itself counts each level as a call or two of Python, which may have
# 1000.
DEPTH = 1000 if sys.version_info >= (3, 12) else 300


class Nested(eqx.Module):
    below: Any
    weight: Any


class WithBuffer(eqx.Module):
    below: Any
    weight: Any
    buffer: Any = eqx.field(trainable=False)


class Named(NamedTuple):
    below: Any


def modules(depth):
    tree = Nested(None, jnp.ones(()))
    for i in range(depth):
        tree = Nested(tree, float(i % 3))
    return tree


def modules_in_tuples(depth):
    tree = Nested(None, jnp.ones(()))
    for _ in range(depth // 2):
        tree = Nested((Named(tree),), 0.5)
    return tree


def tuples_in_a_module(depth):
    return Nested(nest(lambda tree: (tree,), depth), jnp.ones(()))


def lists_in_a_module(depth):
    return Nested(nest(lambda tree: [tree], depth), jnp.ones(()))


def buffers(depth):
    return nest(lambda tree: WithBuffer(tree, None, 0.5), depth)


def lists(depth):
    return nest(lambda tree: [tree], depth)


def dicts_of_numbers(depth):
    return nest(lambda tree: {1: tree, 2.5: None}, depth)


def nest(make: Callable[[Any], Any], depth: int) -> Any:
    tree: Any = jnp.ones(())
    for _ in range(depth):
        tree = make(tree)
    return tree


MAKERS = [
    modules,
    modules_in_tuples,
    tuples_in_a_module,
    lists_in_a_module,
    buffers,
    lists,
    dicts_of_numbers,
]
all_makers = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def total(tree):
    return sum(jnp.sum(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


@all_makers
def test_deep_tree_is_compiled(make):
    tree = make(DEPTH)
    count = len([x for x in jax.tree.leaves(tree) if eqx.is_array(x)])
    jitted = eqx.filter_jit(lambda tree: (total(tree), tree))
    value, out = jitted(tree)
    assert value == count and jtu.tree_structure(out) == jtu.tree_structure(tree)
    assert jitted(out)[0] == count


@all_makers
def test_deep_tree_is_compared_and_taken_apart(make):
    tree, same, other = make(DEPTH), make(DEPTH), make(DEPTH - 2)
    assert eqx.tree_equal(tree, same, typematch=True)
    assert eqx.tree_equal(tree, other) is False

    def label(x):
        return "data" if eqx.is_array(x) else eqx.internal.STATIC

    groups, skeleton = eqx.internal.split(tree, label)
    _, other_skeleton = eqx.internal.split(same, label)
    assert skeleton == other_skeleton and hash(skeleton) == hash(other_skeleton)
    assert eqx.tree_equal(eqx.internal.merge(groups, skeleton), tree)
    assert eqx.tree_equal(eqx.combine(*eqx.partition(tree, eqx.trainable)), tree)
    assert eqx.tree_at(lambda t: jax.tree.leaves(t)[0], tree, 1) is not tree


@pytest.mark.parametrize("make", [modules, lists], ids=lambda make: make.__name__)
def test_deep_tree_is_saved_and_transformed(make, tmp_path):
    tree = make(DEPTH)
    eqx.save(tmp_path / "file", tree)
    assert eqx.tree_equal(eqx.load(tmp_path / "file", tree), tree)
    sums = eqx.filter_vmap(lambda t, x: total(t) * x, in_axes=(None, 0))
    assert sums(tree, jnp.arange(2.0))[1] == total(tree)
    assert jax.tree.leaves(eqx.filter_grad(total)(tree)) == [1.0]
    assert eqx.filter_jit(total).lower(tree).compile()(tree) == total(tree)
    assert eqx.filter_export(total)(tree)(tree) == total(tree)
    chosen = eqx.filter_cond(jnp.array(True), lambda t: t, lambda t: t, tree)
    assert eqx.tree_equal(chosen, tree)


def test_strict_rule_holds_at_any_depth():
    one, other = (nest(lambda tree: {1: tree}, DEPTH) for _ in range(2))
    assert eqx.tree_equal(one, other)
    place = other
    while isinstance(place[1], dict):
        place = place[1]
    place[True] = place.pop(1)
    assert jtu.tree_structure(one) == jtu.tree_structure(other)
    assert eqx.tree_equal(one, other) is False
