"""Under which name a leaf is stored, and one error for all that prevents loading a tree."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jax.tree_util as jtu

from .._errors import LeafError
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


_SHOWN: Final = 20
_OTHER_SUM: Final = "its data do not match its checksum"

_Path = tuple[Any, ...]


class Faults:
    """Collects the problems that prevent loading a tree, to raise them in one error."""

    def __init__(self, source: str, holder: str, target: str = "like"):
        self.source = source
        self.holder = holder
        self.target = target
        self.first: _Path | None = None
        self.lines: list[str] = []
        self.absent: list[str] = []
        self.extra: list[str] = []

    def missing(self, path: _Path, name: str, own: str | None = None) -> None:
        """`own`: the name in the target, if it may differ."""
        self.note(path)
        # Shown between backticks.
        self.absent.append(name if own in (None, name) else f"{name}` for `{own}")

    def note(self, path: _Path, *lines: str) -> None:
        self.first = path if self.first is None else self.first
        self.lines += lines

    def mismatch(self, path: _Path, name: str, found: str, wanted: str) -> None:
        both = f"{found} in {self.holder}, but {wanted} in `{self.target}`"
        self.note(path, f"`{name}` is {both}")

    def damaged(self, path: _Path, name: str, problem: str = _OTHER_SUM) -> None:
        self.note(path, f"`{name}` is damaged: {problem}")

    def left_over(self, names: Iterable[str]) -> None:
        self.extra = sorted(names)

    def require_common(self, wanted: Iterable[str], found: Iterable[str]) -> None:
        """Lists all names, if some are wanted and some are found, but none are both."""
        wanted, found = list(wanted), list(found)
        if wanted and found and not set(wanted) & set(found):
            self.absent, self.extra = wanted, sorted(found)

    def fix_by_options(self, strict: bool) -> str:
        """What `rename` and `strict` do about names that differ."""
        rename = f"Pass `rename` if they have other names in {self.holder}."
        if not strict:
            return rename
        return (
            f"{rename} With `strict=False`, missing leaves are taken from "
            f"`{self.target}`, and leaves that are only in {self.holder} are ignored."
        )

    def raise_any(self, fix: str = "") -> None:
        """`fix`: what to do about names that differ."""
        lines = self.lines[:_SHOWN]
        if len(self.lines) > _SHOWN:
            lines.append(f"and {len(self.lines) - _SHOWN} more like these")
        if self.absent:
            lines.append(f"missing in {self.holder}: {listed(self.absent, _SHOWN)}")
        if self.extra:
            lines.append(f"only in {self.holder}: {listed(self.extra, _SHOWN)}")
        if fix and (self.absent or self.extra):
            lines.append(fix)
        if hint := hint_of_state([*self.extra, *self.absent]):
            lines.append(hint)
        if lines:
            raise LeafError(
                f"Cannot load {self.source} into `{self.target}`:\n  "
                + "\n  ".join(lines),
                self.first or (),
            )
