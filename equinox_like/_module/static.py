"""`Static`: any value as a tree without leaves."""

from typing import Any, Generic, TypeVar

import jax.tree_util as jtu

from .fields import field
from .module import Module

_T = TypeVar("_T")


class Static(Module, Generic[_T]):
    """Holds a value as structure, for transformations that accept arrays only.

    For JAX, two `Static`s are the same if their values have the same structure, and leaves
    that are equal and of the same type: `1`, `1.0` and `True` differ.

    **Arguments:**

    - `value`: any pytree. Its arrays, if any, cannot be compared.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        @jax.jit
        def f(x):
            return x + 1, eqx.internal.Static("text")

        assert f(1)[1].value == "text"
        ```
    """

    _leaves: tuple[Any, ...] = field(static=True)
    _treedef: Any = field(static=True)

    def __init__(self, value: _T):
        leaves, self._treedef = jtu.tree_flatten(value)
        self._leaves = tuple(leaves)

    @property
    def value(self) -> _T:
        return self._treedef.unflatten(self._leaves)
