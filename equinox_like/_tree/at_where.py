"""The forms of `tree_at`'s `where` that are not a function: paths, or a tree of bools.

A path is a string, or a tuple of JAX key entries, which are written as one. It is looked
up among the paths of all nodes, which distinguish several `None`. If it is not found
there, it is evaluated as a Python expression, for example for a negative index or a
property that returns a node.
"""

import ast
import functools
import re
from collections.abc import Callable
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
            f"{node!r} occurs at "
            f"{', '.join(f'`{path}`' for path in nodes.paths_of(node))}."
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
