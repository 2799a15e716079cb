"""`Faults`: one error that lists everything that prevents loading a tree."""

from collections.abc import Iterable
from typing import Any, Final

from .._errors import LeafError
from .._tree.nodes import listed
from .names import hint_of_state

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
