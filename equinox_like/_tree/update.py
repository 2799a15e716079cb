"""Adds the updates of an optimiser to a model."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.arrays import weakly_typed
from .arrays import is_weak
from .deleted import deleted_named
from .filters import is_array, is_none
from .match import flatten_up_to
from .nodes import describe_node, path_str

_Tree = TypeVar("_Tree")


@deleted_named
def apply_updates(model: _Tree, updates: Any) -> _Tree:
    """Adds `updates` to `model`, leaf by leaf.

    **Arguments:**

    - `model`: any pytree.
    - `updates`: a tree like `model`, with `None` for each leaf or subtree that does not
        change. Optimisers return such a tree for the gradient of
        [`equinox_like.filter_grad`][].

    **Returns:**

    The new model. Each array keeps its dtype: the sum is computed in the dtype that JAX
    gives to `leaf + update`, and cast. Where the update is `None` or has the dtype
    float0, the leaf is the identical object.

    **Raises:**

    `ValueError` if the structures differ. `TypeError`, naming the path, if the two cannot
    be added, for example because `model` has `None` where `updates` has an array; if
    the sum is of another shape than an array of `model`; or if it is complex and the array
    is real, or floating and the array holds integers.

    The result shares arrays with `model`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        model = {"w": jnp.ones(2), "name": "first"}
        model = eqx.apply_updates(model, {"w": -jnp.ones(2), "name": None})
        assert model["w"].sum() == 0 and model["name"] == "first"
        ```
    """
    items, treedef = jtu.tree_flatten_with_path(updates, is_none)
    nodes = flatten_up_to(treedef, updates, model, "updates", "model", is_none)
    return treedef.unflatten(
        _add(path, update, node)
        for (path, update), node in zip(items, nodes, strict=True)
    )


def _add(path: tuple[Any, ...], update: Any, node: Any) -> Any:
    # The derivative of an integer has the dtype float0.
    if update is None or getattr(update, "dtype", None) == jax.dtypes.float0:
        return node
    try:
        if isinstance(node, list | tuple):  # a NumPy array would be added to each item
            raise TypeError("the update of a container must have the same structure.")
        new = node + update
        return _like(node, new) if is_array(node) else new
    except (TypeError, ValueError) as error:  # of JAX, of NumPy
        raise TypeError(
            f"Cannot add `{path_str(path, 'updates')}`, {describe_node(update)}, to "
            f"`{path_str(path, 'model')}`, {describe_node(node)}: {error}"
        ) from error


def _like(node: Any, new: Any) -> Any:
    """`new` in the dtype of `node`, so that a compiled function is not retraced."""
    if new.shape != node.shape:
        raise TypeError(f"the sum has shape {new.shape}.")
    for kind in (jnp.number, jnp.inexact, jnp.complexfloating):
        if jnp.issubdtype(new.dtype, kind) and not jnp.issubdtype(node.dtype, kind):
            raise TypeError(
                f"the sum is {new.dtype}, which {node.dtype} cannot hold. Pass "
                "`update.real`, or None for an array that is not trained."
            )
    if new.dtype != node.dtype:
        new = new.astype(node.dtype)
    return weakly_typed(new) if is_weak(node) and not is_weak(new) else new
