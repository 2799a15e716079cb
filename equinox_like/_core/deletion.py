"""Deletes an array that another thread may be reading.

`.delete()` would end the process if another thread is converting the array to NumPy,
because it frees what that thread reads. A donation waits for such a thread. So the array
is donated to a program that returns it, and what it returns is dropped.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .._compat.arrays import MAY_CRASH, record_deleted_part


def delete_array(x: jax.Array) -> None:
    """Deletes an array, unless NumPy holds its memory: then it stays alive."""
    if x.is_deleted():
        return
    with jax.disable_jit(False):
        _program(x.sharding)(x)
    if len(x.sharding.device_set) > 1:
        fatal.add([] if x.is_deleted() else [x])


class _Fatal:
    """Whether there have been deleted arrays on which JAX may crash."""

    exist = False

    def add(self, in_part: Sequence[jax.Array] = ()) -> None:
        """After arrays on several devices were deleted, `in_part` not as a whole."""
        for x in in_part:
            record_deleted_part(x)
        self.exist |= MAY_CRASH or bool(in_part)


fatal = _Fatal()


@functools.lru_cache(maxsize=64)
def _program(sharding: Any) -> Any:
    return jax.jit(
        jax.lax.optimization_barrier, donate_argnums=0, out_shardings=sharding
    )
