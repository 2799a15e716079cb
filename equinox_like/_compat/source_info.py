"""What JAX takes for the user's line, and which frames it removes from a traceback.

Has JAX skip this library's files when it looks for the user's line.
Serves jax 0.10 to 0.12: `register_exclusion` of `jax._src.source_info_util` and of
`jax._src.traceback_util`. JAX uses the first to say where an array was computed or a
function traced, and the second to choose the frame where a debugger opens. It takes the
innermost frame that is not excluded. Without them, messages show a line of this
library.

That JAX has removed frames is known from a note that it adds to the error. If JAX words
it differently, the traceback may end with a frame of this library.
"""

from collections.abc import Callable, Iterable
from typing import Any

from .private import private


def find(registry: Any) -> Callable[[str], Any]:
    """`register_exclusion` of a module, which takes a path prefix; else a no-op."""
    return getattr(registry, "register_exclusion", lambda path: None)


def pass_over(paths: Iterable[str]) -> None:
    """Has JAX skip the frames of files whose path starts with one of `paths`."""
    registries = [find(private(name)) for name in _REGISTRIES]
    for path in paths:
        for exclude in registries:
            exclude(path)


def was_cut(error: BaseException) -> bool:
    """Whether JAX has removed its own frames from an error's traceback."""
    notes = getattr(error, "__notes__", ())
    return any("JAX has removed its internal frames" in note for note in notes)


_REGISTRIES = "source_info_util", "traceback_util"
