"""Paths as users write them, which lead to a node of a tree, and patterns that match paths.

A path is a string, or a tuple of JAX key entries, which are written as one. It is looked
up among the paths of all nodes, which distinguish several `None`. If it is not found
there, it is evaluated as a Python expression, for example for a negative index or a
property that returns a node. `tree_at` takes paths, and trees of bools, in place of a
function.
"""

import ast
import functools
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeGuard

import jax.tree_util as jtu

from .._errors import did_you_mean
from .match import flatten_up_to
from .nodes import Nodes, children_of, describe_node, path_within

# One step of a path as a user writes it: `(".", name)` or `("[]", index or key)`.
_Step = tuple[str, Any]


def is_function(where: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether `where` is a function to call, and not a callable Module of bools."""
    return callable(where) and not _is_mask(where)


def choose_places(where: Any, nodes: Nodes) -> tuple[list[int], bool]:
    """The places that `where` chooses, and whether it is one node or several."""
    if _is_mask(where):
        flatten_up_to(jtu.tree_structure(where), where, nodes.all[0], "where", "pytree")
        places = {path: place for place, path in enumerate(nodes.key_paths)}
        chosen = [path for path, flag in jtu.tree_leaves_with_path(where) if flag]
        return [places[path] for path in chosen], False
    is_one = isinstance(where, str) or _is_key_path(where)
    given = [where] if is_one else where
    if not isinstance(given, list | tuple) or not all(
        isinstance(path, str | tuple) for path in given
    ):
        raise TypeError(
            "`where` must be a function, a path such as `'layers[0].weight'`, a list "
            "of paths, or a tree whose leaves are all `True` or `False`. It is "
            f"{describe_node(where)}."
        )
    return [_place(path, nodes) for path in given], is_one


def _is_mask(where: Any) -> bool:
    return set(map(type, jtu.tree_leaves(where))) == {bool}


def _is_key_path(where: Any) -> bool:
    return isinstance(where, tuple) and not (
        where and all(isinstance(path, str | tuple) for path in where)
    )


def _place(path: Any, nodes: Nodes) -> int:
    text = path.removeprefix(".") if isinstance(path, str) else path_within(path)
    steps: tuple[_Step, ...] = ()
    if text not in nodes.plain_paths:
        steps = _parse(text, path)
        text = _text(steps).removeprefix(".")
    # A frozen part and its content have the same path. The part comes first.
    if text in nodes.plain_paths:
        return nodes.plain_paths.index(text)
    return _evaluate(steps, nodes)


def _parse(path: str, given: Any) -> tuple[_Step, ...]:
    """The steps of `path`, an expression without the tree's name at its start.

    Errors show what was `given`.
    """
    steps: list[_Step] = []
    try:
        node = ast.parse(
            f"_{path}" if path[:1] in ("", ".", "[") else f"_.{path}", mode="eval"
        ).body
        while not isinstance(node, ast.Name):
            match node:
                case ast.Attribute(value=node, attr=name):
                    steps.append((".", name))
                case ast.Subscript(value=node, slice=index):
                    key = ast.literal_eval(index)
                    hash(key)
                    steps.append(("[]", key))
                case _:
                    raise ValueError
    except (SyntaxError, TypeError, ValueError):
        # `layers.0.weight` is a name in a state dict.
        with_brackets = {re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", str(given))}
        raise ValueError(
            f"`where` is not a valid path: {given!r}. Write what follows the tree's "
            "name in the code that reads the node: `'layers[0].weight'`, "
            "`\"['key'].bias\"`. `equinox_like.select(tree).at(...)` takes patterns."
            + did_you_mean(given, with_brackets - {str(given)})
        ) from None
    return tuple(reversed(steps))


def read(path: str, tree: Any) -> Any:
    """What Python code reads of the tree at a path: a node, or what is computed."""
    return _read(_parse(path, path), tree)


def _read(steps: tuple[_Step, ...], node: Any) -> Any:
    for i, (kind, name) in enumerate(steps):
        try:
            below = getattr(node, name) if kind == "." else node[name]
        except (AttributeError, LookupError, TypeError):
            raise _leads_nowhere(node, steps, i) from None
        node = below
    return node


def _evaluate(steps: tuple[_Step, ...], nodes: Nodes) -> int:
    """The place of the node that Python code with these steps reads."""
    node = _read(steps, nodes.all[0])
    nodes.check_assigned(functools.partial(_read, steps))
    found = nodes.places_of(node)
    if not found:
        raise TypeError(
            f"`pytree{_text(steps)}` can be read, but is not a node of the tree. "
            "Values of static fields, computed values, and defaults in the class that "
            "`__init__` did not assign cannot be replaced."
        )
    if len(found) > 1:
        raise ValueError(
            f"`pytree{_text(steps)}` does not uniquely identify a node: the same "
            f"{node!r} occurs at {nodes.paths_of(node)}."
        )
    return found[0]


def _leads_nowhere(node: Any, steps: tuple[_Step, ...], at: int) -> ValueError:
    """The error for the step with this number, which `node` does not have."""
    kind = "a leaf" if jtu.all_leaves([node]) else describe_node(node)
    above, step, below = steps[:at], steps[at], steps[at + 1 :]
    keys = [path[0] for path, _ in children_of(node)[0] if path]
    names = [getattr(key, "name", getattr(key, "key", None)) for key in keys]
    if below and not above and below[0][1] in names:
        path = _text(below).removeprefix(".")
        meant = f" Write the path without the name of the tree: `{path}`."
    else:
        form = "`['{}']`" if isinstance(node, dict) else "`.{}`"
        meant = did_you_mean(step[1], [n for n in names if isinstance(n, str)], form)
    return ValueError(
        f"`where` leads to no node: `pytree{_text(above)}` is {kind}, which has no "
        f"`{_text((step,))}`.{meant}"
    )


def _text(steps: tuple[_Step, ...]) -> str:
    return "".join(f".{x}" if kind == "." else f"[{x!r}]" for kind, x in steps)


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
    return re.compile("".join(_EXPRESSIONS.get(x, re.escape(x)) for x in parts))


_EXPRESSIONS = {
    "**.": r"(?:.*\.)?",  # matches no component too, and then there is no dot
    "**": ".*",
    "*": r"[^.\[\]]*",
    r"\*": r"\*",  # a backslash of a key is doubled, as in `repr`
}
# A key of a dictionary that is a string.
_KEY = re.compile(r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""")
# Characters that stand for those that separate components, where a key contains them.
_PLAIN = str.maketrans(".[]", "\ue000\ue001\ue002")


def _with_plain_keys(path: str) -> str:
    """The path or pattern, without dots and brackets within keys of dictionaries."""
    if "'" not in path and '"' not in path:
        return path
    return _KEY.sub(lambda m: f"[{m[0][1:-1].translate(_PLAIN)}]", path)
