"""The name `equinox`, under which `equinox_like` answers: see `equinox_like.as_equinox`."""

from typing import Any

import equinox_like as _library

from . import _module as _module, debug as debug, internal as internal, nn as nn

# The version whose interface this is.
__version__ = "0.13.8"
__all__ = tuple(  # pyright: ignore[reportUnsupportedDunderAll]
    name for name in dir(_library) if not name.startswith("_")
)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_library, name)


def __dir__() -> list[str]:
    return [*__all__]
