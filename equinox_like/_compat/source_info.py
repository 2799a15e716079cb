"""Which files JAX passes over when it looks for the user's line.

Serves jax 0.10 to 0.12: `register_exclusion` of `jax._src.source_info_util` and of
`jax._src.traceback_util`. The first is asked where an array was computed, or a function
traced, the second where a debugger opens: by the innermost frame that is not JAX's own,
which would be this library's. Without them messages are the same, except for that line.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def find(registry: Any) -> Callable[[str], Any]:
    """What takes the beginning of a path, from one of these files; or nothing."""
    return getattr(registry, "register_exclusion", lambda path: None)


def pass_over(paths: Iterable[str]) -> None:
    """Files whose paths begin so are not the user's."""
    registries = [find(_private(name)) for name in _REGISTRIES]
    for path in paths:
        for exclude in registries:
            exclude(path)


_REGISTRIES = "source_info_util", "traceback_util"


def _private(name: str) -> Any:
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ImportError:
        return None
