"""The arguments of a call by the names of their parameters: options for each, and paths."""

import inspect
from collections.abc import Callable
from typing import Any

from .._core.base import name_of
from .._jit.layout import argument_names
from .._tree.paths import path_str


def by_name(
    option: str,
    fun: Callable[..., Any],
    given: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    default: Any,
) -> list[tuple[Any, Any, str, str]]:
    """For each argument: what an option gives for it by name, its value, and the names
    of both, in the order of the leaves of `(args, kwargs)`."""
    names = _names(fun, args, kwargs)
    # What is one of `*args` has no name of its own.
    shown = [name if name == parameter else None for name, parameter in names]
    known = [name for name in [*shown, *kwargs] if name is not None]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"`{option}` names {unknown}, which `{name_of(fun)}` was not passed; the "
            f"arguments that can be named in this call are {sorted(known)}."
        )
    named = [*zip(shown, args, strict=True), *sorted(kwargs.items())]
    return [
        (given.get(name, default), value, f"{option}[{name!r}]", name)
        if name is not None
        else (default, value, option, "args")
        for name, value in named
    ]


def _names(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, str]]:
    """How to show each positional argument, and its parameter.

    **Raises:**

    `TypeError` if the function cannot be called so.
    """
    call = range(len(args)), {k: k for k in kwargs}
    try:
        bound = inspect.signature(fun).bind(*call[0], **call[1])
    except TypeError:
        # What `functools.wraps` returns shows another signature than it has.
        signature = inspect.signature(fun, follow_wrapped=False)
        bound = signature.bind(*call[0], **call[1])
    names = argument_names(bound)
    return [names[i] for i in range(len(args))]


def argument_name(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: Any
) -> str:
    """The path of a leaf of `(args, kwargs)`, as the function names its arguments."""
    kind, place, *path = path
    if kind.idx == 1:
        return path_str(path, place.key)
    try:
        return path_str(path, _names(fun, args, kwargs)[place.idx][0])
    except (TypeError, ValueError):
        return path_str(path, f"args[{place.idx}]")
