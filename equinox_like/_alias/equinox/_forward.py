"""Forwards the names of a module of the alias `equinox` to one of `equinox_like`."""

import sys
import types
from collections.abc import Callable
from typing import Any


class _Private:
    """The last finder of modules: for what is not in the alias."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("equinox."):
            raise ModuleNotFoundError(
                f"No module named {name!r}: `equinox` is `equinox_like` here, which lacks "
                "Equinox's private modules. A pickle made with Equinox names them. Save "
                "the model by `equinox.tree_serialise_leaves` where Equinox is installed, "
                "and load that file by `tree_deserialise_leaves` into a model built alike.",
                name=name,
            )


sys.meta_path.append(_Private)


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
