"""Wrappers for static values whose own `==` cannot be a part of a key: see `strict.py`."""

from typing import Any, Final

import numpy as np


class Guarded:
    """Compares a value by its own `==`; unequal if that raises or is not a bool."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        if type(other) is not Guarded:
            return False
        a, b = self._value, other._value
        try:
            same = a is b or a == b
        except Exception:
            return False
        return isinstance(same, bool | np.bool_) and bool(same)

    def __hash__(self) -> int:
        try:
            return hash(self._value)
        except Exception:
            return hash(type(self._value))


class Itself:
    """Compares a value by identity."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Itself and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class Constant:
    """Compares a NumPy array by dtype, shape and bytes, with all NaN equal."""

    __slots__ = ("_array", "_hash")

    def __init__(self, array: Any):
        # A copy, unless the array cannot be written to.
        is_fixed = not isinstance(array, np.ndarray) or (
            array.base is None and not array.flags.writeable
        )
        self._array = array if is_fixed else array.copy()
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if type(other) is not Constant:
            return False
        a, b = self._array, other._array
        return a is b or (
            a.dtype == b.dtype
            and a.shape == b.shape
            and (a.tobytes() == b.tobytes() or _bytes_of(a) == _bytes_of(b))
        )

    def __hash__(self) -> int:
        if self._hash is None:
            array = self._array
            # A part of a large array is enough.
            part = np.ravel(array)[:: max(1, array.size // _HASHED)]
            self._hash = hash((array.dtype, array.shape, _bytes_of(part)))
        return self._hash


_HASHED: Final = 1024


def _bytes_of(array: Any) -> bytes:
    # NaN has many bit patterns, which must compare as equal.
    if array.dtype.kind in "fc" and np.isnan(array).any():
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return array.tobytes()


def is_constant(value: Any) -> bool:
    """Whether `value` is a NumPy value that is fully described by its bytes."""
    # A subclass may hold more than bytes, for example a mask.
    is_numpy = type(value) is np.ndarray or isinstance(value, np.generic)
    return is_numpy and not value.dtype.hasobject
