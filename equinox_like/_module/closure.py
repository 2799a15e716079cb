"""`closure_to_pytree`: turns functions into Modules, with their closures as
children."""

import enum
import types
from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu

from .fields import field
from .module import Module

_Function = types.FunctionType


def closure_to_pytree(tree: Any) -> Any:
    """Makes the values that functions close over leaves of a tree.

    Each Python function among the leaves becomes a callable Module. Its children are the
    values of its closure and of its defaults, in which functions are replaced in turn. So
    an optimiser's learning rate can be differentiated, and an optimiser that is created
    again with other arrays does not cause a recompilation.

    Two such Modules have equal structure if their functions have the same code, name,
    module and globals.

    **Arguments:**

    - `tree`: any pytree. Other callables among its leaves, such as built-in functions
        and `functools.partial`s, are not changed.

    **Returns:**

    A copy of the tree. Its functions are called like the original ones, and read the
    globals of their module. Each call creates a new closure, so assignments to
    `nonlocal` names are lost.

    **Raises:**

    `ValueError` if a function refers to itself through the closure of another one, or
    through a container. A function that calls itself is fine.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        def sgd(rate):
            def update(gradient):
                return -rate * gradient

            return update

        update = eqx.internal.closure_to_pytree(sgd(jnp.asarray(0.5)))
        assert update(jnp.asarray(4.0)) == -2
        gradient = eqx.filter_grad(lambda update, x: update(x))(update, jnp.asarray(4.0))
        assert gradient.cells == (-4.0,)
        ```
    """
    return _replace(tree, ())


def _replace(tree: Any, within: tuple[_Function, ...]) -> Any:
    def replace(leaf):
        return _closure(leaf, within) if isinstance(leaf, _Function) else leaf

    return jtu.tree_map(replace, tree)


def _closure(function: _Function, within: tuple[_Function, ...]) -> "Closure":
    if function in within:
        names = " -> ".join(f"`{f.__qualname__}`" for f in (*within, function))
        raise ValueError(
            f"`closure_to_pytree` found a function that refers to itself: {names}. A "
            "tree cannot contain itself: pass one of these functions as an argument, "
            "or make it a global function."
        )
    cells = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            value = _Placeholder.EMPTY
        is_self = value is function
        cells.append(
            _Placeholder.SELF if is_self else _replace(value, (*within, function))
        )
    return Closure(
        tuple(cells),
        _replace(function.__defaults__, (*within, function)),
        _replace(function.__kwdefaults__, (*within, function)),
        _Code(function),
    )


class Closure(Module):
    """A function whose closure and defaults are children.

    `equinox_like.internal.closure_to_pytree` creates it.
    """

    cells: tuple[Any, ...]
    defaults: tuple[Any, ...] | None
    keyword_defaults: Mapping[str, Any] | None
    code: "_Code" = field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.code.name

    @property
    def __wrapped__(self) -> _Function:
        cells = tuple(self._cell(value) for value in self.cells)
        return self.code.function(cells, self.defaults, self.keyword_defaults)

    def _cell(self, value: Any) -> types.CellType:
        if value is _Placeholder.EMPTY:
            return types.CellType()
        return types.CellType(self if value is _Placeholder.SELF else value)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class _Code:
    """A function without its closure and defaults."""

    def __init__(self, function: _Function):
        self.name = function.__name__
        self._code = function.__code__
        self._globals = function.__globals__
        self._names = (function.__module__, function.__qualname__)

    def function(self, cells: Any, defaults: Any, keywords: Any) -> _Function:
        cells = cells or None
        made = _Function(self._code, self._globals, self.name, defaults, cells)
        made.__kwdefaults__ = None if keywords is None else {**keywords}
        made.__module__, made.__qualname__ = self._names
        return made

    def __eq__(self, other: object) -> bool:
        return type(other) is _Code and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Any:
        # `==` of code objects compares bytecode, typed constants, names and lines.
        return self._code, self.name, self._names, id(self._globals)

    def __deepcopy__(self, memo: Any) -> "_Code":
        return self  # never a copy of the globals

    def __repr__(self) -> str:
        return f"<code of {self._names[1]}>"


class _Placeholder(enum.Enum):
    """Placeholder for the content of a cell that cannot be a child."""

    EMPTY = "not assigned"
    SELF = "the function itself"

    def __repr__(self) -> str:
        return f"<{self.value}>"
