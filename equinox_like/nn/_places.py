"""The leaves of a model, each with the layer that it belongs to."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._module import Frozen, Module
from .._tree.nodes import children_of
from ._stacked import Stacked
from ._state import State


class Place(NamedTuple):
    """A leaf, and where it is."""

    path: tuple[Any, ...]
    leaf: Any
    # The innermost Module or State around it, and the name of the field there.
    owner: Any
    name: str | None
    # The depths of the `Stacked` around it: leading axes of each array.
    rows: tuple[int, ...]
    # The class of each node above, from the root on.
    classes: tuple[type, ...]


def places(tree: Any) -> Iterator[Place]:
    """All leaves of `tree`, in JAX's order."""
    return _below(tree, Place((), None, None, None, (), ()))


def _below(node: Any, here: Place) -> Iterator[Place]:
    if node is not None and jtu.all_leaves([node]):
        yield here._replace(leaf=node)
        return
    if isinstance(node, Frozen):
        # What is frozen belongs to the layer that it is a part of.
        yield from _below(node.value, here)
        return
    classes = (*here.classes, type(node))
    rows = (*here.rows, node.depth) if isinstance(node, Stacked) else here.rows
    children, _ = children_of(node)
    for step, child in children:
        owner, name = here.owner, here.name
        if isinstance(node, Module):
            owner, name = node, getattr(step[0], "name", None)
        elif isinstance(node, State):
            owner, name = node, None
        yield from _below(
            child, Place((*here.path, *step), None, owner, name, rows, classes)
        )
