"""Lines of the user's code: which line JAX takes for it, and the frames of a trace.

Serves jax 0.10 to 0.12.

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
  frames are found. If the second file does not, a function is taken for the body of a
  `shard_map` if there are manual axes.
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax

from . import private


def find_exclusion(registry: Any) -> Callable[[str], Any]:
    """`register_exclusion` of a module, which takes a path prefix; else a no-op."""
    return getattr(registry, "register_exclusion", lambda path: None)


def pass_over(paths: Iterable[str]) -> None:
    """Has JAX skip the frames of files whose path starts with one of `paths`."""
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


_IS_SHARD_MAP_KNOWN = os.path.exists(_SHARD_MAP)


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
            if not _IS_SHARD_MAP_KNOWN:
                in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
            return tuple(reversed(found)), in_shard_map
        in_shard_map |= filename == _SHARD_MAP
        if not (
            filename.startswith((_JAX, "<@beartype", *passed_over))
            or _JAXTYPING in filename
        ):
            found.append((filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return (), False
