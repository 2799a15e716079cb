"""Whether a deleted array was donated, or deleted by its own method.

Serves jax 0.10 to 0.12: an array keeps the traceback of where it was made, and drops it in
`.delete()`, but not if a call takes its buffer.
"""

from typing import Any


def may_be_donated(x: Any) -> bool:
    """`False` if `x`, a deleted array, was deleted by its method, or if that is unknown."""
    return getattr(getattr(x, "_base_array", x), "traceback", None) is not None
