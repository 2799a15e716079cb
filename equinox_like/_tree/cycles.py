"""Refuses a tree that contains itself, with the path.

JAX flattens without end then, until the stack is full: with a `SystemError` at best. If
Python code runs within, such as `is_leaf`, or the function that flattens a node, no error
comes back: JAX leaves Python's count of open calls where it was, and the process is of no
use any more. So what may take time looks before it flattens (`check_no_cycle`), and all
others name the place in JAX's error (`name_cycle`).
"""

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, Final

import jax.tree_util as jtu

from .cached import raw_dict
from .nodes import children_of, path_str
from .require import named_arguments
from .structure import FLAT, cached_types

_level: Final = jtu.default_registry.flatten_one_level
_END: Final = object()
# Deeper trees are not searched. A node may make new children each time, without end.
_DEEPEST: Final = 100_000


def check_no_cycle(
    name: str, tree: Any, stop: set[type] | frozenset[type] = frozenset()
) -> None:
    """Raises a `ValueError` if a node of the tree with this name contains itself.

    With `stop`, instances of these types are not searched, nor are Modules, which were
    when they were constructed.
    """
    nodes = _cycle_in(tree, stop)
    if nodes is None:
        return
    path: list[Any] = []
    paths = [path_str(path, name)]
    for parent, child in pairwise(nodes):
        steps = (step for step, x in children_of(parent)[0] if x is child)
        path += next(steps, ())
        paths.append(path_str(path, name))
    above = next(i for i, node in enumerate(nodes) if node is nodes[-1])
    raise ValueError(contains_itself(nodes[-1], paths[above], paths[-1])) from None


def check_no_cycles(function: Any, args: Any, kwargs: Any) -> None:
    """As `check_no_cycle`, for the arguments of a call of `function`."""
    if _cycle_in((args, kwargs)) is not None:  # only then their names are needed
        for name, tree in named_arguments(function, args, kwargs):
            check_no_cycle(name, tree)


def name_cycle(error: Exception, function: Any, args: Any, kwargs: Any) -> None:
    """Raises in place of an error that flattening such an argument caused."""
    if isinstance(error, RecursionError | SystemError):
        check_no_cycles(function, args, kwargs)


def contains_itself(node: Any, above: str, below: str) -> str:
    return (
        f"The {type(node).__qualname__} at `{above}` contains itself, at `{below}`. A tree "
        "has no cycles: refer to it by a name or an index instead."
    )


def _cycle_in(
    tree: Any, stop: set[type] | frozenset[type] = frozenset()
) -> list[Any] | None:
    """The nodes from the root down to one that is also above itself, if there is one."""
    if type(tree) in stop or stop.issuperset(map(type, _children_of(tree))):
        return None  # soon, for most fields
    nodes: list[Any] = []
    following: list[Iterator[Any]] = [iter((tree,))]  # of each node, and of the root
    above, seen = set(), {}
    while following and len(nodes) < _DEEPEST:
        child = next(following[-1], _END)
        if child is _END:
            following.pop()
            if nodes:
                above.discard(id(nodes.pop()))
        elif id(child) in above:
            return [*nodes, child]
        elif (
            id(child) not in seen
            and not (stop and (type(child) in stop or type(child) in cached_types))
            and (children := _children_of(child))
        ):
            seen[id(child)] = child  # held, so that its `id` is not used again
            above.add(id(child))
            nodes.append(child)
            following.append(iter(children))
    return None


def _children_of(node: Any) -> Collection[Any]:
    kind = type(node)
    if kind is dict:
        return node.values()
    if kind is list or kind is tuple:
        return node
    if kind in cached_types and (flat := raw_dict(node).get(FLAT)):
        return flat[0]
    try:
        return (_level(node) or ((),))[0]
    except Exception:  # of the user's code, which flattening calls again
        return ()
