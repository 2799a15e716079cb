"""Patterns for paths: `layers[*].weight`, `**.bias`."""

import functools
import re


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the whole of `path`, as `plain_path` writes it.

    `*` matches anything within one component, and `**` any number of components. All
    other characters match themselves, brackets too. The path of the tree itself is
    empty, so only `""` and `"**"` match it.
    """
    if not path:
        return pattern in ("", "**")
    if "*" not in pattern:  # many patterns are plain paths
        return pattern.removeprefix(".") == path
    return _compiled(pattern).fullmatch(path) is not None


def matches_above(pattern: str, path: str) -> bool:
    """Whether `pattern` matches `path`, or the path of a node above it."""
    if "*" not in pattern:
        above = pattern.removeprefix(".")
        below = above + ".", above + "["
        return path == above or (above != "" and path.startswith(below))
    expression = _compiled(pattern)
    ends = [m.start() for m in re.finditer(r"[.\[]", path) if m.start() > 0]
    return any(expression.fullmatch(path, 0, end) for end in (*ends, len(path)))


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.?|\*)", pattern.removeprefix("."))
    return re.compile("".join(map(_expression, parts)))


def _expression(part: str) -> str:
    if part == "**.":  # matches no component too, and then there is no dot
        return r"(?:.*\.)?"
    if part == "**":
        return ".*"
    return r"[^.\[\]]*" if part == "*" else re.escape(part)
