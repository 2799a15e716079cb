"""Changed copies of whole trees: own buffers, added updates, another mode of inference."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.arrays import weakly_typed
from .._compat.tracing import at_top_level
from .._errors import DonationError
from .arrays import describe_array, is_concrete, is_deleted, is_typed_key, is_weak
from .at import tree_at
from .cycles import check_no_cycle
from .deleted import deleted_named, fate_of
from .filters import is_array, is_none
from .match import flatten_up_to
from .nodes import describe_node, not_assigned, path_str, unset_fields
from .require import check_not_class

_Tree = TypeVar("_Tree")


@deleted_named
def tree_copy(pytree: _Tree) -> _Tree:
    """A copy of the tree in which each array has a buffer of its own.

    JAX arrays keep dtype, weak type, sharding and whether they are committed to their
    devices. NumPy arrays and typed PRNG keys are copied too, everything else is the
    identical object. An array that occurs at two places becomes two arrays.

    **Arguments:**

    - `pytree`: any pytree. Under `jax.jit` the arrays of the result are copies at run time.

    **Returns:**

    The copy. Donating it leaves `pytree` as it is.

    **Raises:**

    [`equinox_like.DonationError`][] if an array was deleted, naming its path.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        state = {"w": jnp.ones(2), "steps": 3}
        spare = eqx.tree_copy(state)
        state["w"].delete()
        assert spare["w"].sum() == 2
        ```
    """
    return jtu.tree_map_with_path(_copy, pytree)


def _copy(path: tuple[Any, ...], x: Any) -> Any:
    if not is_array(x):
        return x
    if not is_concrete(x):
        return x.copy()
    if is_deleted(x):
        raise DonationError(
            f"Cannot copy `{path_str(path, 'pytree')}`, {describe_array(x)}: it was "
            f"{fate_of(x)}. Copy it before that."
        )
    return copy_array(x)


def copy_array(x: jax.Array) -> jax.Array:
    # `x.copy()` fails for a PRNG key that a trace captures.
    is_captured_key = is_typed_key(x) and not at_top_level()
    copy = jnp.copy(x) if is_captured_key else x.copy()
    # Within a trace, the copy of a captured array is a tracer.
    if not is_concrete(copy) or copy.sharding == x.sharding:
        return copy
    # A copy may lose the memory kind, or return an equivalent sharding.
    return jax.device_put(copy, x.sharding)


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
        return _in_dtype_of(node, new) if is_array(node) else new
    except (TypeError, ValueError) as error:  # of JAX, of NumPy
        raise TypeError(
            f"Cannot add `{path_str(path, 'updates')}`, {describe_node(update)}, to "
            f"`{path_str(path, 'model')}`, {describe_node(node)}: {error}"
        ) from error


def _in_dtype_of(node: Any, new: Any) -> Any:
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


_FLAG = jtu.GetAttrKey("inference")


def tree_inference(
    pytree: _Tree,
    value: Any = True,
    *,
    where: Callable[[_Tree], Any] | object | None = None,
) -> _Tree:
    """Sets each field named `inference`, at any depth, to `value`.

    Layers that behave differently in training have such a field, `nn.Dropout` for one, and
    so may Modules of your own, dataclasses that are pytrees, and named tuples. It must be
    a field that JAX sees, not a `field(static=True)`, which is part of the tree's
    structure. A method named `inference` is left alone.

    **Arguments:**

    - `pytree`: any pytree, usually a model.
    - `value`: what to set: `True`, `False`, an array of `bool`, or `None`, with which
        the layers follow [`equinox_like.inference`][] and [`equinox_like.training`][].
    - `where`: as in [`equinox_like.tree_at`][], to choose nodes; only the fields below
        these are set.

    **Returns:**

    The new tree. Neither `__init__` nor any check of a Module runs.

    **Raises:**

    `TypeError` for a class in place of an instance; naming the path, if a node has an
    attribute `inference` that cannot be set: a static field, a property, a class
    attribute, or a field that `__init__` did not assign.

    The result shares arrays with `pytree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx

        model = eqx.nn.Sequential([eqx.nn.Dropout(0.5), eqx.nn.Identity()])
        assert eqx.nn.inference_mode(model)[0].inference is True
        assert model[0].inference is False
        ```
    """
    check_not_class(pytree, "pytree")
    check_no_cycle("pytree", pytree)
    if where is not None:
        return tree_at(where, pytree, replace_fn=lambda node: _set_flags(node, value))
    return _set_flags(pytree, value)


def _set_flags(pytree: Any, value: Any) -> Any:
    owners = []

    def is_flag(path: tuple[Any, ...], node: Any) -> bool:
        if path and path[-1] == _FLAG:
            return True
        if _has_flag(node):
            owners.append((path, node))
        return False

    parts, treedef = jtu.tree_flatten_with_path(
        pytree, is_leaf=is_flag, is_leaf_takes_path=True
    )
    flags = {path for path, _ in parts if path and path[-1] == _FLAG}
    for path, node in owners:
        if (*path, _FLAG) not in flags:
            if _FLAG.name in unset_fields(node):
                raise not_assigned(jtu.keystr(path), node, _FLAG.name)
            raise TypeError(
                f"`{path_str((*path, _FLAG), 'pytree')}` cannot be set: it is a static "
                f"field, a property or a class attribute of {type(node).__qualname__}, "
                "so it is not part of the tree. Make it an ordinary field."
            )
    return treedef.unflatten([value if path in flags else part for path, part in parts])


def _has_flag(node: Any) -> bool:
    """Whether a node, not a leaf, has an attribute `inference` that is not a method."""
    if jtu.all_leaves([node]) or callable(getattr(type(node), "inference", None)):
        return False
    # Not `hasattr(node, ...)`: a wrapper may return the flag of its content from
    # `__getattr__`.
    return hasattr(type(node), "inference") or "inference" in getattr(
        node, "__dict__", ()
    )
