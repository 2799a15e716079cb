"""Matches two trees: a prefix tree and the whole one, or two trees of one structure.

Each leaf of a prefix tree, such as `in_axes`, stands for a whole subtree of the other
tree. JAX's own error does not name the argument, and does not give the path of the
difference if `None` counts as a leaf. The errors here do both.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu

from .filters import is_none
from .nodes import children_of, describe_both, describe_node, path_str

_Path = tuple[Any, ...]
_IsLeaf = Callable[[Any], bool] | None

# What JAX raises for a wrong prefix. Its message shows the tree, and showing an array that
# was deleted is a `RuntimeError`.
_MISFIT = ValueError, RuntimeError


def flatten_up_to(
    treedef: Any,
    prefix: Any,
    tree: Any,
    prefix_name: str,
    tree_name: str,
    is_leaf: _IsLeaf = None,
) -> list[Any]:
    """The subtrees of `tree` at the leaves of `prefix`, whose structure is `treedef`.

    **Raises:**

    `ValueError` if `prefix` is not a prefix of `tree`, naming both and the path.
    """
    try:
        return treedef.flatten_up_to(tree)
    except _MISFIT as error:
        found = _first_misfit(prefix, tree, is_leaf)
        # Nothing is found if a node flattens differently each time.
        path, one, other, reason = found or ((), prefix, tree, error)
        here, there = path_str(path, prefix_name), path_str(path, tree_name)
        shown, other_shown = describe_both(one, other)
        statics, other_statics = _statics(one), _statics(other)
        if shown != other_shown:
            why = f"`{here}` is {shown}, but `{there}` is {other_shown}."
        elif statics != other_statics:
            why = (
                f"both are {shown}, but `{here}` has the static fields {statics}, and "
                f"`{there}` has {other_statics}."
            )
        else:
            why = f"`{here}` and `{there}` differ: {reason}"
        raise ValueError(
            f"`{prefix_name}` must be a prefix of `{tree_name}`, but is not (pytree "
            f"structure error): {why}"
        ) from None


def match_prefix(
    prefix: Any, tree: Any, prefix_name: str, tree_name: str, is_leaf: _IsLeaf = None
) -> Iterator[tuple[Any, Any]]:
    """Each leaf of `prefix` with the subtree of `tree` that it stands for."""
    leaves, treedef = jtu.tree_flatten(prefix, is_leaf)
    subtrees = flatten_up_to(treedef, prefix, tree, prefix_name, tree_name, is_leaf)
    return zip(leaves, subtrees, strict=True)


def spread(
    prefix: Any, tree: Any, prefix_name: str, tree_name: str, is_leaf: _IsLeaf = is_none
) -> Iterator[tuple[int, Any]]:
    """For each leaf of `tree`, the leaf of `prefix` above it, with its number."""
    matched = match_prefix(prefix, tree, prefix_name, tree_name, is_leaf)
    for number, (leaf, subtree) in enumerate(matched):
        for _ in jtu.tree_leaves(subtree):
            yield number, leaf


def leaf_name(tree: Any, number: int, name: str, is_leaf: _IsLeaf = None) -> str:
    """The path of the leaf with this number. Slow: only for messages."""
    path, _ = jtu.tree_leaves_with_path(tree, is_leaf)[number]
    return path_str(path, name)


def pair_leaves(
    expected: Any,
    given: Any,
    message: str,
    name: str,
    is_leaf: _IsLeaf = None,
    error: type[Exception] = ValueError,
) -> list[tuple[_Path, Any, Any]]:
    """The leaves of two trees of the same structure, in pairs with their path.

    **Raises:**

    `error` with `message` and the first difference, whose path starts with `name`, if the
    structures differ.
    """
    items, expected_treedef = jtu.tree_flatten_with_path(expected, is_leaf)
    others, given_treedef = jtu.tree_flatten(given, is_leaf)
    if expected_treedef != given_treedef:
        raise error(
            f"{message}{_where_differ(expected, given, name, is_leaf)} Expected\n"
            f"    {expected_treedef}\nand got\n    {given_treedef}"
        )
    return [(path, x, y) for (path, x), y in zip(items, others, strict=True)]


def _where_differ(expected: Any, given: Any, name: str, is_leaf: _IsLeaf) -> str:
    """A sentence on the first difference of two trees, if it can be told."""

    def describe(node):
        return "a leaf" if jtu.all_leaves([node], is_leaf) else describe_node(node)

    if found := _first_misfit(expected, given, is_leaf):
        path, one, other, _ = found
    elif found := _first_misfit(given, expected, is_leaf):
        path, other, one, _ = found
    else:
        return ""
    wanted, got, what = *describe_both(one, other, describe), "there"
    if wanted == got:
        wanted, got, what = _statics(one), _statics(other), "the static fields"
    where = f" At `{path_str(path, name)}` {what} must be {wanted}; got {got}."
    return where if wanted != got else ""


def _statics(node: Any) -> str:
    data = children_of(node)[1].node_data()
    return "" if data is None else repr(data[1])


def _first_misfit(
    prefix: Any, tree: Any, is_leaf: _IsLeaf, path: _Path = ()
) -> tuple[_Path, Any, Any, Exception] | None:
    """The first node at which the trees differ: its path, both nodes, JAX's error."""
    if jtu.all_leaves([prefix], is_leaf):
        return None
    children, treedef = children_of(prefix)
    try:
        others = treedef.flatten_up_to(tree)
    except _MISFIT as error:
        return path, prefix, tree, error
    for (step, child), other in zip(children, others, strict=True):
        found = _first_misfit(child, other, is_leaf, (*path, *step))
        if found is not None:
            return found
    return None
