"""The leaves of a model, each with the layer that it belongs to."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.tree_util as jtu

from ..._module import Frozen, Module
from ..._tree.nodes import children_of
from .._base.state import State
from .._scale.stacked import Stacked


class Place(NamedTuple):
    """A leaf, its path, and the nodes around it."""

    path: tuple[Any, ...]
    leaf: Any
    # The innermost Module or State that contains the leaf, and the Module's field.
    owner: Any
    name: str | None
    # The depths of all `Stacked` around it, which are leading axes of its array.
    rows: tuple[int, ...]
    # The classes of all nodes on the path, from the root on.
    classes: tuple[type, ...]


def places(tree: Any) -> Iterator[Place]:
    """All leaves of `tree`, in JAX's order."""
    return _below(tree, Place((), None, None, None, (), ()))


def _below(node: Any, here: Place) -> Iterator[Place]:
    if node is not None and jtu.all_leaves([node]):
        yield here._replace(leaf=node)
        return
    if isinstance(node, Frozen):
        # `Frozen` is skipped: its content belongs to the layer around it.
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
