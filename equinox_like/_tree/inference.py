"""Switches a whole model between training and inference."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.tree_util as jtu

from .at import tree_at
from .cycles import check_no_cycle
from .nodes import not_assigned, path_str, unset_fields
from .require import check_not_class

_Tree = TypeVar("_Tree")
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
