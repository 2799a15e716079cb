"""Under which name a leaf of a tree is stored, and which names can be stored."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jax.tree_util as jtu

from .._tree.filters import is_none
from .._tree.nodes import describe_node, listed


def renamer(
    rename: Any, tree: Any, target: str, name_of: Callable[[Any], str]
) -> Callable[[str], Any]:
    """From the name of a leaf to the stored name.

    **Arguments:**

    - `rename`: a dictionary, a function, or `None`.
    - `tree`, `target`: the tree whose leaves have names, and what it is called.
    - `name_of`: from a key path to a name.

    **Raises:**

    `TypeError` if `rename` is none of these, `ValueError` if a key of the dictionary is
    not a name in the tree.
    """
    if callable(rename):
        return rename
    table = {} if rename is None else rename
    if not isinstance(table, Mapping):
        raise TypeError(
            "`rename` must be a dictionary or a function of a name; got "
            f"{describe_node(rename)}."
        )
    # A layer without a bias has `None` there, which a table for all layers may name.
    paths = jtu.tree_leaves_with_path(tree, is_leaf=is_none) if table else []
    unknown = set(table) - {name_of(path) for path, _ in paths}
    if unknown:
        raise ValueError(
            f"`rename` has keys that are not names in `{target}`: "
            f"{listed(sorted(unknown), 5)}. To use a table with more names, pass a "
            "function: `lambda name: table.get(name, name)`."
        )
    return lambda name: table.get(name, name)


def is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogate, which the readers of a file refuse."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


BEFORE_STATE: Final = (
    "this tree was taken before `make_with_state`; take it from the model that it "
    "returned"
)


def hint_of_state(unmatched: Iterable[str]) -> str:
    """A sentence on `make_with_state`, which deletes the initial values of a model, if
    these are among the names that a file or a tree has, and the other one lacks."""
    found = [name for name in unmatched if re.search(r"\.init($|[.\[])", name)]
    if not found:
        return ""
    return f"If `{found[0]}` is the initial value of a StateIndex: {BEFORE_STATE}."
