"""Finds a node that contains itself, and an array or a node at two places of a tree.

JAX checks neither. It flattens a cycle without end, until the stack is full: with a
`SystemError` at best. If Python code runs within, such as `is_leaf`, or the function that
flattens a node, no error comes back: JAX leaves Python's count of open calls where it was,
and the process is of no use any more. So what may take time looks before it flattens
(`check_no_cycle`), and all others name the place in JAX's error (`name_cycle`). Of an
object at two places JAX makes two (`tree_check`).
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, Final

import jax
import jax.tree_util as jtu
import numpy as np

from .cached import raw_dict
from .nodes import children_of, path_str
from .registry import FLAT, cached_types
from .require import named_arguments

_level: Final = jtu.default_registry.flatten_one_level
# Deeper trees are not searched. A node may make new children each time, without end.
_DEEPEST: Final = 100_000


_Types = set[type] | frozenset[type]


def check_no_cycle(name: str, tree: Any, stop: _Types = frozenset()) -> None:
    """Raises a `ValueError` if a node of the tree with this name contains itself.

    With `stop`, instances of these types are not searched, nor are Modules, which were
    when they were constructed.
    """
    nodes = _cycle_in(tree, stop)
    if nodes is None:
        return
    paths = [name]
    for parent, child in pairwise(nodes):
        steps = (step for step, x in children_of(parent)[0] if x is child)
        paths.append(path_str(next(steps, ()), paths[-1]))
    above = paths[list(map(id, nodes)).index(id(nodes[-1]))]
    raise ValueError(
        f"The {type(nodes[-1]).__qualname__} at `{above}` contains itself, at "
        f"`{paths[-1]}`. A tree has no cycles: refer to it by a name or an index instead."
    ) from None


def check_no_cycles(function: Any, args: Any, kwargs: Any) -> None:
    """As `check_no_cycle`, for the arguments of a call of `function`."""
    if _cycle_in((args, kwargs)) is not None:  # only then their names are needed
        for name, tree in named_arguments(function, args, kwargs):
            check_no_cycle(name, tree)


def name_cycle(error: Exception, function: Any, args: Any, kwargs: Any) -> None:
    """Raises in place of an error that flattening such an argument caused."""
    if isinstance(error, RecursionError | SystemError):
        check_no_cycles(function, args, kwargs)


def contains(tree: Any, node: Any) -> bool:
    """Whether a tree is this node, or has it below."""
    nodes = _cycle_in(tree, outer=(node,))
    return nodes is not None and nodes[-1] is node


def _cycle_in(
    tree: Any, stop: _Types = frozenset(), outer: Sequence[Any] = ()
) -> list[Any] | None:
    """The nodes from the root down to one that is also above itself, if there is one.

    `outer` are nodes above the root.
    """
    if stop and (type(tree) in stop or stop.issuperset(map(type, _children_of(tree)))):
        return None  # soon, for most fields
    above = {id(node): node for node in outer}  # from the root down
    seen: dict[int, Any] = {}  # held, so that no `id` is used again
    following = [iter((tree,))]  # the children that are left, of each node above
    while following and len(following) < _DEEPEST:
        for child in following[-1]:
            if id(child) in above:
                return [*above.values(), child]
            if id(child) in seen or (
                stop and (type(child) in stop or type(child) in cached_types)
            ):
                continue
            if children := _children_of(child):
                seen[id(child)] = above[id(child)] = child
                following.append(iter(children))
                break
        else:
            following.pop()
            if above:
                above.popitem()
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


def tree_flatten_one_level(pytree: Any) -> tuple[list[Any], Any]:
    """Flattens the top node of a tree only.

    **Arguments:**

    - `pytree`: any pytree.

    **Returns:**

    The children in JAX's order (those of a dictionary by key), `None` included, and the
    `jax.tree_util.PyTreeDef` that puts them together again. For a leaf, the only child is
    the leaf itself.

    **Raises:**

    `ValueError` if the node is its own child. [`equinox_like.tree_check`][] finds
    longer cycles.

    The result shares arrays with `pytree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx

        children, treedef = eqx.tree_flatten_one_level({"b": [1, 2], "a": None})
        assert children == [None, [1, 2]]
        assert treedef.unflatten("xy") == {"a": "x", "b": "y"}
        ```
    """
    children, treedef = children_of(pytree)
    if any(path and child is pytree for path, child in children):
        raise ValueError(
            f"This {type(pytree).__qualname__} is its own child, so it is not a tree."
        )
    return [child for _, child in children], treedef


def tree_check(pytree: Any) -> None:
    """Checks that no array and no node occurs at two places of a tree.

    JAX does not know that two places share an array: the first transformation makes two
    arrays of it, with a gradient and an update each, so tied weights silently diverge.
    A container that contains itself is not a tree.

    Numbers (also NumPy's), `None` and other leaves that are not arrays, empty
    containers and Modules without children may occur twice.

    **Arguments:**

    - `pytree`: any Python object, also one with cycles, in which JAX's functions would
        not return.

    **Raises:**

    `ValueError` for the first such array or node, naming its type and both paths. Two
    arrays that share memory without being one object are not detected.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        weight = jnp.ones(2)
        eqx.tree_check({"encoder": weight, "decoder": jnp.ones(2)})
        try:
            eqx.tree_check({"encoder": weight, "decoder": weight})
        except ValueError as error:
            assert "`pytree['decoder']`" in str(error)
            assert "`pytree['encoder']`" in str(error)
        ```
    """
    check_no_cycle("pytree", pytree)
    # Holding the nodes keeps Python from reusing their `id`.
    seen: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    pending: list[tuple[Any, tuple[Any, ...]]] = [(pytree, ())]
    while pending:  # no recursion, since trees may be deep
        node, path = pending.pop()
        children = [] if jtu.all_leaves([node]) else children_of(node)[0]
        if children or isinstance(node, jax.Array | np.ndarray):
            if id(node) in seen:
                raise ValueError(_at_two_places(node, seen[id(node)][1], path))
            seen[id(node)] = node, path
        pending += [(child, (*path, *last)) for last, child in reversed(children)]


def _at_two_places(node: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> str:
    one, other = path_str(first, "pytree"), path_str(second, "pytree")
    what = type(node).__qualname__
    if isinstance(node, jax.Array | np.ndarray):
        what = f"array, {node.dtype}{list(node.shape)},"
    return (
        f"The same {what} is at `{one}` and at `{other}`. JAX makes two of it, which "
        "diverge at the first update. Keep it in one place and read it from there, or "
        "make two with `tree_copy`."
    )
