"""`Partial`: `functools.partial` as a pytree."""

from collections.abc import Callable
from typing import Any

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
