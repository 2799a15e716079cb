"""Has JAX forget a failed program once its error has been raised.

A program that calls Python leaves a token with JAX. JAX waits for the token at the next
`jax.effects_barrier()` and when the process ends, and then raises the program's error
again. Serves jax 0.10 to 0.12: `jax._src.dispatch.runtime_tokens`, which has no public
counterpart. Without it the error is raised twice.
"""

from typing import Any

from .private import private


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
