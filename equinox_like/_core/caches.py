"""`clear_caches`, and the hooks by which each file clears its own caches."""

from collections.abc import Callable
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[[], None])

_hooks: list[Callable[[], None]] = []


def on_clear(hook: _F) -> _F:
    """Decorator: `hook` is called by [`equinox_like.clear_caches`][]."""
    _hooks.append(hook)
    return hook


def clear_caches() -> None:
    """Empties the caches of the library.

    A function that is wrapped again, by `filter_jit(f)` for example, then compiles
    again. Existing wrappers keep what they have compiled; their `.clear_cache()` frees
    that. JAX has caches of its own: call `jax.clear_caches()` afterwards to empty them
    as well.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        eqx.clear_caches()
        jax.clear_caches()
        ```
    """
    for hook in _hooks:
        hook()
