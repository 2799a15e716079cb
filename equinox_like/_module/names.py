"""The name, code, docstring and annotations that a callable Module shows.

JAX reads `__name__` and `__code__` of each function that it transforms. Without
`__name__` it computes the `repr` of the whole callable, and does not show it.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from .._annotations import ARE_LAZY
from .._warn import is_passed_over


def function_of(fun: Any) -> Any:
    """The function that a `functools.partial` calls; other callables unchanged."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun


def name_of(fun: Any) -> str:
    """The name to show for a callable: its `__name__`, or else its type's."""
    fun = function_of(fun)
    name = getattr(fun, "__name__", None)
    return name if isinstance(name, str) else type(fun).__name__


def code_of(fun: Any) -> types.CodeType | None:
    return getattr(inspect.unwrap(function_of(fun)), "__code__", None)


class OfCallables:
    """An attribute that only callable instances have."""

    def __init__(self, read: Callable[[Any], Any]):
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        # There is no `__set__`, so a name in the instance's dictionary is found first.
        if instance is not None and callable(instance):
            return self.read(instance)
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}"
        )


class NameForJAX(OfCallables):
    """The `__name__` of a Module, which JAX alone sees.

    A Module is not a function. To others it has no name, as with Equinox: pytest, for one,
    names a test by the `__name__` of its parameter.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        frame: Any = sys._getframe(1)
        while is_passed_over(frame.f_code.co_filename):
            frame = frame.f_back  # the outermost one is not of the library
        is_for_jax = frame.f_globals.get("__name__", "").startswith("jax.")
        return super().__get__(instance if is_for_jax else None, owner)


class _Doc:
    """The docstring of a class; for an instance, that of its function."""

    def __init__(self, of_class: str | None):
        self.of_class = of_class

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self.of_class if instance is None else owner._shown_(instance).__doc__


class _Annotations(dict[str, Any]):
    """The annotations of a class; for an instance, those of its function.

    It is a dictionary, since Python expects one in the class.
    """

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        # Not its `__annotations__`: `functools.lru_cache` copies `__annotate__` only.
        return inspect.get_annotations(owner._shown_(instance))


class Shown:
    """Base class of callables that show the attributes of a function."""

    def _shown_(self) -> Any:
        """The function."""
        return self.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]

    if ARE_LAZY:
        __annotations__ = _Annotations()
        __annotate__ = OfCallables(lambda self: type(self)._shown_(self).__annotate__)


def show_function(cls: Any) -> None:
    """Gives instances of `cls` the docstring and annotations of their function."""
    cls.__doc__ = _Doc(cls.__doc__)
    if not ARE_LAZY:
        cls.__annotations__ = _Annotations(cls.__annotations__)
