"""Errors of JAX: what they are about, which lines are the user's, what JAX keeps of a call.

Serves jax 0.10 to 0.12.

- JAX has no types or codes for most errors, so their texts are compared. We explain them by
  the names of the arguments. Where JAX words one differently, the answer is no, and users
  see JAX's own message; and `call_with_rules` raises JAX's error in a `jax.shard_map` that
  is not compiled.
- `register_exclusion` of `jax._src.source_info_util` and `jax._src.traceback_util` has
  JAX skip this library's files when it says where an array was computed, and when it
  chooses the frame where a debugger opens. Without them, messages show a line of this
  library. That JAX has removed frames is known from a note that it adds to the error. If
  JAX words it differently, the traceback may end with a frame of this library.
- JAX caches traces, so an inner function may have been traced for an earlier, unrelated
  call. Only the frames of the innermost traced function are sure to belong to a value.
  These frames are below the last frame of `jax/_src/interpreters/partial_eval.py`, which
  makes all jaxprs. If a frame of `jax/_src/shard_map.py` is among them, the function is
  the body of a `shard_map`, which all devices run. If the first file no longer exists, no
  frames are found. If the second file does not, no function is taken for such a body, and a
  check in one tells of the device alone where it fails.
- Once a call of a `jax.jit`-ed function has raised, later calls with the same cache key
  never take the C++ path again, and cost some 100 us each. Only the private
  `_clear_cache` resets this. It also drops the fast paths of other cache keys, which come
  back at their next call. Without it, such calls are slow but correct.
- A program that calls Python leaves a token with JAX. JAX waits for the token at the next
  `jax.effects_barrier()` and when the process ends, and then raises the program's error
  again. `jax._src.dispatch.runtime_tokens` has no public counterpart. Without it the error
  is raised twice.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable
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


def find_exclusion(registry: Any) -> Callable[[str], Any]:
    """`register_exclusion` of a module, which takes a path prefix; else a no-op."""
    return getattr(registry, "register_exclusion", lambda path: None)


def pass_over(paths: Iterable[str]) -> None:
    """Has JAX skip the frames of these files, and of those in these folders."""
    registries = [find_exclusion(private(name)) for name in _REGISTRIES]
    for path in paths:
        for exclude in registries:
            exclude(path)


def was_cut(error: BaseException) -> bool:
    """Whether JAX has removed its own frames from an error's traceback."""
    notes = getattr(error, "__notes__", ())
    return any("JAX has removed its internal frames" in note for note in notes)


_REGISTRIES = "source_info_util", "traceback_util"

# File, line and function.
Frame = tuple[str, int, str]

_JAX = os.path.dirname(jax.__file__) + os.sep
_JAXTYPING = os.path.join(os.sep, "jaxtyping", "")
_TRACER = os.path.join(_JAX, "_src", "interpreters", "partial_eval.py")
_SHARD_MAP = os.path.join(_JAX, "_src", "shard_map.py")


def traced_frames(passed_over: tuple[str, ...]) -> tuple[tuple[Frame, ...], bool]:
    """Frames, outermost first, without JAX's and those in files that are passed over;
    and whether the innermost traced function is the body of a `shard_map`.
    """
    found: list[Frame] = []
    in_shard_map = False
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        filename = code.co_filename
        if filename == _TRACER:
            return tuple(reversed(found)), in_shard_map
        in_shard_map |= filename == _SHARD_MAP
        if not (
            filename.startswith((_JAX, "<@beartype", *passed_over))
            or _JAXTYPING in filename
        ):
            found.append((filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return (), False
