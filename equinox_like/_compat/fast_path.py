"""Keeps calls of a `jax.jit`-ed function on the fast path after a call has failed.

Serves jax 0.10 to 0.12. There, once a call has raised, while it was traced or while it
ran, later calls with the same cache key never take the C++ path again, and cost some
100 us each. Only the private `_clear_cache` resets this. It also drops the fast paths
of other cache keys, which come back at their next call. Without it, such calls are slow
but correct.
"""

from typing import Any


def forget_calls(function: Any) -> None:
    """Clears the fast paths of a `jax.jit`-ed function, for all cache keys."""
    clear = getattr(function, "_clear_cache", None)
    if clear is not None:
        clear()
