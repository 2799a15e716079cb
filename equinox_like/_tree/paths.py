"""Names of leaves as a user would write them: `model.layers[0].weight`."""

from collections.abc import Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .filters import is_none

# A regular expression for a key of a dictionary that is a string.
STRING_KEY: Final = r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]"""


def path_str(path: Sequence[Any], name: str = "") -> str:
    """The expression that reads the leaf at `path` (JAX key entries) from `name`.

    Returns `<root>` for an empty path without a name.
    """
    return name + jtu.keystr(tuple(path)) or "<root>"


def plain_path(path: Sequence[Any]) -> str:
    """The path without the tree's name and the first dot: `layers[0].weight`."""
    return path_str(path).removeprefix(".")


def path_within(path: Sequence[Any]) -> str:
    """As `plain_path`, but empty for the root, also if that is frozen."""
    return jtu.keystr(tuple(path)).removeprefix(".")


def leaf_paths(tree: Any) -> list[str]:
    """The `plain_path` of each leaf, and of each `None`, as a missing bias is."""
    found = jtu.tree_leaves_with_path(tree, is_leaf=is_none)
    return [plain_path(path) for path, _ in found]


def listed(paths: Sequence[str], most: int) -> str:
    """The first paths, up to `most`, and how many more there are."""
    shown = ", ".join(f"`{path or '<root>'}`" for path in paths[:most]) or "none"
    more = len(paths) - most
    return f"{shown} and {more} more" if more > 0 else shown
