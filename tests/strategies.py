"""Generated trees: containers of arrays, numbers, strings and functions."""

import collections
import dataclasses
import enum
import math
import types
from decimal import Decimal
from fractions import Fraction
from typing import Any

import attrs
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random as prng

import equinox_like as eqx

Pair = collections.namedtuple("Pair", ["first", "second"])


class Node(eqx.Module):
    """A Module with a dynamic and a static field."""

    child: object
    other: object = None
    tag: object = eqx.field(static=True, default="tag")


# Made once: arrays are dear, and laws do not care which ones they get.
ARRAYS = (
    jnp.arange(3.0),
    jnp.ones((2, 2), jnp.bfloat16),
    jnp.asarray(3),
    jnp.zeros((0, 2)),
    np.arange(4),
    np.float32(2.5),
    jax.random.key(0),
)

# A PRNG of a user's own, which JAX does not find by its name.
threefry = prng.threefry_prng_impl
OWN_PRNG = prng.define_prng_impl(
    key_shape=threefry.key_shape,
    seed=threefry.seed,
    split=threefry.split,
    random_bits=threefry.random_bits,
    fold_in=threefry.fold_in,
    name="own",
    tag="own",
)

arrays = st.sampled_from(ARRAYS)
numbers = st.one_of(
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, math.nan, math.inf]),
    st.sampled_from([0j, complex(0.0, -0.0), 1 + 0j]),
)
opaque = st.sampled_from([jnp.tanh, jax.nn.relu, len, "text", b"bytes", int])
static_leaves = st.one_of(numbers, opaque, st.frozensets(numbers, max_size=2))
leaves = st.one_of(arrays, static_leaves)

# Values that a static field may hold: containers, too.
static_values = st.recursive(
    static_leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    ),
    max_leaves=3,
)


def trees(leaves=leaves, max_leaves: int = 8):
    """Trees of every kind of container, `None` included."""
    return st.recursive(
        st.one_of(leaves, st.none()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["x", "y", "z"]), inner, max_size=3),
            st.builds(Pair, inner, inner),
            st.builds(Node, inner, inner),
        ),
        max_leaves=max_leaves,
    )


def whole_trees():
    """Trees that can be saved: not a class or a function in place of a tree."""
    return trees().filter(lambda tree: not callable(tree))


def same(a: Any, b: Any) -> bool:
    """Whether two leaves have the same type and content, a NaN being a NaN."""
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return a.dtype == b.dtype and same(*map(jax.random.key_data, (a, b)))
    if eqx.is_array(a):
        kinds = jax.Array, np.ndarray, np.generic
        alike = all(isinstance(a, kind) == isinstance(b, kind) for kind in kinds)
        a, b = np.asarray(a), np.asarray(b)
        return alike and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return type(a) is type(b) and (a is b or repr(a) == repr(b))


def reference_same(a, b):
    """The strict rule, told once more, by what a value looks like."""
    if isinstance(a, float | complex) or not isinstance(
        a, tuple | list | dict | frozenset
    ):
        return type(a) is type(b) and (a is b or repr(a) == repr(b))
    if type(a) is not type(b) or len(a) != len(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(reference_same(a[k], b[k]) for k in a)
    if isinstance(a, frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return all(map(reference_same, a, b))


class Letter(enum.StrEnum):
    A = "a"


class One(enum.IntEnum):
    ONE = 1


# Values that Python calls equal, though programs that are made for them differ.
CONFUSABLE = [
    *[1, 1.0, True, 1 + 0j, One.ONE, Fraction(1), Decimal(1)],
    *[np.int64(1), np.int32(1), np.float64(1), np.True_],
    *[0, 0.0, -0.0, False, 0j, complex(0.0, -0.0), complex(-0.0, 0.0)],
    *[Decimal(0), np.float32(0.0), np.float32(-0.0)],
    *["a", Letter.A, np.str_("a"), math.nan, np.float64("nan"), range(0), range(1, 1)],
]


@dataclasses.dataclass(frozen=True)
class Config:
    value: Any
    ignored: Any = dataclasses.field(default=None, compare=False)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Registered:
    """A pytree node without children that is its own aux data."""

    tag: object


@dataclasses.dataclass
class OpenConfig:
    value: Any


@attrs.frozen
class OfAttrs:
    value: Any
    ignored: Any = attrs.field(default=None, eq=False)


@attrs.define
class OpenOfAttrs:
    value: Any


class Tagged(list):
    tag: Any = None


def _tagged(x):
    made = Tagged([0])
    made.tag = x
    return made


# Containers of the standard library, and nodes, around one value.
CONTAINERS = {
    "tuple": lambda x: (x,),
    "list": lambda x: [0, x],
    "dict value": lambda x: {"k": x},
    "dict key": lambda x: {x: 0},
    "set": lambda x: {x, "other"},
    "frozenset": lambda x: frozenset({x}),
    "deque": lambda x: collections.deque([x]),
    "bounded deque": lambda x: collections.deque([x], 3),
    "namedtuple": lambda x: Pair(x, None),
    "OrderedDict": lambda x: collections.OrderedDict(k=x),
    "defaultdict": lambda x: collections.defaultdict(list, {"k": x}),
    "MappingProxyType": lambda x: types.MappingProxyType({"k": x}),
    "UserDict": lambda x: collections.UserDict({"k": x}),
    "SimpleNamespace": lambda x: types.SimpleNamespace(k=x),
    "slice": lambda x: slice(None, x),
    "dataclass": Config,
    "dataclass with an open value": OpenConfig,
    "class of attrs": OfAttrs,
    "class of attrs with an open value": OpenOfAttrs,
    "attribute of a list": _tagged,
    "array of objects": lambda x: np.array([None, x], object)[:, None],
    "Module": lambda x: Node(x),
    "static field": lambda x: Node(0, tag=x),
    "Static": eqx.internal.Static,
    "Partial": lambda x: jax.tree_util.Partial(len, x),
}
