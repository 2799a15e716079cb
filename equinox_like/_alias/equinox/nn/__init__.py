"""The name `equinox.nn`, under which `equinox_like.nn` answers."""

from typing import Any

from equinox_like import nn as _library

__all__ = tuple(  # pyright: ignore[reportUnsupportedDunderAll]
    name for name in dir(_library) if not name.startswith("_")
)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_library, name)


def __dir__() -> list[str]:
    return [*__all__]
