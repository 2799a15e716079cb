"""`doc_repr` and `doc_remove_args`: what a generator of documentation shall show.

They act only while the module `typing` has an attribute `GENERATING_DOCUMENTATION`, which
such a generator sets.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def doc_repr(obj: _T, string: str) -> _T:
    """An object that documentation shows as a given text, in a default value for example.

    **Arguments:**

    - `obj`: anything.
    - `string`: the text.

    **Returns:**

    `obj`. While documentation is generated (`typing.GENERATING_DOCUMENTATION` is set), a
    class instead whose `repr` is `string`, also as part of an annotation. Calling it calls
    `obj`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        relu = eqx.internal.doc_repr(jax.nn.relu, "<function relu>")
        assert relu is jax.nn.relu
        ```
    """
    if not _is_generating():
        return obj
    callee: Any = obj
    stand_in: Any = _StandIn(string, (), {"_obj": staticmethod(callee)})
    # `typing` shows a class with its module, unless it is a built-in one.
    stand_in.__module__ = "builtins"
    return stand_in


def doc_remove_args(*names: str) -> Callable[[_T], _T]:
    """Decorator: documentation shows a function without some of its parameters.

    **Arguments:**

    - `*names`: those of the parameters. Names that there are not are ignored.

    **Returns:**

    A decorator, which returns the function itself. While documentation is generated
    (`typing.GENERATING_DOCUMENTATION` is set), it gives the function another signature.

    !!! example

        ```python
        import equinox_like as eqx

        @eqx.internal.doc_remove_args("_internal")
        def f(x, _internal=None):
            return x

        assert f(1, _internal=2) == 1
        ```
    """

    def decorate(fn: Any) -> Any:
        if _is_generating():
            signature = inspect.signature(fn)
            kept = [p for k, p in signature.parameters.items() if k not in names]
            # That of a wrapper is looked up in what it wraps.
            innermost: Any = inspect.unwrap(fn)
            innermost.__signature__ = signature.replace(parameters=kept)
        return fn

    return decorate


class _StandIn(type):
    _obj: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._obj(*args, **kwargs)

    def __repr__(cls) -> str:
        return cls.__qualname__


def _is_generating() -> bool:
    return hasattr(typing, "GENERATING_DOCUMENTATION")
