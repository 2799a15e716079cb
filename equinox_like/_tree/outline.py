"""A key for the structure of a cached node, which is faster to make than the structure.

A model that `jax.tree.map` or an eager update returns consists of new nodes, all without
a cached flattened form. Their structures are found by this key: see `own_registry.py`.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._compat.tracer import Tracer
from .filters import is_array
from .strict import is_compared_by_identity
from .structure import FLAT, cached_types, may_become_node

# Types of static leaves that are the same if their types and values are equal.
_OF_VALUES: Final = frozenset({bool, int, str, type(None)})
# The types of arrays that have occurred.
_array_types: Final[set[type]] = set()


def outline(values: Sequence[Any]) -> tuple[Sequence[Any], Any] | None:
    """The children of a node in our registry, from those in JAX's, and the key.

    The key has an `id` for each object that the structure refers to, and is valid as
    long as the structure exists. Returns `None` for unusual nodes. What is a child here
    must be one in `OwnRegistry._describe`.
    """
    children: list[Any] = []
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _array_types:  # faster than `is_array`
            children.append(value)
            key.append(None)
        elif kind in _OF_VALUES:
            key.append((kind, value))
        elif kind is float:
            key.append(value.hex())
        elif kind is list or kind is dict:
            children.append(value)
            key.append(kind)
        elif kind is tuple:
            found = outline(value)
            if found is None:
                return None
            children += found[0]
            key.append(found[1])
        elif (cached := cached_types.get(kind)) is not None:
            if not cached.is_immutable or value._is_open_:
                return None
            below, structure = getattr(value, FLAT)
            children += below
            key.append(id(structure))
        elif is_array(value) or isinstance(value, Tracer):
            _array_types.add(kind)
            children.append(value)
            key.append(None)
        elif _is_leaf_with_identity(kind, value):
            key.append(id(value))
        else:
            return None
    return tuple(children), tuple(key)


def _is_leaf_with_identity(kind: type, value: Any) -> bool:
    """Whether values of this type are leaves for ever, and compared by identity."""
    known = _leaves_with_identity.get(kind)
    if known is None:
        known = _leaves_with_identity[kind] = (
            is_compared_by_identity(kind)
            and not may_become_node(kind)
            and jtu.all_leaves([value])
        )
    return known


_leaves_with_identity: weakref.WeakKeyDictionary[type, bool]
_leaves_with_identity = weakref.WeakKeyDictionary()
