"""What JAX cannot do with a `jax.custom_vjp`, recognised by the text of its messages.

Serves jax 0.10 to 0.12. With other texts `call_with_rules` fails in a `jax.shard_map` that
is not compiled, with an error of JAX; and forward mode is refused in the words of JAX.
"""

from collections.abc import Callable
from typing import Any

import jax


def call_with_rules(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a `jax.custom_vjp` with symbolic zeros, also within an eager `jax.shard_map`.

    JAX evaluates it there only where it is compiled.
    """
    try:
        return function(*args)
    except NotImplementedError as e:
        if "symbolic_zeros support with shard_map" not in str(e):
            raise
    return jax.jit(lambda *args: function(*args))(*args)


def is_forward_mode(error: BaseException) -> bool:
    """Whether JAX says that a `jax.custom_vjp` has no forward mode."""
    return isinstance(error, TypeError) and "forward-mode autodiff" in str(error)
