"""What JAX keeps of a call that has failed, and how to have it forget that.

Serves jax 0.10 to 0.12.

- Once a call of a `jax.jit`-ed function has raised, later calls with the same cache key
  never take the C++ path again, and cost some 100 us each. Only the private
  `_clear_cache` resets this. It also drops the fast paths of other cache keys, which come
  back at their next call. Without it, such calls are slow but correct.
- A program that calls Python leaves a token with JAX. JAX waits for the token at the next
  `jax.effects_barrier()` and when the process ends, and then raises the program's error
  again. `jax._src.dispatch.runtime_tokens` has no public counterpart. Without it the error
  is raised twice.
"""

from typing import Any

from .private import private


def forget_calls(function: Any) -> None:
    """Clears the fast paths of a `jax.jit`-ed function, for all cache keys."""
    clear = getattr(function, "_clear_cache", None)
    if clear is not None:
        clear()


def forget_failed(tokens: Any) -> None:
    """Waits for each of JAX's tokens, and drops it if its program has failed."""
    for name in ("current_tokens", "output_runtime_tokens"):
        kept = getattr(tokens, name, {})
        for key, token in list(kept.items()):
            try:
                token.block_until_ready()
            except Exception:
                kept.pop(key, None)


runtime_tokens: Any = getattr(private("dispatch"), "runtime_tokens", None)
