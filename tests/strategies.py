"""Generated trees: containers of arrays, numbers, strings and functions."""

import collections
import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

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
