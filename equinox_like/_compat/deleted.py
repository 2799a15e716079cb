"""What JAX does not say about deleted arrays, and does not do for those on several devices.

Whether such an array was donated, or deleted by its own method. Serves jax 0.10 to
0.12: an array keeps the traceback of where it was created. `.delete()` drops that
traceback, but a donation does not.

Of a donated array on several devices, jax 0.10 deletes only the buffers. To pass it to
a function that donates nothing crashes the process. In all versions, if NumPy holds the
buffer of a device, only the others are deleted, and a later use of the array may crash
or hang. `delete_whole` mends both by two private methods, `_replace_with` and
`_rewrap_with_aval_and_sharding`. Without these, the arrays stay as JAX leaves them.
"""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp

from .keys import stored_as

DELETES_BUFFERS_ONLY: Final[bool] = jax.__version_info__ < (0, 11)
"""Whether arrays on several devices need `delete_whole` after each donation."""


def may_be_donated(x: Any) -> bool:
    """Whether `x`, a deleted array, was donated; `False` if that is unknown."""
    return getattr(stored_as(x), "traceback", None) is not None


def delete_whole(x: Any) -> None:
    """Deletes an array on several devices of which JAX has deleted some buffers.

    `x.delete()` would crash a thread that reads `x`. Here `x` becomes an array that was
    deleted before, and keeps what such a thread reads for as long as `x` lives.
    """
    x = stored_as(x)
    try:
        x.__dict__["_read_"] = x._rewrap_with_aval_and_sharding(x.aval, x.sharding)
        if DELETES_BUFFERS_ONLY:
            x._replace_with(_deleted(x.aval, x.sharding))
        else:  # where an array cannot be replaced with a deleted one
            other = _zeros(x.aval, x.sharding)
            x._replace_with(other)
            other.delete()
    except (AttributeError, TypeError, RuntimeError):
        pass  # as JAX leaves it


def _zeros(aval: Any, sharding: Any) -> jax.Array:
    return jax.device_put(jnp.zeros(aval.shape, aval.dtype), sharding)


@functools.lru_cache(maxsize=256)
def _deleted(aval: Any, sharding: Any) -> jax.Array:
    x = _zeros(aval, sharding)
    x.delete()
    return x
