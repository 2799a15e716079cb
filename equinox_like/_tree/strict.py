"""When are two static values the same? Only if they have the same type, all the way down.

Python says `1 == 1.0 == True`, `0.0 == -0.0` and `nan != nan`; a compiled program that was
specialised to one of them is wrong for the others. `strict_key` turns static values into
something whose ordinary `==` and `hash` follow the strict rule. Most values stay as they
are, with their types beside them, so that comparing costs no Python call; only numbers
with a sign of zero and values with other values inside are wrapped.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .filters import is_array


def strict_key(values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[type, ...]]:
    """A pair that equals another one only if all `values` are strictly the same.

    It is hashable if every value is.
    """
    wrapped = tuple(Strict(v) if _needs_wrapping(v) else v for v in values)
    return wrapped, tuple(map(type, values))


class Strict:
    """Wraps a value so that `==` and `hash` follow the strict rule."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Strict and strictly_same(self.value, other.value)

    def __hash__(self) -> int:
        return _strict_hash(self.value)

    def __repr__(self) -> str:
        return f"Strict({self.value!r})"


def strictly_same(a: Any, b: Any) -> bool:
    """Whether `a` and `b` have the same type and are equal, at every depth.

    **Raises:**

    `ValueError` for two different arrays of JAX: their values may not even be known. NumPy
    arrays are constants, compared by dtype, shape and bytes.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if _is_constant(a):
        return _content(a) == _content(b)
    if is_array(a):
        raise ValueError(
            f"Two tree structures hold different {type(a).__name__}s as static values, "
            "which cannot be compared. Keep arrays in ordinary fields, not in "
            "`field(static=True)`; a constant may be a NumPy array there."
        )
    if isinstance(a, float):
        return _same_float(a, b)
    if isinstance(a, complex):
        return _same_float(a.real, b.real) and _same_float(a.imag, b.imag)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(strictly_same, a, b))
    if isinstance(a, dict):
        keys = strict_key(tuple(a)), strict_key(tuple(b))
        if isinstance(a, OrderedDict) and keys[0] != keys[1]:
            return False
        by_key = dict(zip(zip(*keys[1], strict=True), b.values(), strict=True))
        return len(a) == len(b) and all(
            key in by_key and strictly_same(value, by_key[key])
            for key, value in zip(zip(*keys[0], strict=True), a.values(), strict=True)
        )
    if isinstance(a, set | frozenset):
        return set(zip(*strict_key(tuple(a)), strict=True)) == set(
            zip(*strict_key(tuple(b)), strict=True)
        )
    if _is_node(a):
        leaves_a, treedef_a = jtu.tree_flatten(a)
        leaves_b, treedef_b = jtu.tree_flatten(b)
        return treedef_a == treedef_b and all(map(strictly_same, leaves_a, leaves_b))
    if _is_dataclass(a):
        fields = [f.name for f in dataclasses.fields(a) if f.compare]
        return bool(a == b) and all(
            strictly_same(getattr(a, name), getattr(b, name)) for name in fields
        )
    return bool(a == b)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_constant(value: Any) -> bool:
    """Whether `value` is NumPy's and is its content, as far as bytes tell."""
    # A subclass may hold more: a mask, say.
    is_numpy = type(value) is np.ndarray or isinstance(value, np.generic)
    return is_numpy and not value.dtype.hasobject


def _content(constant: Any) -> tuple[Any, ...]:
    # A NaN is any NaN to us; which of them it is shows in the bytes alone.
    if constant.dtype.kind in "fc" and np.isnan(constant).any():
        constant = np.where(np.isnan(constant), constant.dtype.type(np.nan), constant)
    return constant.dtype, constant.shape, constant.tobytes()


def _needs_wrapping(value: Any) -> bool:
    return (
        isinstance(value, float | complex | set | frozenset)
        or is_array(value)
        or _is_node(value)
        or _is_dataclass(value)
    )


def _is_node(value: Any) -> bool:
    # JAX refuses dictionaries whose keys have no order, which may be static all the same.
    return isinstance(value, dict) or (
        value is not None and not jtu.all_leaves([value])
    )


def _same_float(a: float, b: float) -> bool:
    if a == b:
        return math.copysign(1.0, a) == math.copysign(1.0, b)
    return a != a and b != b


def _strict_hash(value: Any) -> int:
    # Python hashes a NaN by its identity, but all NaNs of a type are the same here.
    if isinstance(value, float):
        return 0 if value != value else hash(value)
    if isinstance(value, complex):
        return hash((_strict_hash(value.real), _strict_hash(value.imag)))
    if isinstance(value, tuple):
        return hash(tuple(map(_strict_hash, value)))
    if isinstance(value, frozenset):
        return hash(frozenset(map(_strict_hash, value)))
    if _is_constant(value):
        return hash(_content(value))
    return hash(value)
