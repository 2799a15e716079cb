"""Snapshots of static values that can be changed in place.

A function is compiled for the content that a static list has at that time. So a copy is
stored with the list, and copies are returned once the list itself has changed.
"""

import copy
import dataclasses
import enum
import operator
import sys
import types
from collections import deque
from typing import Any, Final

import jax.tree_util as jtu
import numpy as np

from .filters import is_array_like
from .strict import (
    DICT_ITEMS,
    DICT_KEYS,
    has_generated_equality,
    is_compared_as_tree,
    is_compared_by_identity,
    strict_key,
    strictly_same,
)

# Immutable types without content, for a fast path: most static values have one of
# these.
UNCHANGING: Final = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type,
        type(None),
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
    }
)

_CONTAINERS: Final = (list, dict, deque, set, bytearray)


class Kept:
    """A static value with a snapshot of it.

    **Attributes:**

    - `value`: the value, or a copy that nothing else refers to.
    - `key`: its strict key.
    - `can_change`: whether it is a copy.
    """

    __slots__ = ("_given", "_is_plain", "_key", "can_change", "value")

    def __init__(self, value: Any):
        self._given = value
        self.value = snapshot(value)
        self.can_change = self.value is not value
        self._key: Any = None
        self._is_plain = self.can_change and _is_plain(self.value)

    @property
    def key(self) -> Any:
        if self._key is None:
            self._key = strict_key((self.value,))
        return self._key

    def get(self) -> Any:
        """The original object, or a copy of the snapshot if the object has changed."""
        if self.can_change and self.has_changed():
            return snapshot(self.value)
        return self._given

    def has_changed(self) -> bool:
        # Most values have not changed, which is faster to see without a key.
        if self._is_plain and _holds_the_same(self._given, self.value):
            return False
        return strict_key((self._given,)) != self.key


def snapshot(value: Any) -> Any:
    """`value` with a copy of each container in it that can be changed in place.

    Returns `value` itself if it has none. Containers are those of the standard library,
    dataclasses and Modules, and objects of other types that have a `==` of their own and
    no hash. Other objects are shared with the copy.
    """
    if type(value) in UNCHANGING:
        return value
    if isinstance(value, tuple):
        return _of_tuple(value)
    if isinstance(value, _CONTAINERS):
        return _of_container(value)
    if isinstance(value, DICT_KEYS | DICT_ITEMS):
        made = snapshot(value.mapping.copy())
        return made.keys() if isinstance(value, DICT_KEYS) else made.items()
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType(snapshot(dict(value)))
    if is_compared_as_tree(type(value)):
        children, treedef = jtu.tree_flatten(value, lambda x: x is not value)
        copies = list(map(snapshot, children))
        return value if _are_same(copies, children) else treedef.unflatten(copies)
    if type(value).__eq__ is object.__eq__ or isinstance(value, type):
        return value
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        return _of_attributes(value, names)
    if type(value).__module__.split(".")[0] in sys.stdlib_module_names:
        return _of_attributes(value, list(getattr(value, "__dict__", ())))
    if type(value).__hash__ is None and not is_array_like(value):
        return _of_object(value)
    return value


def _is_plain(value: Any) -> bool:
    """Whether all in `value` is containers of Python, dataclasses, values that cannot
    change, and values that are compared by identity."""
    kind = type(value)
    if kind in UNCHANGING or isinstance(value, type | np.dtype | enum.Enum):
        return True
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    if dataclasses.is_dataclass(kind) and has_generated_equality(kind):
        return not hasattr(kind, "__slots__") and _is_plain(vars(value))
    return is_compared_by_identity(kind) and not is_compared_as_tree(kind)


def _holds_the_same(value: Any, made: Any) -> bool:
    """Whether `value` holds the same objects as `made`, its snapshot that is plain."""
    kind = type(value)
    if kind is not type(made):
        return False
    if kind is list or kind is tuple:
        pairs = zip(value, made)  # noqa: B905
    elif kind is dict:
        if not all(map(operator.is_, value, made)):
            return False
        pairs = zip(value.values(), made.values())  # noqa: B905
    elif dataclasses.is_dataclass(kind):
        return _holds_the_same(vars(value), vars(made))
    else:
        return value is made
    return len(value) == len(made) and all(
        a is b or _holds_the_same(a, b) for a, b in pairs
    )


def _of_tuple(value: Any) -> Any:
    items = list(map(snapshot, value))
    if _are_same(items, value):
        return value
    if type(value) is tuple:
        return tuple(items)
    return value._make(items) if hasattr(value, "_make") else value


def _of_container(value: Any) -> Any:
    try:
        made = copy.copy(value)
        if isinstance(value, dict):
            for key, item in value.items():
                made[key] = snapshot(item)
        elif isinstance(value, list | deque):
            for i, item in enumerate(value):
                made[i] = snapshot(item)
    except Exception:  # a derived class may forbid it, such as `frozendict`
        return value
    # An object may hold methods of its own parts, and equal no copy: a `SortedDict`.
    return made if type(value) in _CONTAINERS or strictly_same(made, value) else value


def _of_attributes(value: Any, names: list[str]) -> Any:
    """A snapshot of an object that consists of its attributes.

    It counts as mutable if it is not hashable.
    """
    before = [getattr(value, name) for name in names]
    after = list(map(snapshot, before))
    if type(value).__hash__ is not None and _are_same(after, before):
        return value
    try:
        made = copy.copy(value)
        for name, item in zip(names, after, strict=True):
            object.__setattr__(made, name, item)
    except Exception:  # it cannot be copied
        return value
    # Its `==` may compare elements, and so never say that two are equal.
    is_same = has_generated_equality(type(value)) or strictly_same(made, value)
    return made if is_same else value


def _of_object(value: Any) -> Any:
    """A copy of an object of another library that is compared by its own `==`.

    Without a hash it can be changed: a configuration of pydantic or of ml_collections.
    """
    try:
        if (value == value) is True:  # not so for tables, which compare elements
            made = copy.deepcopy(value)
            if (made == value) is True:
                return made
    except Exception:  # it cannot be compared or copied
        pass
    return value


def _are_same(copies: Any, values: Any) -> bool:
    return all(a is b for a, b in zip(copies, values, strict=True))
