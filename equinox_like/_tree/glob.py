"""Patterns for paths: `layers[*].weight`, `**.bias`."""

import functools
import re


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` is the whole of `path`, as `plain_path` writes it.

    `*` stands for anything within one component, `**` for any components. Everything else
    stands for itself, brackets too. The empty path of the tree itself has no component:
    only `""` and `"**"` match it.
    """
    if not path:
        return pattern in ("", "**")
    return _compiled(pattern).fullmatch(path) is not None


def matches_above(pattern: str, path: str) -> bool:
    """Whether `pattern` is `path`, or a node above it."""
    expression = _compiled(pattern)
    ends = [m.start() for m in re.finditer(r"[.\[]", path) if m.start() > 0]
    return any(expression.fullmatch(path, 0, end) for end in (*ends, len(path)))


@functools.lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.?|\*)", pattern.removeprefix("."))
    return re.compile("".join(map(_expression, parts)))


def _expression(part: str) -> str:
    if part == "**.":  # no component at all is fine, and then there is no dot
        return r"(?:.*\.)?"
    if part == "**":
        return ".*"
    return r"[^.\[\]]*" if part == "*" else re.escape(part)
