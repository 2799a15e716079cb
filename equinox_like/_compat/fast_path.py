"""Keeps calls of a `jax.jit`-ed function quick after one of them has failed.

Serves jax 0.10 to 0.12, where a kind of call that once raised, while it was traced or while
it ran, never takes the C++ path again: each call then costs some 100 us, for good. Only the
private `_clear_cache` forgets that, and with it the quick ways of other kinds of call, to
be found again at their next call. Without it such calls stay slow, and right.
"""

from typing import Any


def forget_calls(function: Any) -> None:
    """Makes JAX look up the program again for every kind of call of this function."""
    clear = getattr(function, "_clear_cache", None)
    if clear is not None:
        clear()
