"""Whether a deleted array was donated, or deleted by its own method.

Serves jax 0.10 to 0.12: an array keeps the traceback of where it was created.
`.delete()` drops that traceback, but a donation does not.
"""

from typing import Any


def may_be_donated(x: Any) -> bool:
    """Whether `x`, a deleted array, was donated; `False` if that is unknown."""
    return getattr(getattr(x, "_base_array", x), "traceback", None) is not None
