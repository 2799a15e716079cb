"""`doc_repr` and `doc_remove_args`: change what generated documentation shows.

They have an effect only while the module `typing` has an attribute
`GENERATING_DOCUMENTATION`, which a documentation generator sets.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from .._annotations import signature_of

_T = TypeVar("_T")


def doc_repr(obj: _T, string: str) -> _T:
    """Has documentation show an object as a given text, for example as a default value.

    **Arguments:**

    - `obj`: anything.
    - `string`: the text.

    **Returns:**

    `obj`. While documentation is generated (`typing.GENERATING_DOCUMENTATION` is set), a
    class whose `repr` is `string`, also within an annotation. Calling that class calls
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

    - `*names`: the names of the parameters. Unknown names are ignored.

    **Returns:**

    A decorator, which returns the function itself. While documentation is generated
    (`typing.GENERATING_DOCUMENTATION` is set), it also changes the signature.

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
            signature = signature_of(fn)
            kept = [p for k, p in signature.parameters.items() if k not in names]
            # `inspect.signature` follows `__wrapped__` to the innermost function.
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
