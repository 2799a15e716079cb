"""Recognises what JAX cannot do with a `jax.custom_vjp`, by the text of its errors.

Serves jax 0.10 to 0.12. If JAX changes the texts, `call_with_rules` raises JAX's error
in a `jax.shard_map` that is not compiled, and forward mode raises JAX's own message.
"""

from collections.abc import Callable
from typing import Any

import jax


def call_with_rules(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a `jax.custom_vjp` with symbolic zeros, also within an eager `jax.shard_map`.

    There JAX does not evaluate it eagerly, so it is compiled, also under
    `jax.disable_jit`.
    """
    try:
        return function(*args)
    except NotImplementedError as e:
        if "symbolic_zeros support with shard_map" not in str(e):
            raise
    with jax.disable_jit(False):
        return jax.jit(lambda *args: function(*args))(*args)


def is_forward_mode(error: BaseException) -> bool:
    """Whether this is JAX's error that a `jax.custom_vjp` has no forward mode."""
    return isinstance(error, TypeError) and "forward-mode autodiff" in str(error)
