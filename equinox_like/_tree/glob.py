"""Patterns for paths: `layers[*].weight`, `**.bias`."""

import functools
import re
from collections.abc import Collection, Iterable
from typing import Any

from .._errors import did_you_mean


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the whole of `path`, as `plain_path` writes it.

    `*` matches anything within one component, and `**` any number of components; `\\*` is
    an asterisk. All other characters match themselves, brackets too. The path of the tree
    itself is empty, so only `""` and `"**"` match it. A key of a dictionary is one
    component, also if it contains dots or brackets.
    """
    if not path:
        return pattern in ("", "**")
    if "*" not in pattern:  # many patterns are plain paths
        return pattern.removeprefix(".") == path
    return _compiled(pattern).fullmatch(_with_plain_keys(path)) is not None


def matches_above(pattern: str, path: str) -> bool:
    """Whether `pattern` matches `path`, or the path of a node above it."""
    if "*" not in pattern:
        above = pattern.removeprefix(".")
        below = above + ".", above + "["
        return path == above or (above != "" and path.startswith(below))
    expression, path = _compiled(pattern), _with_plain_keys(path)
    ends = [m.start() for m in re.finditer(r"[.\[]", path) if m.start() > 0]
    return any(expression.fullmatch(path, 0, end) for end in (*ends, len(path)))


def components(path: str) -> int:
    """The number of components of a path."""
    plain = _with_plain_keys(path)
    return len(re.findall(r"[.\[]", plain)) + (plain[:1] not in ("", "[", "."))


def check_patterns(patterns: Iterable[Any], argument: str) -> None:
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"`{argument}` takes patterns for paths, strings such as "
                f"'layers[*].weight'; got {pattern!r}."
            )


def near_paths(patterns: Iterable[Any], paths: Iterable[str]) -> str:
    """` Did you mean ...?` for each pattern that matches none of these paths.

    Or the length of a list, if the index is out of range. Its own path is among them.
    """
    ends = re.compile(r"(?!^)[.[]|$")  # of nodes, and of those above
    known = {p[: m.start()]: None for p in paths for m in ends.finditer(p) if p}
    stars = {re.sub(r"\[\d+\]", "[*]", path): None for path in known}
    deep = ["**." + path.rpartition(".")[2] for path in stars]
    return "".join(
        _length(pattern, {*paths})
        or did_you_mean(pattern, [*stars, *deep] if "*" in pattern else known)
        for pattern in patterns
        if isinstance(pattern, str) and not any(matches(pattern, x) for x in known)
    )


def _length(pattern: str, paths: Collection[str]) -> str:
    for index in re.finditer(r"\[-?\d+\]", pattern):
        above = pattern[: index.start()]
        item = re.compile(re.escape(above) + r"\[\d+\]")
        length = sum(item.fullmatch(path) is not None for path in paths)
        # A dictionary may have integers for its keys.
        is_list = above in paths and f"{above}[{length - 1}]" in paths
        if is_list and above + index[0] not in paths:
            return f" `{above or '<root>'}` has length {length}."
    return ""


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    pattern = _with_plain_keys(pattern.removeprefix("."))
    parts = re.split(r"(\\.|\*\*\.?|\*)", pattern)
    return re.compile("".join(map(_expression, parts)))


def _expression(part: str) -> str:
    if part == "**.":  # matches no component too, and then there is no dot
        return r"(?:.*\.)?"
    if part == "**":
        return ".*"
    if part == r"\*":  # a backslash of a key is doubled, as in `repr`
        return r"\*"
    return r"[^.\[\]]*" if part == "*" else re.escape(part)


# A key of a dictionary that is a string.
_KEY = re.compile(r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""")
# Characters that stand for those that separate components, where a key contains them.
_PLAIN = str.maketrans(".[]", "\ue000\ue001\ue002")


def _with_plain_keys(path: str) -> str:
    """The path or pattern, without dots and brackets within keys of dictionaries."""
    if "'" not in path and '"' not in path:
        return path
    return _KEY.sub(lambda m: f"[{m[0][1:-1].translate(_PLAIN)}]", path)
