"""Describes a tree without its arrays as plain data, to be compared in another process.

A treedef holds classes, and a static leaf may be any object, so neither can be written
to a file. A description is written instead: nested lists of text and numbers. Trees
with equal descriptions are treated as the same tree. A value that has no description as
text is kept as it is (`_Undescribed`): it can be compared in this process, but not
written.
"""

import enum
from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._module.module import Module
from .._tree.filters import is_array_or_struct
from .._tree.nodes import children_of, path_str, with_article
from .._tree.splitting import STATIC, Skeleton
from .._tree.strict import (
    compared_names,
    has_generated_equality,
    is_compared_as_tree,
    strictly_same,
)
from .difference import Leaf, static_fields, tree_of
from .pickling import global_name, is_global

# The description of a tree is one of
#     ["array"]    ["static", value]    ["none"]
#     ["list" | "tuple" | "dict", "", [], [[key, tree], ...]]
#     ["node", "module:qualname", [[name, value], ...], [[key, tree], ...]]
# and that of a value
#     [type, text]    ["tuple" | ..., [value, ...]]    ["named", "module:qualname"]
#     ["object", ["module:qualname", [[name, value], ...]]]    ["skeleton", tree]
Description = Any

_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", dict: "dict"}


class _Undescribed:
    """Holds a value that cannot be described as text."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Undescribed and strictly_same(self.value, other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def stored(path: str, description: Description) -> Description:
    """What to write to a file; raises `ValueError` if it holds an `_Undescribed`."""
    for place, value in _undescribed_in_tree(path, description):
        raise ValueError(
            f"`{place}` is the static value {value!r}, of type {type(value).__name__}, "
            "which another process cannot compare with its own values. Static values "
            "can be exported if they are plain Python values, functions and classes "
            "at the top level of a module, or dataclasses and Modules of such values."
        )
    return description


def first_difference(path: str, old: Description, new: Description) -> str | None:
    """A sentence on the first difference of two trees, or `None` if they are equal."""
    for place, was, now in _differences(path, old, new):
        return f"`{place}` was {_show(was)}, and is now {_show(now)}."
    return None


def describe_tree(tree: Any) -> Description:
    """Describes `tree`. Arrays, structs and data leaves all become `"array"`."""
    if isinstance(tree, Leaf):
        return ["static", _value(tree.value)] if tree.label is STATIC else ["array"]
    if is_array_or_struct(tree):
        return ["array"]
    if tree is None:
        return ["none"]
    if jtu.all_leaves([tree]):
        return ["static", _value(tree)]
    children, treedef = children_of(tree)
    below = [[_key(key), describe_tree(child)] for (key,), child in children]
    kind = _CONTAINERS.get(type(tree))
    if kind is not None:
        return [kind, "", [], below]
    if isinstance(tree, Module):
        held = [[f".{n}", _value(v)] for n, v in static_fields(tree).items()]
    else:
        _, aux = treedef.node_data()
        held = [["'s structure", _value(aux)]]
    return ["node", _name(type(tree)), held, below]


def _key(key: Any) -> Any:
    # The key of a dictionary is any value; for other nodes the text is enough.
    if isinstance(key, jtu.DictKey):
        return [path_str((key,)), _value(key.key)]
    return [path_str((key,)), ["none", ""]]


def _value(value: Any) -> Any:
    kind = type(value)
    if value is None:
        return ["none", ""]
    if kind in (bool, int, float, complex, str):
        return [kind.__name__, value if kind is str else repr(value)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in (tuple, list):
        return [kind.__name__, [_value(v) for v in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((_value(v) for v in value), key=repr)]
    if kind is dict:
        items = ([_value(k), _value(v)] for k, v in value.items())
        return ["dict", sorted(items, key=repr)]  # their order does not count
    if isinstance(value, np.dtype):
        return ["dtype", value.str if value.names else value.name]
    if isinstance(value, enum.Enum):
        return ["member", f"{_name(kind)}.{value.name}"]
    if isinstance(value, Skeleton):
        return ["skeleton", describe_tree(tree_of(value))]
    if is_global(value):
        return ["named", _name(value)]
    names = _compared(kind)
    if names is not None:
        fields = [[name, _value(getattr(value, name))] for name in names]
        return ["object", [_name(kind), fields]]
    return ["undescribed", _Undescribed(value)]


def _compared(kind: type) -> list[str] | None:
    """The fields of a class whose `==` compares these only, and that has a name."""
    if not is_global(kind):
        return None
    if is_compared_as_tree(kind) or has_generated_equality(kind):
        return compared_names(kind, kind)
    return None


def _name(value: Any) -> str:
    return f"{value.__module__}:{global_name(value)}"


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if old == new:
        return
    node = len(old) == len(new) == 4 and old[:2] == new[:2]
    if node and [key for key, _ in old[3]] == [key for key, _ in new[3]]:
        if [name for name, _ in old[2]] == [name for name, _ in new[2]]:
            for (name, was), (_, now) in zip(old[2], new[2], strict=True):
                if was[0] == now[0] == "skeleton":
                    yield from _differences(path + name, was[1], now[1])
                elif was != now:
                    yield path + name, ["static", was], ["static", now]
            for (key, was), (_, now) in zip(old[3], new[3], strict=True):
                yield from _differences(path + key[0], was, now)
            return
    yield path, old, new


def _undescribed_in_tree(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if tree[0] == "static":
        yield from ((path, v) for v in _undescribed_in(tree[1]))
    if len(tree) == 4:
        for name, value in tree[2]:
            yield from ((path + name, v) for v in _undescribed_in(value))
        for (key, value), child in tree[3]:
            yield from ((path + key, v) for v in _undescribed_in(value))
            yield from _undescribed_in_tree(path + key, child)


def _undescribed_in(value: Any) -> Iterator[Any]:
    if isinstance(value, _Undescribed):
        yield value.value
    elif isinstance(value, list):
        for v in value:
            yield from _undescribed_in(v)


def _show(tree: Any) -> str:
    kind, *rest = tree
    if kind == "array":
        return "an array"
    if kind == "none":
        return "None"
    if kind == "static":
        return f"the static value {_show_value(rest[0])}"
    if kind == "node":
        return with_article(rest[0])
    if not rest[2]:
        return f"an empty {kind}"
    if kind == "dict":
        return f"a dict with the keys {', '.join(key[0] for key, _ in rest[2])}"
    return f"a {kind} of length {len(rest[2])}"


def _show_value(value: Any) -> str:
    kind, content = value
    if isinstance(content, _Undescribed):
        return repr(content.value)
    if kind == "none":
        return "None"
    if kind == "str":
        return repr(content)
    if kind == "skeleton":
        return "a structure"
    if kind == "object":
        name, fields = content
        shown = ", ".join(f"{field}={_show_value(v)}" for field, v in fields)
        return f"{name.partition(':')[2]}({shown})"
    if isinstance(content, list):
        inside = ", ".join(
            _show_value(v) if isinstance(v[0], str) else ": ".join(map(_show_value, v))
            for v in content
        )
        return f"{kind}({inside})"
    return content


_READ = {
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "bytes": bytes.fromhex,
    "bool": {"True": True, "False": False}.__getitem__,
    "none": lambda text: None,
}


def rebuild(path: str, description: Description) -> Any:
    """The tree, if its nodes are Python's containers, with a `Leaf` for each array."""
    kind, *rest = description
    if kind == "array":
        return Leaf("data")
    if kind == "none":
        return None
    if kind == "static":
        return _rebuild_value(path, rest[0])
    children = [] if kind == "node" else rest[2]
    if kind == "list":
        return [rebuild(path + key[0], child) for key, child in children]
    if kind == "tuple":
        return tuple(rebuild(path + key[0], child) for key, child in children)
    if kind == "dict":
        return {
            _rebuild_value(path, key[1]): rebuild(path + key[0], child)
            for key, child in children
        }
    raise ValueError(
        f"`{path}` is {with_article(rest[0])}, which an exported function does not "
        "store: pass a tree with the structure of the output as `like`."
    )


def _rebuild_value(path: str, value: Any) -> Any:
    kind, content = value
    if kind in _READ:
        return _READ[kind](content)
    makers = {"tuple": tuple, "frozenset": frozenset}
    if kind in makers:
        return makers[kind](_rebuild_value(path, v) for v in content)
    raise ValueError(
        f"`{path}` is the static value {_show_value(value)}, which an exported "
        "function does not store: pass a tree with the structure of the output as "
        "`like`."
    )
