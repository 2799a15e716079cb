"""What JAX does not say about deleted arrays, and does not do for those on several devices.

Whether such an array was donated, or deleted by its own method. Serves jax 0.10 to
0.12: an array keeps the traceback of where it was created. `.delete()` drops that
traceback, but a donation does not.

If NumPy holds the buffer of the first device, a donation deletes only those of the
others. The array then looks alive, and to use it may crash or hang. `delete_rest` uses
the private `_rewrap_with_aval_and_sharding`; without it, the array stays as it is.

jax 0.10 crashes if a deleted array on several devices is passed to a function that it
has compiled. Later versions raise an error. It may also crash if the rest of such an
array is deleted while another thread reads it, so there the array is only noted.
"""

import weakref
from typing import Any, Final

import jax

from .keys import stored_as

MAY_CRASH: Final[bool] = jax.__version_info__ < (0, 11)
"""Whether JAX may crash on a deleted array on several devices."""


def may_be_donated(x: Any) -> bool:
    """Whether `x`, a deleted array, was donated; `False` if that is unknown."""
    return getattr(stored_as(x), "traceback", None) is not None


_in_part: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()


def delete_rest(x: Any) -> None:
    """Deletes the buffers of `x` that are left, safely beside a thread that reads `x`.

    `x.delete()` also frees the object that such a thread reads. Here another array that
    has the same buffers is deleted.
    """
    x = stored_as(x)
    wrap = getattr(x, "_rewrap_with_aval_and_sharding", None)
    if MAY_CRASH:
        _in_part[id(x)] = x
    elif wrap is not None and not x.is_deleted():
        wrap(x.aval, x.sharding).delete()


def is_array_deleted(x: Any) -> bool:
    """Whether `x`, an array of JAX, is deleted, or a part of it that JAX does not tell."""
    if x.is_deleted():
        return True
    x = stored_as(x)
    return _in_part.get(id(x)) is x
