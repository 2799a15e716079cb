"""Single arrays: descriptions for messages, buffers, deletion, typed keys as numbers.

In a lower layer than donation, since copying and printing trees need these helpers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat.arrays import is_array_deleted
from .._compat.tracing import Tracer


def describe_array(x: Any) -> str:
    """The dtype and shape of an array, as in `float32[3]`."""
    return describe_type(x.dtype, x.shape)


@functools.lru_cache(maxsize=1024)
def describe_type(dtype: Any, shape: tuple[int, ...]) -> str:
    """As `describe_array`, from a dtype (or its name) and a shape."""
    name = dtype if isinstance(dtype, str) else dtype.name
    return f"{name}[{','.join(map(str, shape))}]"


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, without its sharding and weak type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def jax_struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """As `struct_of`, with the dtype that JAX uses for a NumPy array of 64 bits."""
    return struct_of(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x))


def is_concrete(x: Any) -> bool:
    """Whether `x` is a JAX array with buffers, and not a tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def is_deleted(x: Any) -> bool:
    # A tracer has no buffer, and a NumPy array never loses its own.
    return is_concrete(x) and is_array_deleted(x)


def is_typed_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys, or a struct of one."""
    dtype = getattr(x, "dtype", None)
    return (
        dtype is not None
        # Tested first, since `issubdtype` is slower.
        and not isinstance(dtype, np.dtype)
        and isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    )


def is_weak(x: Any) -> bool:
    """Whether the dtype of an array is weak, which typed keys do not have."""
    return getattr(x, "weak_type", False)


def without_key(x: Any) -> Any:
    """The array of numbers, for an array of typed PRNG keys; any other array itself."""
    return jax.random.key_data(x) if is_typed_key(x) else x


def with_key(x: Any, like: Any) -> Any:
    """The inverse of `without_key`. `like` is an array, or a struct, of the dtype."""
    if not is_typed_key(like):
        return x
    return jax.random.wrap_key_data(x, impl=key_impl(like.dtype))


@functools.cache
def key_impl(dtype: Any) -> Any:
    """The implementation of typed keys of this dtype."""
    found = []
    # Abstractly, because a callback of a running program must not run another one.
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def reusable(x: Any) -> Any:
    """`x`, and if it holds PRNG keys, a copy that may be used where `x` was used before,
    or will be. Only `jax.debug_key_reuse` distinguishes the two."""
    return jax.random.clone(x) if is_typed_key(x) else x


def buffer_pointers(x: jax.Array) -> list[Any]:
    """Hashable values. Two arrays that share memory have at least one in common."""
    try:
        return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    except Exception:
        return [id(x)]  # this backend has no pointers: recognises the same object only
