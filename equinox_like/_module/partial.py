"""`Partial`: `functools.partial` as a pytree."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .._annotations import signature_of
from .module import Module, as_pytree
from .names import OfCallables, code_of, name_of, show_function

_T = TypeVar("_T")


class Partial(Module, Generic[_T]):
    """Like `functools.partial`, and a pytree: function and arguments are its children.

    A keyword given both here and in the call is a `TypeError`. Its name, docstring and
    annotations are those of the function.

    **Arguments:**

    - `func`: any callable, a Module for example.
    - `*args`, `**kwargs`: arguments of `func`. Those of a call are added after them.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        add_one = eqx.Partial(jnp.add, jnp.asarray(1.0))
        assert add_one(2.0) == 3.0
        ```
    """

    func: Callable[..., _T]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    __name__ = OfCallables(lambda self: name_of(self.func))  # pyright: ignore[reportAssignmentType]
    __code__ = OfCallables(lambda self: code_of(self.func) or Partial.__call__.__code__)

    def __init__(self, func: Callable[..., _T], /, *args: Any, **kwargs: Any):
        self.func = as_pytree(func)
        self.args = args
        self.keywords = kwargs

    def _shown_(self) -> Any:
        return self.func

    def __call__(self, /, *args: Any, **kwargs: Any) -> _T:
        if self.keywords:
            return self.func(*self.args, *args, **kwargs, **self.keywords)
        return self.func(*self.args, *args, **kwargs)  # faster; the case of a method

    @property
    def __wrapped__(self) -> types.MethodType:
        # Of a transformed method: `inspect.getsource`, `typing.get_type_hints` and `??` of
        # IPython read it.
        if self.keywords:
            raise AttributeError("__wrapped__")
        try:
            return types.MethodType(inspect.unwrap(self.func), *self.args)
        except (TypeError, ValueError) as e:  # not one argument, or no function
            raise AttributeError("__wrapped__") from e

    @property
    def __signature__(self) -> inspect.Signature:
        partial = functools.partial(self.func, *self.args, **self.keywords)
        try:
            signature = signature_of(partial)
        except (TypeError, ValueError) as e:  # `inspect` then uses `__call__`
            raise AttributeError("__signature__") from e
        parameters = signature.parameters.values()
        left = [p for p in parameters if p.name not in self.keywords]
        return signature.replace(parameters=left)


show_function(Partial)
