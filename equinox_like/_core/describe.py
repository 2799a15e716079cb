"""Describes the structure and static leaves of a tree by texts, for another process.

A treedef holds classes, and a static leaf may be any object, so neither can be written
to a file. A table has a text instead for the path of each node, leaf and static field.
Trees with equal tables are treated as the same tree. A value that has no text is kept as
it is (`_Undescribed`): it can be compared in this process, but not written.

`encode` and `decode` are for trees of Python's containers and plain values, which can be
made anew from a file.
"""

import enum
from typing import Any, Final

import jax.tree_util as jtu
import numpy as np

from .._module.module import Module
from .._tree.filters import is_array_or_struct
from .._tree.nodes import children_of, path_str, with_article
from .._tree.partitioning import STATIC, Skeleton
from .._tree.strict import (
    compared_names,
    has_generated_equality,
    is_compared_as_tree,
    strictly_same,
)
from .base import global_name, is_global
from .difference import Leaf, static_fields, tree_of

Table = dict[str, Any]


class _Undescribed:
    """Holds a static value without a text, and the part of it that has none."""

    def __init__(self, value: Any, part: Any):
        self.value = value
        self.part = part

    def __eq__(self, other: object) -> bool:
        return type(other) is _Undescribed and strictly_same(self.value, other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __str__(self) -> str:
        return f"the static value {self.value!r}"


class NoText(Exception):
    """Its argument is a value that another process cannot compare with its own."""


def stored(table: Table) -> Table:
    """The table, to be written to a file; raises `ValueError` for an `_Undescribed`."""
    for place, entry in table.items():
        if isinstance(entry, _Undescribed):
            raise ValueError(
                f"`{place}` is the static value {entry.part!r}, of type "
                f"{type(entry.part).__name__}, which another process cannot compare with "
                "its own values. Static values can be exported if they are plain Python "
                "values, functions and classes at the top level of a module, or "
                "dataclasses and Modules of such values."
            )
    return table


def first_difference(old: Table, new: Table) -> str | None:
    """A sentence on the first difference of two trees, or `None` if they are equal."""
    for place in [*old, *(place for place in new if place not in old)]:
        was, now = old.get(place), new.get(place)
        if was is None or now is None:
            was, now = ("left out" if x is None else "given" for x in (was, now))
        if was != now:
            return f"`{place}` was {was}, and is now {now}."
    return None


def describe(path: str, tree: Any) -> Table:
    """The table of `tree`. Arrays, structs and data leaves are all `"an array"`."""
    table: Table = {}
    pending = [(path, tree)]  # the next one is last; no recursion, as trees may be deep
    while pending:
        path, tree = pending.pop()
        if _is_data(tree):
            table[path] = "an array"
        elif tree is None:
            table[path] = "None"
        elif jtu.all_leaves([tree]):
            table[path] = _static(tree.value if isinstance(tree, Leaf) else tree)
        else:
            children, treedef = children_of(tree)
            table[path] = _node(tree, children)
            for name, value in _held(tree, treedef).items():
                if isinstance(value, Skeleton):
                    table |= describe(path + name, tree_of(value))
                else:
                    table[path + name] = _static(value)
            pending += [(path_str(key, path), x) for key, x in reversed(children)]
    return table


def _held(tree: Any, treedef: Any) -> dict[str, Any]:
    """What a node holds besides its children, by the ends of the paths to it."""
    if isinstance(tree, Module):
        return {f".{name}": value for name, value in static_fields(tree).items()}
    kind, aux = treedef.node_data()
    return {} if kind in (list, tuple, dict) else {"'s structure": aux}


def _is_data(tree: Any) -> bool:
    if isinstance(tree, Leaf):
        return tree.label is not STATIC
    return is_array_or_struct(tree)


def _node(tree: Any, children: Any) -> Any:
    kind = type(tree)
    if kind not in (list, tuple, dict):
        return with_article(_name(kind))
    if not children:
        return f"an empty {kind.__name__}"
    if kind is not dict:
        return f"a {kind.__name__} of length {len(children)}"
    try:
        keys = ", ".join(f"[{_text(key.key)}]" for (key,), _ in children)
        return f"a dict with the keys {keys}"
    except NoText as e:
        return _Undescribed(list(tree), *e.args)


def _static(value: Any) -> Any:
    try:
        return f"the static value {_text(value)}"
    except NoText as e:
        return _Undescribed(value, *e.args)


def _text(value: Any) -> str:
    """The same text for values that are strictly the same, and for no others."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind in (tuple, list, slice, range):
        return f"{kind.__name__}({', '.join(map(_text, _parts(value)))})"
    if kind in (set, frozenset):
        return f"{kind.__name__}({', '.join(sorted(map(_text, value)))})"
    if kind is dict:  # the order does not count
        items = sorted(f"{_text(k)}: {_text(v)}" for k, v in value.items())
        return f"dict({', '.join(items)})"
    if isinstance(value, np.dtype):
        return value.str if value.names else value.name
    if isinstance(value, enum.Enum):
        return f"{_name(kind)}.{value.name}"
    if isinstance(value, Skeleton):
        return f"a structure {stored(describe('', tree_of(value)))}"
    if is_global(value):
        return _name(value)
    if is_global(kind) and (is_compared_as_tree(kind) or has_generated_equality(kind)):
        names = compared_names(kind, kind) or ()
        fields = (f"{name}={_text(getattr(value, name))}" for name in names)
        return f"{_name(kind)}({', '.join(fields)})"
    raise NoText(value)


def _parts(value: Any) -> Any:
    if type(value) in (slice, range):
        return value.start, value.stop, value.step
    return value


def _name(value: Any) -> str:
    return f"{value.__module__}:{global_name(value)}"


# What makes a plain value of its text.
_PLAIN: Final[dict[type, Any]] = {
    type(None): lambda text: None,
    type(...): lambda text: ...,
    bool: "True".__eq__,
    bytes: bytes.fromhex,
    complex: complex,
    float: float,
    int: int,
    str: str,
}
_READ: Final = {kind.__name__: read for kind, read in _PLAIN.items()}
_MAKE: Final[dict[str, Any]] = {
    "list": list,
    "tuple": tuple,
    "frozenset": frozenset,
    "slice": lambda bounds: slice(*bounds),
    "range": lambda bounds: range(*bounds),
}


def encode(path: str, tree: Any) -> list[Any]:
    """A tree of Python's containers, plain values and arrays as lists and texts.

    **Raises:** `ValueError` naming the path of anything else.
    """
    kind = type(tree)
    name = kind.__name__
    if _is_data(tree):
        return ["array", ""]
    if kind is dict:
        pairs = tree.items()
        return [
            name,
            [[encode(path, k), encode(f"{path}[{k!r}]", v)] for k, v in pairs],
        ]
    if kind in (list, tuple, frozenset, slice, range):
        parts = enumerate(_parts(tree))
        return [name, [encode(f"{path}[{i}]", x) for i, x in parts]]
    if kind not in _PLAIN:
        raise ValueError(
            f"`{path}` is {describe(path, tree)[path]}, which an exported function does "
            "not store: pass a tree with the structure of the output as `like`."
        )
    return [name, tree.hex() if kind is bytes else str(tree)]


def decode(code: Any) -> Any:
    """The tree from `encode`, with a `Leaf` for each array."""
    kind, content = code
    if kind == "array":
        return Leaf("data")
    if kind == "dict":
        return {decode(key): decode(value) for key, value in content}
    if kind in _MAKE:
        return _MAKE[kind](map(decode, content))
    return _READ[kind](content)
