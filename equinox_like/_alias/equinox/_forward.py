"""Forwards the names of a module of the alias `equinox` to one of `equinox_like`."""

import sys
import types
from collections.abc import Callable
from typing import Any


class _Private:
    """The last finder of modules: for what is not in the alias."""

    def __init__(self, package: str):
        self.start = f"{package}."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(self.start):
            raise ModuleNotFoundError(
                f"No module named {name!r}: `equinox` is `equinox_like` here, which lacks "
                "the private modules of Equinox. A pickle made with Equinox names them. "
                "Load it where Equinox is installed, save the model by "
                "`equinox.tree_serialise_leaves`, and load that file here by "
                "`tree_deserialise_leaves` into a model that is built in the same way.",
                name=name,
            )


def explain_private_modules(package: str) -> None:
    """Has the import of a private module of Equinox say what to do."""
    sys.meta_path.append(_Private(package))


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
