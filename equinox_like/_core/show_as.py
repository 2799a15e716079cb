"""Shows functions in messages of JAX, by the names of the user, and in documentation.

`doc_repr` and `doc_remove_args` have an effect only while the module `typing` has an
attribute `GENERATING_DOCUMENTATION`, which a documentation generator sets.
"""

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np

from .._annotations import signature_of
from .._compat.errors import is_unconverted_error
from .._module.instance import code_of, function_of, name_of
from .._tree.filters import has_conversion, is_array
from .._tree.nodes import MAKE_A_PYTREE, path_str, with_article
from .._tree.require import named_arguments

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


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
    code = code_of(source) or code_of(type(source).__call__) or _BUILTIN
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


def name_unconverted(
    error: Exception, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Replaces the message of such an error, raised by a call of `fun` with these
    arguments, by one with the path."""
    if not is_unconverted_error(error):
        return
    for name, tree in named_arguments(fun, args, kwargs):
        for path, leaf in jtu.tree_leaves_with_path(tree):
            if isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.size:
                path, leaf = (*path, jtu.SequenceKey(0)), leaf.flat[0]
            if has_conversion(leaf) and not is_array(leaf):
                shown = path_str(path, name)
                error.args = (
                    f"`{shown}` is {with_article(type(leaf).__name__)}, which has a method "
                    "`__jax_array__`. JAX does not call it while it traces a function: "
                    f"pass `jnp.asarray({shown})`. Or, so that JAX sees the arrays in the "
                    f"object: {MAKE_A_PYTREE}",
                )
                return


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
