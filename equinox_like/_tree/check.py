"""Flattens one level of a tree, and checks that no node or array occurs at two places.

JAX does not check this. It makes two objects of one that occurs twice, and does not
return if an object contains itself.
"""

from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .cycles import contains_itself
from .nodes import children_of, path_str


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
    JAX arrays that share a buffer without being one object are not detected; two NumPy
    arrays that are the same view of the same memory are.

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
    # Holding the objects keeps Python from reusing their `id`.
    seen: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
    pending: list[tuple[Any, tuple[Any, ...]]] = [(pytree, ())]
    while pending:
        node, path = pending.pop()
        key = id(node)
        children = []
        if isinstance(node, jax.Array | np.ndarray):
            key = _memory(node)
        elif jtu.all_leaves([node]):
            continue
        else:
            children, _ = children_of(node)
            if not children:
                continue
        if key in seen:
            raise ValueError(_at_two_places(node, seen[key][1], path))
        seen[key] = node, path
        pending += [(child, (*path, *last)) for last, child in reversed(children)]


def _memory(array: Any) -> Any:
    """A key that is equal for two arrays if they are the same."""
    if isinstance(array, np.ndarray) and array.size:
        where, _ = array.__array_interface__["data"]
        return where, array.shape, array.strides, array.dtype.str
    return id(array)


def _at_two_places(node: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> str:
    name = type(node).__qualname__
    places = path_str(first, "pytree"), path_str(second, "pytree")
    if isinstance(node, jax.Array | np.ndarray):
        return (
            f"The same array, {node.dtype}{list(node.shape)}, is at `{places[0]}` and at "
            f"`{places[1]}`. JAX makes two of it, which diverge at the first update. "
            "Keep it in one place and read it from there, or make two with "
            "`tree_copy`."
        )
    if second[: len(first)] == first:
        return contains_itself(node, *places)
    return (
        f"The same {name} is at `{places[0]}` and at `{places[1]}`. JAX makes two of it, "
        "which diverge at the first update. Keep it in one place and read it from "
        "there, or make two with `tree_copy`."
    )
