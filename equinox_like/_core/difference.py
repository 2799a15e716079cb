"""Finds how the structures and static leaves of two calls differ, with paths.

JAX compares the data leaves, and names the one that differs. This file compares static
leaves and the tree structure, when a compiled function is called with other arguments
than it was compiled for. Loops use it to compare the carry before and after a step.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax.tree_util as jtu
import numpy as np

from .._module.instance import code_of, function_of
from .._module.module import BoundMethod, Module, as_pytree
from .._tree.filters import is_array, is_number
from .._tree.nodes import (
    children_of,
    describe_both,
    describe_node,
    path_str,
    with_article,
)
from .._tree.partitioning import STATIC, Skeleton
from .._tree.strict import strict_treedef, strictly_same

ARGUMENTS: Final = "argument count"
STRUCTURE: Final = "tree structure"
ARRAY_TYPE: Final = "array type"
STATIC_TYPE: Final = "static type"
STATIC_VALUE: Final = "static value"

# After how many values a place that changes causes a warning.
FEW: Final = 8
MANY: Final = 16

# The name and number of leaves of each argument, the callable itself first (see `Layout`).
Arguments = Sequence[tuple[str, int]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place of the arguments that differs, described before and after."""

    path: str
    kind: str
    before: str
    after: str
    # How to fix it; empty if that is not known.
    fix: str = ""
    # How many values of this place cause a `RetraceWarning`: 0 for any number of them.
    limit: int = 0

    def __str__(self) -> str:
        return f"`{self.path}` was {self.before}, and is now {self.after}."


def differences(
    before: tuple[Arguments, Skeleton], after: tuple[Arguments, Skeleton]
) -> Iterator[Difference]:
    """Each static difference of two calls, in the order of the signature. There is none
    if both calls can use one compiled program."""
    try:
        (fun, *args), (other, *others) = trees(*before), trees(*after)
    except Exception:
        # A user's node type may refuse placeholders as children.
        was, now = before[1].treedef, after[1].treedef
        yield Difference("the arguments", STRUCTURE, str(was), str(now))
        return
    yield from _walk(fun[0], fun[1], other[1])
    old, new = dict(args), dict(others)
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            yield Difference(name, ARGUMENTS, "given", "left out")
        elif name not in old:
            yield Difference(name, ARGUMENTS, "left out", "given")
        else:
            yield from _walk(name, old[name], new[name])


def tree_differences(
    path: str,
    before: Any,
    after: Any,
    is_data: Callable[[Any], bool] = is_array,
    type_of: Callable[[Any], str] = lambda _: "an array",
) -> Iterator[Difference]:
    """Each place at which two trees differ, apart from the values of their arrays.

    Arrays are equal if `type_of` gives the same text for them; by default all are.
    """
    try:
        old, new = (_without_data(tree, is_data, type_of) for tree in (before, after))
        yield from _walk(path, old, new)
    except Exception:
        # A user's node type may refuse placeholders as children.
        was, now = map(jtu.tree_structure, (before, after))
        yield Difference(path, STRUCTURE, str(was), str(now))


def _without_data(tree: Any, is_data: Callable[[Any], bool], type_of: Any) -> Any:
    return jtu.tree_map(
        lambda x: Leaf("data", type_of(x)) if is_data(x) else Leaf(STATIC, x), tree
    )


class Leaf:
    """Placeholder for a leaf: a label and text for data, or `STATIC` and the value."""

    def __init__(self, label: Any, value: Any = None):
        self.label = label
        self.value = value

    def __eq__(self, other: object) -> bool:  # for a node that takes it for no child
        return (
            type(other) is Leaf
            and self.label == other.label
            and strictly_same(self.value, other.value)
        )

    def __hash__(self) -> int:
        return hash(self.label)

    def __str__(self) -> str:
        return repr(self.value) if self.label is STATIC else "an array"


def tree_of(skeleton: Skeleton) -> Any:
    """The tree with a `Leaf` in place of each leaf."""
    statics = iter(skeleton.statics)
    return skeleton.treedef.unflatten(
        Leaf(label, next(statics) if label is STATIC else None)
        for label in skeleton.labels
    )


def trees(arguments: Arguments, skeleton: Skeleton) -> list[tuple[str, Any]]:
    """Name and tree of the callable and of each argument, with a `Leaf` in place of
    each leaf."""
    fun, args, kwargs = tree_of(skeleton)
    found = [fun, *args, *(kwargs[key] for key in sorted(kwargs))]
    return [(name, tree) for (name, _), tree in zip(arguments, found, strict=True)]


