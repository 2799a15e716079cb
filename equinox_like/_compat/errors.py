"""What errors and warnings of JAX are about, and what JAX keeps of a call that has failed.

Serves jax 0.10 to 0.12.

- JAX has no types or codes for most errors, so their texts are compared. We explain them by
  the names of the arguments. Where JAX words one differently, the answer is no, and users
  see JAX's own message; and `call_with_rules` raises JAX's error in a `jax.shard_map` that
  is not compiled.
- Once a call of a `jax.jit`-ed function has raised, later calls with the same cache key
  never take the C++ path again, and cost some 100 us each. Only the private
  `_clear_cache` resets this. It also drops the fast paths of other cache keys, which come
  back at their next call. Without it, such calls are slow but correct.
- A program that calls Python leaves a token with JAX. JAX waits for the token at the next
  `jax.effects_barrier()` and when the process ends, and then raises the program's error
  again. `jax._src.dispatch.runtime_tokens` has no public counterpart. Without it the error
  is raised twice.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import jax

from . import private

# The warning of donated buffers that no output can reuse.
UNUSABLE_DONATION: Final = re.compile("Some donated buffers were not usable")

# The last one: another thread has donated the array since JAX began the call.
_DELETED: Final = (
    "been deleted",
    "Invalid buffer passed",
    "Expected args to execute_sharded_on_local_devices",
)
_SHARED: Final = (
    "donate the same buffer twice",
    "previously donated in the same call",
    "donate a buffer which is also used by the same call",
)
_CALLBACK: Final = (
    "host_callbacks",
    "lowering for python_callback",
    "is different from the lowering platform",
)
_UNCONVERTED: Final = (
    "Triggering __jax_array__()",
    "Cannot determine dtype of",
    "is not a valid JAX array type",
    "as an abstract array",
)
_UNSTABLE: Final = "no compatibility guarantees"
_CUDNN: Final = re.compile(r"custom_call @(__cudnn\$\w+)")


def is_deleted_array_error(error: BaseException) -> bool:
    return any(text in str(error) for text in _DELETED)


def is_shared_buffer_error(error: BaseException) -> bool:
    """Whether a donated array was also passed in another place."""
    return any(text in str(error) for text in _SHARED)


def is_nan_error(error: BaseException) -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` found something."""
    return type(error).__name__ == "InternalFloatingPointError"


def is_missing_mesh_error(error: BaseException) -> bool:
    return "non-empty mesh" in str(error)


def is_other_sharding_error(error: BaseException) -> bool:
    """Whether an argument of `jax.jit` is not sharded as `in_shardings` says."""
    return "does not match the sharding" in str(error)


def is_other_specs_error(error: BaseException) -> bool:
    """Whether an argument of `jax.shard_map` is not sharded as `in_specs` says."""
    return "does not match the specs of the input" in str(error)


def is_callback_error(error: BaseException) -> bool:
    """Whether a program that calls Python was to be exported, or to be lowered for
    another platform than that of this host, or for several."""
    return any(text in str(error) for text in _CALLBACK)


def is_unconverted_error(error: BaseException) -> bool:
    """Whether JAX was given an object that it does not convert to an array."""
    return any(text in str(error) for text in _UNCONVERTED)


def exported_cudnn_calls(error: BaseException) -> list[str]:
    """The calls of cuDNN for which a program cannot be exported."""
    text = str(error)
    return sorted(set(_CUDNN.findall(text))) if _UNSTABLE in text else []


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
