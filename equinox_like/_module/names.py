"""What a callable Module shows of itself: name, code, documentation, annotations.

JAX asks each function that it transforms for `__name__` and `__code__`. It prints the whole
callable, and shows none of it, if there are none.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any


def function_of(fun: Any) -> Any:
    """The function that a `functools.partial` calls; any other callable as it is."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun


def name_of(fun: Any) -> str:
    """The name to show for any callable, also for one that has none."""
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
        # Without `__set__`: what wraps a function has the name of that in its dictionary.
        if instance is not None and callable(instance):
            return self.read(instance)
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}"
        )


class _Doc:
    """The docstring of a class; read from an instance, that of its function."""

    def __init__(self, of_class: str | None, function: Callable[[Any], Any]):
        self.of_class = of_class
        self.function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.of_class if instance is None else self.function(instance).__doc__


class _Annotations(dict[str, Any]):
    """The annotations of a class; read from an instance, those of its function.

    A dictionary, as this is what Python expects to find in the class.
    """

    function: Callable[[Any], Any]

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.function(instance).__annotations__


def show_function(cls: Any, function: Callable[[Any], Any]) -> None:
    """Gives instances of `cls` the docstring and annotations of `function(instance)`."""
    cls.__doc__ = _Doc(cls.__doc__, function)
    annotations = cls.__annotations__ = _Annotations(cls.__annotations__)
    annotations.function = function
