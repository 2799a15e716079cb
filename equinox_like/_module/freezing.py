"""Which arrays of a tree are trained: `trainable`, `frozen` and `unfrozen`.

Being frozen is a property of the tree, not of a call. A zero gradient is not enough: an
optimiser may still change the array by weight decay or momentum. A frozen part is a
`Frozen`, a Module whose only field is a `field(trainable=False)`.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._call_path import call_part
from .._compat.tracing import Tracer
from .._tree.at import choosing, tree_at
from .._tree.filters import array_filter, is_array_like, is_inexact_array
from .._tree.nodes import children_of, describe_node, leaf_paths, listed, plain_path
from .._tree.partitioning import map_arrays, map_nodes, tree_filter
from .._tree.paths import matches_above
from .._tree.registry import CachedType, register_cached
from .._tree.strict import compared_as_trees
from .construct import filled
from .fields import field
from .flatten import Node
from .module import Module
from .wrappers import check_forwards

_Tree = TypeVar("_Tree")


@tree_filter
def trainable(tree: Any, *, exclude: Any = None) -> Any:
    """Which leaves of a tree are parameters to train.

    These are the floating-point and complex arrays, except for those that are
    [`equinox_like.frozen`][] or in a `field(trainable=False)`.
    [`equinox_like.filter_grad`][] differentiates these, and
    `optimiser.init(filter(model, trainable))` initialises an optimiser for them. As a
    filter specification, this function is called on the whole tree, not on each leaf.

    **Arguments:**

    - `tree`: any pytree. `jax.ShapeDtypeStruct`s count as arrays if there are no arrays,
        as in a template of [`equinox_like.filter_eval_shape`][].
    - `exclude`: further nodes to leave out: a function that returns nodes, as in
        [`equinox_like.tree_at`][]; a class, for all its instances; a pattern for paths,
        such as `"layers[0]"` or `"**.bias"`, in which `*` stands for anything within
        one component and `**` for any number of components; or a list of these. A class,
        or a pattern with `*`, may match nothing, so that one list can serve several
        models.

    **Returns:**

    A tree of the structure of `tree`, with `True` and `False` as leaves.

    **Raises:**

    `ValueError` if a pattern without `*` matches nothing.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        model = eqx.tree_at("layers[0]", model, replace_fn=eqx.frozen)
        params = eqx.filter(model, eqx.trainable)
        assert [x.shape for x in jax.tree.leaves(params)] == [(2, 8), (2,)]

        no_biases = eqx.filter(model, eqx.trainable(model, exclude="**.bias"))
        assert [x.shape for x in jax.tree.leaves(no_biases)] == [(2, 8)]
        ```
    """
    is_counted = array_filter(jtu.tree_leaves(tree))

    def is_parameter(leaf: Any) -> bool:
        return is_counted(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)

    flags = trainable_leaves(tree, is_parameter)
    for selector in exclude if isinstance(exclude, list) else [exclude]:
        if selector is not None:
            excluded = leaves_under(tree, selector)
            if isinstance(selector, str) and "*" not in selector:
                _require_match(tree, selector)
            flags = [a and not b for a, b in zip(flags, excluded, strict=True)]
    return jtu.tree_structure(tree).unflatten(flags)


def _require_match(tree: Any, pattern: str) -> None:
    """Raises if the pattern matches nothing, not even a `None`."""
    there = leaf_paths(tree)
    if not any(matches_above(pattern, path) for path in there):
        raise ValueError(
            f"`exclude` has the pattern {pattern!r}, which matches nothing. It must match "
            f"a whole path, as '**.bias' does. The leaves are {listed(there, 5)}."
        )


def trainable_leaves(
    tree: Any, is_parameter: Callable[[Any], bool] = is_inexact_array
) -> list[bool]:
    """For each leaf, whether it is a parameter that is not in a `trainable=False` field."""
    flags: list[bool] = []
    # The next one is last; no recursion, since trees may be deep.
    pending = [(tree, False)]
    while pending:
        node, is_buffer = pending.pop()
        if is_buffer:
            flags += [False] * len(jtu.tree_leaves(node))
        elif _has_buffers(node):
            buffers = node._module_spec_.buffers
            for path, child in reversed(children_of(node)[0]):
                pending.append((child, path[0].name in buffers))
        elif jtu.all_leaves([node]):
            flags.append(is_parameter(node))
        else:
            parts = jtu.tree_leaves(node, is_leaf=_has_buffers)
            pending += [(part, False) for part in reversed(parts)]
    return flags


class _ToContent(jtu.GetAttrKey):
    """The key from a frozen part to its content. Its text is empty.

    Other libraries, such as Orbax, refuse keys that are not of JAX's own classes.
    """

    def __init__(self):
        super().__init__("value")

    def __str__(self) -> str:
        return ""


class Frozen(Module):
    """The result of [`equinox_like.frozen`][]. No gradient flows through its `value`."""

    value: Any = field(trainable=False)

    _registers_itself_ = True
    # NumPy leaves `array + frozen` to us.
    __array_priority__ = 100

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        value = self._stopped()
        return call_part(self.value, (), value, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        check_forwards(self, name, "value")
        return getattr(self._stopped(), name)

    def _stopped(self) -> Any:
        # Without tracers there is no gradient to stop, so the arrays are not copied.
        value = self.value
        if choosing.is_on or not any(
            isinstance(leaf, Tracer) for leaf in jtu.tree_leaves(value)
        ):
            return value
        return map_arrays(jax.lax.stop_gradient, value)

    def __dir__(self) -> list[str]:
        forwarded = (name for name in dir(self.value) if not name.startswith("__"))
        return [*super().__dir__(), *forwarded]

    # A frozen array is shown by its numbers, as by `jax.debug.print`.
    def __format__(self, spec: str) -> str:
        shown = self.value if is_array_like(self.value) else super()
        return shown.__format__(spec)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.value, dtype, copy=copy)

    # A frozen array is compared element by element, a frozen Module as a whole.
    def __eq__(self, other: Any) -> Any:
        value = self.value
        return value == other if is_array_like(value) else super().__eq__(other)

    def __ne__(self, other: Any) -> Any:
        value = self.value
        return value != other if is_array_like(value) else super().__ne__(other)

    def __hash__(self) -> int:
        return hash(self.value) if np.isscalar(self.value) else super().__hash__()

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self._stopped())


def _of_value(operation: Callable[..., Any]) -> Any:
    return lambda self: operation(self.value)


def _of_stopped(operation: Callable[..., Any]) -> Any:
    return lambda self, *others: operation(self._stopped(), *others)


def _reflected(operation: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: operation(other, self._stopped())


for _function in (bool, complex, float, int, len, operator.index):
    setattr(Frozen, f"__{_function.__name__}__", _of_value(_function))
for _function in (divmod, iter, reversed, round):
    setattr(Frozen, f"__{_function.__name__}__", _of_stopped(_function))
for _name in "abs contains ge getitem gt invert le lt neg pos".split():
    setattr(Frozen, f"__{_name}__", _of_stopped(getattr(operator, _name)))
_BINARY = "add and_ floordiv lshift matmul mod mul or_ pow rshift sub truediv xor"
for _name in _BINARY.split():
    _function, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(Frozen, f"__{_name}__", _of_stopped(_function))
    setattr(Frozen, f"__r{_name}__", _reflected(_function))
setattr(Frozen, "__rdivmod__", _reflected(divmod))  # noqa: B010


def frozen(tree: Any) -> Any:
    """Marks an array or a part of a model as not trained.

    The marked tree has the same arrays in the same order, so saved files do not change.
    A frozen Module can be called, and its attributes and methods read; a frozen array
    supports arithmetic and indexing, and every layer takes it as a parameter.
    [`equinox_like.filter_grad`][] does not differentiate them, so `apply_updates` does not
    change them. `jax.jit`, `jax.vmap` and saving treat them like other arrays and Modules.

    **Arguments:**

    - `tree`: an array, a Module or any pytree.

    **Returns:**

    A `Frozen`, whose `value` is `tree`. A `Frozen` is returned unchanged.

    The result shares arrays with `tree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        model = eqx.tree_at(lambda m: m.layers[0].weight, model, replace_fn=eqx.frozen)
        grads = eqx.filter_grad(lambda m: m(jnp.ones(3)).sum())(model)
        assert grads.layers[0].weight.value is None
        assert grads.layers[0].bias.shape == (8,)
        ```
    """
    return tree if isinstance(tree, Frozen) else Frozen(tree)


def unfrozen(tree: _Tree) -> _Tree:
    """Undoes [`equinox_like.frozen`][]: each frozen part is trainable again.

    The result shares arrays with `tree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        w = jnp.ones(3)
        assert eqx.unfrozen({"w": eqx.frozen(w)})["w"] is w
        ```
    """
    return map_nodes(
        lambda node: unfrozen(node.value), tree, lambda node: isinstance(node, Frozen)
    )


def _has_buffers(node: Any) -> bool:
    # `isinstance` is slow for `Module`, because of its metaclass, so `Node` is tested.
    return isinstance(node, Node) and bool(node._module_spec_.buffers)  # pyright: ignore[reportAttributeAccessIssue]


def leaves_under(tree: Any, selector: Any) -> list[bool]:
    """For each leaf, whether it is in a part of the tree that `selector` chooses."""
    if isinstance(selector, str):
        paths = [plain_path(path) for path, _ in jtu.tree_leaves_with_path(tree)]
        return [matches_above(selector, path) for path in paths]
    flags = jtu.tree_map(lambda _: False, tree)
    if isinstance(selector, type):
        flags = jtu.tree_map(
            lambda node: _all_true(node) if isinstance(node, selector) else False,
            tree,
            is_leaf=lambda node: isinstance(node, selector),
        )
    elif callable(selector):
        flags = tree_at(selector, flags, replace_fn=_all_true)
    else:
        raise TypeError(
            "Leaves are chosen by a function that returns nodes, a class, or a "
            f"pattern for paths; got {describe_node(selector)}."
        )
    return jtu.tree_leaves(flags)


def _all_true(node: Any) -> Any:
    return jtu.tree_map(lambda _: True, node)


def _flatten(node: Frozen) -> tuple[tuple[Any], None]:
    return (node.value,), None


def _unflatten(_: None, children: Iterable[Any]) -> Frozen:
    (value,) = children
    return filled(Frozen, {"value": value})


jtu.register_pytree_with_keys(
    Frozen, lambda node: (((_ToContent(), node.value),), None), _unflatten, _flatten
)
compared_as_trees.add(Frozen)  # although its `==` is that of an array
register_cached(Frozen, CachedType(_flatten, _unflatten, lambda _: ("value",)))
