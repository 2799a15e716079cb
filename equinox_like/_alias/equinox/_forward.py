"""Forwards the names of a module of the alias `equinox` to one of `equinox_like`."""

import types
from collections.abc import Callable
from typing import Any

from ._private import find


def names_of(
    library: types.ModuleType, package: str
) -> tuple[tuple[str, ...], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of the alias `package` of `library`."""
    names = tuple(name for name in dir(library) if not name.startswith("_"))

    def read(name: str) -> Any:
        return find(package, name) if name.startswith("_") else getattr(library, name)

    return names, read, lambda: [*names]
