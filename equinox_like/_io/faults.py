"""Under which name a leaf is stored, and how a template differs from what is stored.

All formats describe what they hold as a table from names to leaves. `Faults` compares it
with a template, and raises one error that lists everything that prevents loading.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.tree_util as jtu

from .._errors import LeafError, did_you_mean
from .._tree.filters import is_none
from .._tree.nodes import describe_node, listed, plain_path


def renamer(
    rename: Any,
    tree: Any,
    target: str,
    name_of: Callable[[Any], str],
    others: Iterable[str] = (),
) -> Callable[[str], Any]:
    """From the name of a leaf to the stored name.

    **Arguments:**

    - `rename`: a dictionary, a function, or `None`.
    - `tree`, `target`: the tree whose leaves have names, and what it is called.
    - `name_of`: from a key path to a name.
    - `others`: further names that the dictionary may have.

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
    names = [*(name_of(path) for path, _ in paths), *others]
    unknown = set(table).difference(names)
    if unknown:
        raise ValueError(
            f"`rename` has keys that are not names in `{target}`: "
            f"{listed(sorted(unknown), 5)}. To use a table with more names, pass a "
            "function: `lambda name: table.get(name, name)`."
            + did_you_mean(min(unknown), names)
        )
    return lambda name: table.get(name, name)


def is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogate, which the readers of a file refuse."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


BEFORE_STATE: Final = (
    "this tree was taken before `make_with_state`; take it from the model that it "
    "returned"
)


# A leaf that is an item of a list, or of a dictionary by numbers, or below such an item
# without attributes: not the weight of a layer.
_ITEM: Final = re.compile(r"(.*)\[[^][]*\d[^][]*\](\[[^][]*\])*")


def hint_of_names(absent: Sequence[str], extra: Sequence[str]) -> str:
    """A sentence on the initial values of a State, which `make_with_state` deletes, or on
    a list that has grown, if these are among the names that one side lacks."""
    names = (*extra, *absent)
    found = [name for name in names if re.search(r"\.init($|[.\[])", name)]
    if found:
        return f"If `{found[0]}` is the initial value of a StateIndex: {BEFORE_STATE}."
    items = [m[1] or "like" for m in map(_ITEM.fullmatch, names) if m]
    hints = (
        f"If `{name}` grows in training, save it as text: by `metadata=` of `save`, or "
        "`custom_metadata=` of Orbax. To load it here, give `like` as many items."
        for name in items
    )
    return "" if absent and extra else next(hints, "")


_SHOWN: Final = 20
OTHER_SUM: Final = "its data do not match its checksum"

Path = tuple[Any, ...]


class Wanted(NamedTuple):
    """A leaf of the template to load, under its own name and the stored one."""

    path: Path
    own: str
    name: str
    like: Any
    sharding: Any = None
    saved: Any = None  # what is stored under the name


# What names begin with only where they are wanted, or only where they are saved; and
# whether there are further names on one side.
Moved = tuple[str, str, bool]


def other_prefix(wanted: Sequence[str], saved: Sequence[str]) -> Moved | None:
    """How the wanted names differ from the saved ones, if that is by a prefix."""
    ends = [(w, s) for w in wanted for s in saved if w == wanted[0] or s == saved[0]]
    for want, name in ends:
        if want.endswith(name) or name.endswith(want):
            shorter = min(want, name, key=len)
            old, new = want.removesuffix(shorter), name.removesuffix(shorter)
            here = {new + x.removeprefix(old) for x in wanted if x.startswith(old)}
            if here >= set(saved) or len(here & set(saved)) == len(wanted):
                return old, new, len(wanted) != len(saved)
    return None


