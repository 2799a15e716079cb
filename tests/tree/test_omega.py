"""`ω`: arithmetic of trees is that of their leaves."""

import operator

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

import equinox_like as eqx
from equinox_like.internal import ω

INTEGERS = {"a": jnp.asarray([1, 5]), "b": (jnp.asarray(3), None)}
OTHER = {"a": jnp.asarray([2, 2]), "b": (jnp.asarray(1), None)}
BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, operator.lshift, operator.rshift),
    *(operator.and_, operator.xor, operator.or_),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
]
binary = pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)


@binary
def test_two_trees_are_combined_leaf_by_leaf(op):
    assert eqx.tree_equal(
        op(ω(INTEGERS), OTHER**ω).ω, jtu.tree_map(op, INTEGERS, OTHER)
    )


@binary
@pytest.mark.parametrize("other", [2, jnp.asarray(2), jnp.asarray([1, 2])], ids=str)
def test_number_or_array_is_combined_with_every_leaf(op, other):
    left = jtu.tree_map(lambda x: op(x, other), INTEGERS)
    right = jtu.tree_map(lambda x: op(other, x), INTEGERS)
    assert eqx.tree_equal(op(ω(INTEGERS), other).ω, left)
    assert eqx.tree_equal(op(other, ω(INTEGERS)).ω, right)


@pytest.mark.parametrize(
    "op", [operator.neg, operator.pos, operator.abs, operator.invert]
)
def test_unary_operators(op):
    assert eqx.tree_equal(op(ω(INTEGERS)).ω, jtu.tree_map(op, INTEGERS))


def test_matrix_product():
    a, b = jnp.eye(2), jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    assert ((ω([a + 1]) @ ω([b])).ω[0] == (a + 1) @ b).all()
    assert ((b @ ω([a + 1])).ω[0] == b @ (a + 1)).all()


@given(st.lists(st.floats(-9, 9), min_size=3, max_size=3), st.floats(-2, 2))
def test_expressions_are_those_of_the_leaves(values, scale):
    tree = {"x": values[0], "y": values[1:]}
    out = ((tree**ω * 2 - tree**ω) / 4 + scale).ω
    assert out == jtu.tree_map(lambda x: (x * 2 - x) / 4 + scale, tree)


@pytest.mark.parametrize(
    "other", [np.ones(2), np.float32(1), INTEGERS, None, "text", [1]], ids=repr
)
def test_any_other_operand_is_an_error(other):
    with pytest.raises(RuntimeError, match=f"got an? {type(other).__name__}"):
        ω(INTEGERS) + other
    with pytest.raises(RuntimeError, match=f"got an? {type(other).__name__}"):
        other + ω(INTEGERS)
    with pytest.raises(RuntimeError, match=f"got an? {type(other).__name__}"):
        ω([jnp.ones(2)]).at[0].set(other)


def test_structures_must_be_equal():
    with pytest.raises(ValueError, match="same structure"):
        ω((1, 2)) + ω([1, 2])
    with pytest.raises(ValueError, match="same structure"):
        ω((1, 2)) + ω((1, None))


def is_list(x):
    return isinstance(x, list)


def test_what_is_a_leaf_is_kept_and_must_be_the_same():
    a, b = ω(([1], [2, 3]), is_leaf=is_list), ω(([4], [5]), is_leaf=is_list)
    out = a + b
    assert out.ω == ([1, 4], [2, 3, 5]) and out.is_leaf is is_list
    assert (out * 2).is_leaf is is_list and out[0].is_leaf is is_list
    assert out[0].ω == (1, 2)
    same = ω(([4], [5]), is_leaf=lambda x: isinstance(x, list))
    assert (a + same).ω == out.ω
    for other in (None, lambda x: isinstance(x, tuple)):
        with pytest.raises(ValueError, match="same `is_leaf`"):
            a + ω(([1], [2]), is_leaf=other)
    assert ω(1).is_leaf is None and (1**ω).is_leaf is None


def test_leaves_are_indexed_and_mapped():
    w = ω([jnp.arange(3), jnp.arange(6).reshape(3, 2)])
    assert eqx.tree_equal(w[1:].ω, [jnp.arange(3)[1:], jnp.arange(6).reshape(3, 2)[1:]])
    assert w.call(lambda x: x.sum()).ω == [3, 15]


@pytest.mark.parametrize(
    "name", ["set", "add", "multiply", "divide", "power", "min", "max"]
)
def test_leaves_are_updated_at_an_index(name):
    leaves = [jnp.asarray([3.0, 2.0]), jnp.asarray([5.0, 7.0])]
    others = [jnp.asarray(2.0), jnp.asarray(6.0)]
    for other, each in ((ω(others), others), (4.0, [4.0] * 2), (others[0], [2.0] * 2)):
        out = getattr(ω(leaves).at[0], name)(other).ω
        expected = [
            getattr(x.at[0], name)(y) for x, y in zip(leaves, each, strict=True)
        ]
        assert eqx.tree_equal(out, expected)


def test_it_is_no_tree_and_hashed_by_identity():
    w = ω(INTEGERS)
    assert jtu.tree_leaves(w) == [w] or jtu.all_leaves([w])
    assert hash(w) == hash(w) and len({w: 1, ω(INTEGERS): 2}) == 2
    assert repr(ω({"a": 1})) == "ω({'a': 1})"


def test_it_is_neither_true_nor_iterable():
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(ω(1) == ω(1))
    with pytest.raises(TypeError, match="not iterable"):
        list(ω(jnp.arange(3)))


def test_arrays_are_wrapped_by_the_power_too():
    for x in (jnp.arange(2), np.arange(2), 2.0, jnp.float32(1)):
        assert (x**ω).ω is x
    f = jax.jit(lambda x: (x**ω + x).ω)
    assert f(jnp.arange(2)).tolist() == [0, 2]
