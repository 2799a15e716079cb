"""Annotations, signatures and names of arguments.

Since Python 3.14 an annotation is evaluated when it is read, not when it is written. So a
class may name itself, and a function a type that is imported for type checkers only. Here
a name that is not defined is a `ForwardRef`; reading `__annotations__`, and
`inspect.signature`, would raise `NameError`.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

# Since then, an instance does not find the annotations of its class, either.
ARE_LAZY: Final = sys.version_info >= (3, 14)

if sys.version_info >= (3, 14):
    import annotationlib
    from annotationlib import Format

    _OPTIONS: Any = {"annotation_format": Format.FORWARDREF}

    def annotations_of(x: Any) -> dict[str, Any]:
        """The own annotations of a class or function."""
        return annotationlib.get_annotations(x, format=Format.FORWARDREF)

else:
    annotations_of = inspect.get_annotations
    _OPTIONS: Any = {}


def annotate(
    function: Any, make: Callable[[Callable[[Any], Any]], dict[str, Any]]
) -> None:
    """Sets a function's annotations to `make(annotations_of)`, if possible only when they
    are read."""
    if sys.version_info >= (3, 14):

        def made(format: Any, /) -> dict[str, Any]:
            return make(lambda x: annotationlib.get_annotations(x, format=format))

        function.__annotate__ = made
    else:
        function.__annotations__ = make(annotations_of)


def signature_of(fun: Any, *, follow_wrapped: bool = True) -> inspect.Signature:
    """As `inspect.signature`, and `(*args, **kwargs)` for functions that have none, such
    as `max`. A class has one, or `ValueError` is raised."""
    try:
        return inspect.signature(fun, follow_wrapped=follow_wrapped, **_OPTIONS)
    except ValueError:
        if not isinstance(fun, type):
            return _ANY
        call = f"lambda *args: {fun.__name__}(*args)"
        raise ValueError(f"{fun!r} has no signature: pass `{call}`.") from None


_ANY: Final = inspect.signature(lambda *args, **kwargs: None)


def argument_names(bound: inspect.BoundArguments) -> dict[Any, tuple[str, str]]:
    """For each argument: its name in messages, and its parameter."""
    names = {}
    for parameter, value in bound.arguments.items():
        kind = bound.signature.parameters[parameter].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            for i, position in enumerate(value):
                names[position] = f"{parameter}[{i}]", parameter
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for key, position in value.items():
                names[position] = f"{parameter}[{key!r}]", parameter
        else:
            names[value] = parameter, parameter
    return names
