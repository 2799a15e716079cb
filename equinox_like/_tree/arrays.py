"""Arrays as objects: how a message shows them, their buffers, and whether those are left.

In a lower layer than donation, since copying, moving and printing arrays need no more
than this.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._compat.tracer import Tracer


def describe_array(x: Any) -> str:
    """The dtype and shape of an array, as in `float32[3]`."""
    return describe_type(x.dtype, x.shape)


@functools.lru_cache(maxsize=1024)
def describe_type(dtype: Any, shape: tuple[int, ...]) -> str:
    """The same, of a dtype or its name and a shape."""
    name = dtype if isinstance(dtype, str) else dtype.name
    return f"{name}[{','.join(map(str, shape))}]"


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, without its sharding or whether its type is weak."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def is_concrete(x: Any) -> bool:
    """Whether `x` is an array of JAX that has buffers, as a tracer has not."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def is_deleted(x: Any) -> bool:
    # A tracer has no buffer; a NumPy array keeps its own.
    return is_concrete(x) and x.is_deleted()


def buffer_pointers(x: jax.Array) -> list[Any]:
    """Hashable values that two arrays have in common if they share memory."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    try:
        return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    except Exception:
        return [id(x)]  # a backend that has no pointers: the same object at least
