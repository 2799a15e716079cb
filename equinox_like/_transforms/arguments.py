"""Arguments by the names of their parameters: options by name, and paths of leaves."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu

from .._annotations import signature_of
from .._core.base import name_of
from .._core.show_as import show_as
from .._jit.layout import argument_names
from .._tree.filters import is_array
from .._tree.nodes import path_str

_F = TypeVar("_F", bound=Callable[..., Any])


def by_name(
    option: str,
    fun: Callable[..., Any],
    given: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    default: Any,
) -> list[tuple[Any, Any, str, str]]:
    """For each argument: its entry in the option `given`, its value, and the names of
    both in messages. They are in the order of the leaves of `(args, kwargs)`."""
    names = _names(fun, args, kwargs)
    # An element of `*args` has no name of its own.
    shown = [name if name == parameter else None for name, parameter in names]
    known = [name for name in [*shown, *kwargs] if name is not None]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"`{option}` names {unknown}, but `{name_of(fun)}` was called without it; "
            f"the arguments that can be named in this call are {sorted(known)}."
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
    """For each positional argument: its name in messages, and its parameter.

    **Raises:**

    `TypeError` if the arguments do not fit the function's signature.
    """
    call = range(len(args)), {k: k for k in kwargs}
    try:
        bound = signature_of(fun).bind(*call[0], **call[1])
    except TypeError:
        # `functools.wraps` shows the signature of the wrapped function, not the actual
        # one.
        signature = signature_of(fun, follow_wrapped=False)
        bound = signature.bind(*call[0], **call[1])
    names = argument_names(bound)
    return [names[i] for i in range(len(args))]


def check_arguments(
    where: str, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises `TypeError` if the arguments do not fit the function's signature."""
    try:
        _names(fun, args, kwargs)
    except TypeError as error:
        raise TypeError(f"`{where}` of `{name_of(fun)}`: {error}.") from None
    except ValueError:  # it has no signature
        pass


def data_names(
    fun: Any,
    tree: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_data: Callable[[Any], bool] = is_array,
) -> list[str]:
    """For each array of `(tree, args, kwargs)`: its path, starting with the name of the
    function, or with that of its parameter."""
    try:
        names = [name for name, _ in _names(fun, args, kwargs)]
    except (TypeError, ValueError):
        names = [f"args[{i}]" for i in range(len(args))]
    parts = [
        (name_of(fun), tree),
        *zip(names, args, strict=True),
        *sorted(kwargs.items()),
    ]
    return [
        path_str(path, name)
        for name, part in parts
        for path, x in jtu.tree_leaves_with_path(part)
        if is_data(x)
    ]


def show_as_call(
    made: _F,
    fun: Any,
    tree: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_data: Callable[[Any], bool] = is_array,
    before: Sequence[str] = (),
) -> _F:
    """`made` in JAX's messages as a call of `fun`, see `show_as`. Its arrays are those of
    `data_names`, after some with the names `before`."""
    names = [*before, *data_names(fun, tree, args, kwargs, is_data)]
    return show_as(made, fun, lambda: names)


def argument_name(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: Any
) -> str:
    """The path of a leaf of `(args, kwargs)`, starting with its parameter's name."""
    kind, place, *path = path
    if kind.idx == 1:
        return path_str(path, place.key)
    try:
        return path_str(path, _names(fun, args, kwargs)[place.idx][0])
    except (TypeError, ValueError):
        return path_str(path, f"args[{place.idx}]")
