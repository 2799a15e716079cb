"""The forms of `tree_at`'s `where` that are not a function: paths, or a tree of bools.

A path is a string that is parsed as a Python expression, or a tuple of JAX key entries.
It is looked up among the key paths, which distinguish several `None`. A string that is
not found there is evaluated, for example for a negative index or a property that
returns a node.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax.tree_util as jtu

from .match import flatten_up_to
from .nodes import Nodes, describe_node, path_str, with_article

# One step of a path as a user writes it: `(".", name)` or `("[]", index or key)`.
_Step = tuple[str, Any]


def is_function(where: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether `where` is a function to call, and not a callable Module of bools."""
    return callable(where) and not _is_mask(where)


def choose_places(where: Any, nodes: Nodes) -> tuple[list[int], bool]:
    """The places that `where` chooses, and whether it is one node or several."""
    paths = nodes.key_paths
    if _is_mask(where):
        flatten_up_to(jtu.tree_structure(where), where, nodes.all[0], "where", "pytree")
        places = {path: place for place, path in enumerate(paths)}
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
    places: dict[Any, int] = {}
    for place, path in enumerate(paths):
        # A frozen part and its content have the same path. The part comes first.
        places.setdefault(tuple(map(_step, _shown(path))), place)
    return [_place(path, places, nodes) for path in given], is_one


def _is_mask(where: Any) -> bool:
    return set(map(type, jtu.tree_leaves(where))) == {bool}


def _is_key_path(where: Any) -> bool:
    return isinstance(where, tuple) and not (
        where and all(isinstance(path, str | tuple) for path in where)
    )


def _place(path: Any, places: dict[Any, int], nodes: Nodes) -> int:
    if isinstance(path, str):
        steps = _parse(path)
    else:
        path = _shown(path)
        steps = tuple(map(_step, path))
    try:
        if steps in places:
            return places[steps]
    except TypeError:
        raise ValueError(
            f"`where` is not a valid path: {path!r} cannot be hashed."
        ) from None
    if isinstance(path, str):
        return _evaluate(steps, nodes)
    end = next(n for n in range(len(path) + 1) if steps[:n] not in places)
    node = nodes.all[places[steps[: end - 1]]]
    raise _leads_nowhere(node, path_str(path[: end - 1]), path_str(path[end - 1 : end]))


def _shown(path: Sequence[Any]) -> tuple[Any, ...]:
    """`path` without the keys that have no text, such as those of frozen parts."""
    return tuple(key for key in path if str(key))


def _step(key: Any) -> Any:
    match key:
        case jtu.GetAttrKey(name=name):
            return ".", name
        case jtu.SequenceKey(idx=index):
            return "[]", index
        case jtu.DictKey(key=name):
            return "[]", name
    return key


def _parse(path: str) -> tuple[_Step, ...]:
    """The steps of `path`, an expression without the tree's name at its start."""
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
                    steps.append(("[]", ast.literal_eval(index)))
                case _:
                    raise ValueError
    except (SyntaxError, ValueError):
        raise ValueError(
            f"`where` is not a valid path: {path!r}. Write what follows the tree's "
            "name in the code that reads the node: `'layers[0].weight'`, "
            "`\"['key'].bias\"`. `equinox_like.select(tree).at(...)` takes patterns."
        ) from None
    return tuple(reversed(steps))


def read(path: str, tree: Any) -> Any:
    """What Python code reads of the tree at a path: a node, or what is computed."""
    return _read(_parse(path), tree)


def _read(steps: tuple[_Step, ...], node: Any) -> Any:
    for i, (kind, name) in enumerate(steps):
        try:
            below = getattr(node, name) if kind == "." else node[name]
        except (AttributeError, LookupError, TypeError):
            raise _leads_nowhere(
                node, _text(steps[:i]), _text(steps[i : i + 1])
            ) from None
        node = below
    return node


def _evaluate(steps: tuple[_Step, ...], nodes: Nodes) -> int:
    """The place of the node that Python code with these steps reads."""
    node = _read(steps, nodes.all[0])
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


def _leads_nowhere(node: Any, above: str, step: str) -> ValueError:
    kind = "a leaf" if jtu.all_leaves([node]) else with_article(type(node).__qualname__)
    above = "" if above == "<root>" else above
    return ValueError(
        f"`where` leads to no node: `pytree{above}` is {kind}, which has no `{step}`."
    )


def _text(steps: tuple[_Step, ...]) -> str:
    return "".join(f".{x}" if kind == "." else f"[{x!r}]" for kind, x in steps)