def by_container(moved: Moved | None, call: str, others: str = ", ...") -> str:
    """How to load a tree that was saved in a dictionary, or without the one around it.

    `call`: the code that loads into `{}`. `others`: stands for the rest of a dictionary.
    """
    old, new, more = moved or ("", "", False)
    key = re.sub(r"^\[('[^']*')\]\.?$", r"\1", old + new)
    if key == old + new:  # it is not one string key
        return ""
    code = call.format(f"{{{key}: like{others * more}}}" if new else f"like[{key}]")
    if new:
        return f"A dictionary was saved. To load its item {key}: `{code}[{key}]`."
    return f"Only the item {key} was saved. To load it: `{{**like, {key}: {code}}}`."


class Faults:
    """Collects the problems that prevent loading a tree, to raise them in one error."""

    def __init__(self, source: str, holder: str, target: str = "like"):
        self.source = source
        self.holder = holder
        self.target = target
        self.first: Path | None = None
        self.lines: list[str] = []
        self.absent: list[str] = []
        self.extra: list[str] = []
        self.moved: Moved | None = None

    def compare(
        self,
        wanted: Sequence[Wanted],
        saved: Mapping[str, Any],
        problem_of: Callable[[Wanted], str | None],
        strict: bool = True,
        is_optional: Callable[[Any], bool] = lambda leaf: False,
    ) -> None:
        """Notes how the leaves that are wanted differ from those that are saved.

        **Arguments:**

        - `problem_of`: what is wrong with a leaf that is saved, if anything.
        - `strict`: whether all leaves must be saved, except for those that
            `is_optional`, and all that is saved must be wanted. Otherwise one must be both.
        """
        for leaf in wanted:
            if leaf.name in saved:
                if problem := problem_of(leaf):
                    self.note(leaf, problem)
            elif isinstance(leaf.like, jax.ShapeDtypeStruct) or (
                strict and not is_optional(leaf.like)
            ):
                self.first = leaf.path if self.first is None else self.first
                # Shown between backticks.
                other = "" if leaf.own == leaf.name else f"` for `{leaf.own}"
                self.absent.append(leaf.name + other)
        names = [leaf.name for leaf in wanted]
        known = set(names)
        if strict:
            self.extra = sorted(name for name in saved if name not in known)
        elif names and saved and known.isdisjoint(saved):
            self.absent, self.extra = names, sorted(saved)
        if known.isdisjoint(saved) and names == [leaf.own for leaf in wanted]:
            self.moved = other_prefix(self.absent, self.extra)

    def note(self, leaf: Wanted, problem: str) -> None:
        self.first = leaf.path if self.first is None else self.first
        self.lines.append(f"`{leaf.name}` {problem}")

    def mismatch(self, found: str, wanted: str) -> str:
        return f"is {found} in {self.holder}, but {wanted} in `{self.target}`"

    def fix_by_options(self, strict: bool) -> str:
        """What `rename` and `strict` do about names that differ."""
        if self.moved:
            old, new, more = self.moved
            rename = f"{new!r} + name" if new else f"name.removeprefix({old!r})"
            rest = ", strict=False" * more
            code = f"`rename=lambda name: {rename}{rest}`"
            fix = f"The names differ by {old + new!r}: pass {code}."
            return by_container(self.moved, f"eqx.load(path, {{}}{rest})", "") or fix
        rename = f"Pass `rename` if they have other names in {self.holder}. "
        if not strict:
            return rename.strip()
        return rename * bool(self.absent and self.extra) + (
            f"With `strict=False`, missing leaves are taken from `{self.target}`, and "
            f"leaves that are only in {self.holder} are ignored."
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
        if hint := hint_of_names(self.absent, self.extra):
            lines.append(hint)
        if any("is float64[" in x and "but float32[" in x for x in lines):
            lines.append("To convert float64, NumPy's default: `x.astype('float32')`.")
        if lines:
            raise LeafError(
                f"Cannot load {self.source} into the template (`{self.target}`):\n  "
                + "\n  ".join(lines),
                self.first or (),
            )


def error_at(path: Path, problem: Any) -> LeafError:
    return LeafError(f"Error at leaf with path {plain_path(path)}: {problem}", path)
