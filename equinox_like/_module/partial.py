"""`Partial`: `functools.partial` as a pytree."""

from collections.abc import Callable
from typing import Any

from .flatten import REGULAR, STATE, set_attributes
from .module import Module


class Partial(Module):
    """Like `functools.partial`, and a pytree: function and arguments are its children.

    A keyword given both here and in the call is a `TypeError`.

    **Arguments:**

    - `func`: any callable, a Module for example.
    - `*args`, `**kwargs`: come before, and beside, those of a call.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        add_one = eqx.Partial(jnp.add, jnp.asarray(1.0))
        assert add_one(2.0) == 3.0
        ```
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __init__(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any):
        self.func = func
        self.args = args
        self.keywords = kwargs

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.keywords:
            return self.func(*self.args, *args, **self.keywords, **kwargs)
        return self.func(*self.args, *args, **kwargs)  # a method: it takes less time


def bind(func: Callable[..., Any], instance: Any, cls: type[Partial]) -> Partial:
    """`cls(func, instance)`, made without a constructor: it is read at each call."""
    partial: Any = object.__new__(cls)
    attributes = {"func": func, "args": (instance,), "keywords": {}, STATE: REGULAR}
    set_attributes(partial, attributes)
    return partial
