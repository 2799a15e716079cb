"""What all transformed functions share: holding a function, its name, and binding.

A transformed function is a Module. A callable pytree that it wraps, a model say, is its
subtree; any other callable is part of its structure, as are all options.
"""

import functools
import inspect
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    TypeVar,
    overload,
)

import jax
import jax.tree_util as jtu

from .._compat.source_info import pass_over
from .._module.fields import field
from .._module.flatten import WRAPPER_ATTRIBUTES
from .._module.module import Module
from .._module.names import OfCallables, function_of as function_of, name_of as name_of
from .._module.partial import Partial
from .._tree.cached import set_raw_dict

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_T = TypeVar("_T")
_new = object.__new__


class _Missing:
    def __repr__(self) -> str:
        return "<not given>"


# Stands for the function in `@filter_jit(option=...)`.
MISSING: Final[Any] = _Missing()


class Transformed(Module, Generic[_P, _T]):
    """A wrapped callable; base of what the transformations return.

    It carries the name, documentation and signature of what it wraps, which is
    `__wrapped__`. As an attribute of a class it binds like a method.
    """

    _wraps_callables_ = True
    # What it becomes when it is read from an instance.
    _binds_as_ = Partial

    # One of the two is the callable, the other one is `None`.
    _tree: Any
    _opaque: Any = field(static=True)

    # Where `fun` has a name, that one is in the dictionary of the instance.
    __name__ = OfCallables(lambda self: name_of(self.__wrapped__))  # pyright: ignore[reportAssignmentType]

    def __init__(self, fun: Any):
        require_callable(fun, type(self).__name__)
        is_opaque = jtu.all_leaves([fun])
        self._tree = None if is_opaque else fun
        self._opaque = fun if is_opaque else None
        for name in WRAPPER_ATTRIBUTES:
            try:
                value = getattr(fun, name)
            except AttributeError:
                continue
            setattr(self, name, value)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._opaque if self._tree is None else self._tree

    def __hash__(self) -> int:
        # Options may have no hash; wrappers that are equal wrap the same callable.
        return hash((type(self), self.__wrapped__))

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        raise TypeError(
            "`Transformed` is a base class: transformations return its subclasses."
        )

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Transformed[_P, _T]": ...
    @overload
    def __get__(
        self: "Transformed[Concatenate[Any, _Q], _T]",
        instance: object,
        owner: Any = None,
    ) -> Callable[_Q, _T]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # As if unflattened: without a constructor, since it is read at each call.
        bound: Any = _new(self._binds_as_)
        set_raw_dict(bound, {"func": self, "args": (instance,), "keywords": {}})
        return bound


def require_callable(fun: Any, transformation: str) -> None:
    if not callable(fun):
        raise TypeError(
            f"`{transformation}` wraps a function or another callable; got "
            f"{fun!r} of type {type(fun).__name__}."
        )


def refuse_deprecated(
    transformation: str, deprecated: Iterable[str], given: Mapping[str, Any], fix: str
) -> None:
    for name in deprecated:
        if name in given:
            raise ValueError(
                f"`{transformation}` no longer takes `{name}`, which was deprecated "
                f"long ago{fix}."
            )


def by_position(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with whatever has a position in it; the others by keyword."""
    if not kwargs:
        return args, kwargs
    bound = inspect.signature(fun).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def jit_is_disabled() -> bool:
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


def is_global(value: Any) -> bool:
    """Whether the name of a function or class leads to it, in the module it comes from."""
    try:
        module = sys.modules[value.__module__]
        return operator.attrgetter(value.__qualname__)(module) is value
    except (AttributeError, KeyError, TypeError):
        return False


def hide_frames(error: BaseException) -> None:
    """Takes the frames between the user's code and JAX out of a traceback.

    To be called in an `except` clause that then says `raise` alone, which does not put its
    own frame back. JAX does the same with its frames, and is asked in the same way not to:
    `JAX_TRACEBACK_FILTERING=off`. The last frame stays, whosever it is.
    """
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if not entries:
        return
    *entries, kept = entries
    for entry in reversed(entries):
        if not is_private(entry.tb_frame):
            entry.tb_next = kept
            kept = entry
    error.__traceback__ = kept


def frames_hidden(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: errors leave `function` as `hide_frames` leaves them."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except Exception as e:
            hide_frames(e)
            raise

    return call


# Not the layers, which show where in a model something went wrong.
_PACKAGE = Path(__file__).parents[1]
_PRIVATE = tuple(
    str(_PACKAGE / folder) + os.sep
    for folder in (
        "_arrays",
        "_compat",
        "_core",
        "_io",
        "_jit",
        "_loops",
        "_module",
        "_runtime",
        "_transforms",
        "_tree",
        "debug",
    )
)
pass_over(_PRIVATE)


def is_private(frame: types.FrameType) -> bool:
    """Whether a frame belongs to this library, so that it does not help a user."""
    return frame.f_code.co_filename.startswith(_PRIVATE)
