"""Which files JAX passes over when it looks for the user's line.

Serves jax 0.10 to 0.12: `jax._src.source_info_util.register_exclusion`. Needed because an
error may say where an array was computed, or a function traced, by the innermost frame that
is not JAX's own; that frame would be this library's. Without it the messages are the same
but for that line.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def find(source_info: Any) -> Callable[[str], Any]:
    """What takes the beginning of a path, from `jax._src.source_info_util`; or nothing."""
    return getattr(source_info, "register_exclusion", lambda path: None)


def pass_over(paths: Iterable[str]) -> None:
    """Files whose paths begin so are not the user's."""
    exclude = find(_source_info())
    for path in paths:
        exclude(path)


def _source_info() -> Any:
    try:
        return importlib.import_module("jax._src.source_info_util")
    except ImportError:
        return None
