"""Makes JAX's messages about a function that we made name the user's function."""

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu

from .base import function_of, name_of

_F = TypeVar("_F", bound=Callable[..., Any])


def show_as(made: _F, fun: Any, names: Callable[[], Sequence[str] | None]) -> _F:
    """`made`, whose arguments are arrays, in messages with the name and line of `fun`.

    `names()` returns the name of each array, such as `model.layers[0].weight`, or `None`.
    JAX may keep `made` as long as the process lives.
    """
    attributes: dict[str, Any] = vars(made)
    made.__name__ = made.__qualname__ = name_of(fun)
    made.__doc__ = getattr(fun, "__doc__", None)
    attributes["__signature__"] = _Names(names)
    source = inspect.unwrap(function_of(fun))
    code = (
        getattr(source, "__code__", None)
        or getattr(type(source).__call__, "__code__", None)
        or _BUILTIN
    )
    # Has the code of `fun`, and so its file and line, but does not keep `fun` alive.
    cells = tuple(types.CellType() for _ in code.co_freevars)
    attributes["__wrapped__"] = types.FunctionType(code, {}, made.__name__, None, cells)
    return made


# For functions without code, such as NumPy's ufuncs: JAX would show the line of `made`.
_BUILTIN = compile("", "<built-in>", "exec")


class _Names(inspect.Signature):
    def __init__(self, names: Callable[[], Sequence[str] | None]):
        rest = inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)
        super().__init__([rest])
        self._names = names

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jtu.tree_leaves(args)
        names = self._names()
        if names is None or len(names) != len(leaves):
            names = [f"leaf {i}" for i in range(len(leaves))]
        return types.SimpleNamespace(arguments=dict(zip(names, leaves, strict=True)))
