"""What JAX does not say about deleted arrays.

Whether such an array was donated, or deleted by its own method. Serves jax 0.10 to
0.12: an array keeps the traceback of where it was created. `.delete()` drops that
traceback, but a donation does not.

Of a donated array on several devices, jax 0.10 deletes only the buffers. To pass it to
a function that donates nothing crashes the process. After `.delete()`, and with later
versions, JAX raises an error instead.
"""

from typing import Any, Final

import jax

from .keys import stored_as

DELETES_BUFFERS_ONLY: Final[bool] = jax.__version_info__ < (0, 11)
"""Whether arrays on several devices must be deleted after their donation, too."""


def may_be_donated(x: Any) -> bool:
    """Whether `x`, a deleted array, was donated; `False` if that is unknown."""
    return getattr(stored_as(x), "traceback", None) is not None