def _walk(path: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Leaf) and isinstance(new, Leaf):
        if old.label is STATIC and new.label is STATIC:
            yield from _static(path, old.value, new.value)
        elif old.label != new.label:
            yield Difference(path, STATIC_TYPE, *describe_both(old, new, _described))
        elif old.value != new.value:
            yield Difference(path, ARRAY_TYPE, old.value, new.value)
        return
    if type(old) is not type(new):
        yield Difference(path, STRUCTURE, *describe_both(old, new, _described))
        return
    (children, was), (others, now) = children_of(old), children_of(new)
    if [step for step, _ in children] != [step for step, _ in others]:
        texts = describe_both(old, new, _described)
        yield Difference(path, STRUCTURE, *texts, limit=MANY)
        return
    found = list(_in_static_fields(path, old, new))
    for (step, child), (_, other) in zip(children, others, strict=True):
        found += _walk(path_str(step, path), child, other)
    yield from found
    if not found and strict_treedef(was) != strict_treedef(now):
        # The children agree, so the node's own auxiliary data differs.
        yield Difference(path, STRUCTURE, _held(was), _held(now), limit=MANY)


def _in_static_fields(path: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Module):
        statics, other = static_fields(old), static_fields(new)
        for name in statics:
            if name in other:
                place = f"{path}.{name}"
                yield from _static(place, statics[name], other[name], is_field=True)


def _static(
    path: str, old: Any, new: Any, is_field: bool = False
) -> Iterator[Difference]:
    if not strictly_same(old, new):
        kind = STATIC_VALUE if type(old) is type(new) else STATIC_TYPE
        was, now = describe_both(old, new, repr)
        was = f"the static value {was}"
        yield Difference(
            path, kind, was, now, _fix(old, new, is_field), _limit(old, new)
        )


def _limit(old: Any, new: Any) -> int:
    """A number may change in each step, as may a function that is made for each. There
    are only so many dtypes, classes, and functions with code of their own."""
    if isinstance(new, bool | enum.Enum | type | np.dtype):
        return 0
    if isinstance(new, _SIMPLE):
        return FEW
    if callable(new) and not dataclasses.is_dataclass(new):
        return FEW if _code_or_itself(old) is _code_or_itself(new) else 0
    return MANY


_SIMPLE: Final = int | float | complex | str | bytes | tuple | list | dict | set


def _code_or_itself(fun: Any) -> Any:
    return code_of(fun) or function_of(fun)


def _fix(old: Any, new: Any, is_field: bool) -> str:
    fixes = []
    if is_field:
        fixes.append("It is a static field.")
    if is_number(new):
        fixes.append(
            f"It is a Python {type(new).__name__} and so static: pass "
            "`jnp.asarray(...)`, or keep its value fixed."
        )
    if isinstance(new, str):
        fixes.append("It is a string and so static: keep it fixed, or pass a number.")
    if callable(new) and (
        _code_or_itself(old) is _code_or_itself(new)
        or _shown_name(old) == _shown_name(new)
    ):
        fixes.append(_fix_of_function(new))
    return " ".join(fixes)


def _fix_of_function(fun: Any) -> str:
    if isinstance(fun, functools.partial):
        parts = as_pytree(fun.func), fun.args, fun.keywords
        if any(map(is_array, jtu.tree_leaves(parts))):
            return (
                "A `functools.partial` is not a pytree: its arrays are constants of the "
                "program. Use `equinox_like.Partial`."
            )
    return "It is a new function object: create it once, and pass the same one."


def _shown_name(fun: Any) -> str:
    # A `functools.partial` has no name, but shows its parts.
    return getattr(fun, "__qualname__", None) or repr(fun)


def static_fields(module: Module) -> dict[str, Any]:
    if isinstance(module, BoundMethod):
        return {"__func__": module.__func__}
    _, aux = jtu.tree_structure(module).node_data()  # see `_module/flatten.py`
    return {} if aux is None else aux.statics  # `Frozen` registers itself


def _described(side: Any) -> str:
    return str(side) if isinstance(side, Leaf) else describe_node(side)


def _held(treedef: Any) -> str:
    kind, data = treedef.node_data()
    return f"{with_article(kind.__name__)} with {data!r}"
