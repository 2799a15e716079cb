"""Has JAX forget that a program failed, once its error has been raised.

A program that calls Python leaves a token with JAX, which waits for it at the next
`jax.effects_barrier()` and when the process ends, and raises the error of the program
again. Serves jax 0.10 to 0.12: `jax._src.dispatch.runtime_tokens`, which nothing public
reaches. Without it the error comes a second time.
"""

import importlib
from typing import Any


def forget_failed(tokens: Any) -> None:
    """Drops those of JAX's tokens whose program has failed; waits for the others."""
    for name in ("current_tokens", "output_runtime_tokens"):
        kept = getattr(tokens, name, {})
        for key, token in list(kept.items()):
            try:
                token.block_until_ready()
            except Exception:
                kept.pop(key, None)


def _find() -> Any:
    try:
        return importlib.import_module("jax._src.dispatch").runtime_tokens
    except (ImportError, AttributeError):
        return None


runtime_tokens: Any = _find()
