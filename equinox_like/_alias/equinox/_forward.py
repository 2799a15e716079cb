"""Forwards the names of a module of the alias `equinox` to one of `equinox_like`."""

import types
from collections.abc import Callable
from typing import Any


def names_of(
    library: types.ModuleType, package: str
) -> tuple[tuple[str, ...], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of the alias `package` of `library`."""
    names = tuple(name for name in dir(library) if not name.startswith("_"))

    def find(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(library, name)

    return names, find, lambda: [*names]
