"""`LoRA`: trains a low-rank update of the weight of a layer.

Like the other layers that compute the weight of a layer (`reparam.py`), it calls a
copy of the layer with another weight.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._call_path import call_part
from ..._module import Module, field, frozen, trainable, unfrozen
from ..._module.construct import filled
from ..._module.freezing import trainable_leaves
from ..._module.wrappers import check_forwards
from ..._runtime.harvest import class_of
from ..._tree import is_inexact_array
from ..._tree.partitioning import map_nodes
from ..._tree.selection import select
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.checks import as_number, as_size, check_not_layer_class, wrong_value
from .._base.init import draw, key_named, leading_axes, split_key
from .._base.precision import computes
from .._base.sharding import explicit_mesh, like
from .._base.state import StatefulLayer, StateIndex, is_stateful, takes_key
from .._layers.embedding import indexed
from .._layers.linear import rows_product
from .quantised import (
    TAKE_STAND_INS,
    QuantizedWeight,
    has_values,
    unwrapped,
    weights_under,
    with_weight,
)

_Layer = TypeVar("_Layer", covariant=True)
_P = ParamSpec("_P")
_Tree = TypeVar("_Tree")
_Y = TypeVar("_Y")


class LoRA(StatefulLayer, Generic[_Layer]):
    r"""A layer whose weight is trained by a low-rank update.

    $$W' = W + \frac{\alpha}{r} B A,$$

    where $W$ is the weight that the layer has, as a matrix with a row for each element
    of its first axis; $A$ has $r$ rows, and $B$ has $r$ columns. Only these two are
    trained. $B$ starts as zero, so that the output does not change at first; $A$ starts
    normal, with variance $1/n$ for a weight with $n$ columns. From [LoRA: Low-Rank
    Adaptation of Large Language Models](https://arxiv.org/abs/2106.09685) (Hu et al.
    2021).

    Attributes and methods are those of the layer with the weight $W'$. `Linear`,
    `Embedding`, `GRUCell` and `LSTMCell` are computed without forming $W'$, unless the axes
    of a mesh are explicit; other layers with it.

    [`equinox_like.nn.add_lora`][] does this to the layers of a whole model.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
        layer = eqx.nn.LoRA(linear, rank=2, key=jax.random.key(1))
        x = jnp.ones(8)
        assert (layer(x) == linear(x)).all()

        grads = eqx.filter_grad(lambda m: m(x).sum())(layer)
        assert grads.b.shape == (8, 2) and grads.layer.weight is None
        merged = layer.merge()
        assert (merged.unmerge()(x) == linear(x)).all()
        ```
    """

    layer: _Layer = field(trainable=False)
    a: Any
    b: Any
    alpha: float = field(static=True)
    weight_name: str | tuple[str, ...] = field(static=True)
    is_merged: bool = field(static=True)

    def __init__(
        self,
        layer: _Layer,
        rank: int,
        alpha: float | None = None,
        weight_name: str | tuple[str, ...] = "weight",
        *,
        batch_ndim: int | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `layer`: the layer to wrap: any Module with a weight.
        - `rank`: the number of columns of `b`, and of rows of `a`.
        - `alpha`: the update is scaled by `alpha / rank`; by default by 1.
        - `weight_name`: the name of the layer's weight, a floating or complex array with
            two axes at least; or a tuple of names, as `("weight_ih", "weight_hh")` for a
            `GRUCell`. Then `a` and `b` are tuples, too.
        - `batch_ndim`: the number of leading axes of the weight that belong to an
            ensemble or a [`equinox_like.nn.Stacked`][]. By default all leading axes that
            a layer of this library has beyond its own, and none for layers of your own.
        - `key`: a PRNG key for the initialisation of `a`.

        **Raises:**

        `ValueError` if `rank` is not an int of 1 or more, `alpha` is not a number,
        `batch_ndim` is negative, or if there is no such weight. `TypeError` if `layer`
        is a LoRA itself.
        """
        rank = as_size(self, "rank", rank, 1)
        check_not_layer_class("LoRA", "layer", layer)
        if isinstance(layer, LoRA):
            raise TypeError(
                "LoRA takes a layer without a LoRA as `layer`; got a LoRA. Pass "
                "`lora.merge().layer` to keep its update."
            )
        if batch_ndim is not None:
            batch_ndim = as_size(self, "batch_ndim", batch_ndim)
        self.layer = layer
        self.weight_name = weight_name
        self.alpha = as_number(self, "alpha", rank if alpha is None else alpha)
        self.is_merged = False
        names = self._names()
        if not names or not isinstance(names, tuple | list):
            wanted = "the name of a weight, or several,"
            raise wrong_value(self, wanted, "weight_name", weight_name)
        one = isinstance(weight_name, str)
        keys = [key] if one else split_key(key, len(names), self)
        with key_named(key, self):
            pairs = zip(names, keys, strict=True)
            drawn = [_first_matrices(layer, n, rank, batch_ndim, k) for n, k in pairs]
        self.a, self.b = drawn[0] if one else map(tuple, zip(*drawn, strict=True))

    @property
    def rank(self) -> int:
        """The number of columns of $B$."""
        return jax.tree.leaves(self.b)[0].shape[-1]

    @computes("eqx.nn.LoRA")
    def __call__(
        self: "LoRA[Callable[_P, _Y]]", /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _Y:
        """Calls the layer with the updated weight."""
        if not takes_key(self.layer):
            kwargs.pop("key", None)
        meets_mesh = explicit_mesh(*jax.tree.leaves((self, args, kwargs))) is not None
        cls = class_of(unwrapped(self.layer))
        if self.is_merged or meets_mesh or cls not in TAKE_STAND_INS:
            layer = self._updated_layer()
        else:
            layer = self._with_weights(_Updated)
        return call_part(unwrapped(self.layer), (), layer, layer, *args, **kwargs)

    def merge(self) -> "LoRA[_Layer]":
        """A copy whose layer has the updated weight, so that a call costs as much as
        the layer alone. None of its arrays is trainable. `merge().layer` is the layer
        itself.

        The new weight is rounded to its dtype.
        """
        if self.is_merged:
            return self
        a, b = frozen(self.a), frozen(self.b)
        changed = {"layer": self._updated_layer(), "a": a, "b": b, "is_merged": True}
        return filled(type(self), vars(self) | changed)

    def unmerge(self) -> "LoRA[_Layer]":
        """The inverse of [`merge`][equinox_like.nn.LoRA.merge], by subtraction.

        An element of the weight is restored exactly if its sum with the update was not
        rounded. Otherwise it differs by at most one unit in the last place of the
        merged weight. To restore weights exactly, keep the `LoRA` from before `merge`.
        """
        if not self.is_merged:
            return self
        layer = self._with_weights(lambda weight, b, a: weight - _product(b, a, weight))
        a, b = unfrozen(self.a), unfrozen(self.b)
        changed = {"layer": layer, "a": a, "b": b, "is_merged": False}
        return filled(type(self), vars(self) | changed)

    def is_stateful(self) -> bool:
        """Whether the wrapped layer is stateful."""
        return is_stateful(self.layer)

    def __getattr__(self, name: str) -> Any:
        check_forwards(self, name, "layer")
        layer = self.layer
        found = getattr(layer, name)
        if name in vars(layer) and name not in self._names():
            return found
        # Methods and properties of the layer must see the updated weight.
        return getattr(self._updated_layer(), name)

    def _names(self) -> tuple[str, ...]:
        names = self.weight_name
        return (names,) if isinstance(names, str) else names

    def _updated_layer(self) -> Any:
        if self.is_merged:
            return self.layer
        return self._with_weights(lambda weight, b, a: weight + _product(b, a, weight))

    def _with_weights(self, make: Callable[[Any, Any, Any], Any]) -> Any:
        """The layer with `make(weight, b, a)` for each weight; `b` is scaled."""
        layer, scale = self.layer, self.alpha / self.rank
        one = isinstance(self.weight_name, str)
        matrices = [(self.b, self.a)] if one else zip(self.b, self.a, strict=True)
        for name, (b, a) in zip(self._names(), matrices, strict=True):
            weight = getattr(unwrapped(layer), name)
            # Within `tree_at` a field may hold anything.
            if has_values(weight):
                if make is not _Updated or not isinstance(weight, QuantizedWeight):
                    weight = jnp.asarray(weight)
                # Scaled before the product. After it, XLA might fuse scaling and
                # adding, and then `unmerge` would not subtract the number that was
                # added.
                new = make(weight, jnp.asarray(b) * scale, jnp.asarray(a))
                layer = with_weight(layer, name, new)
        return layer


def add_lora(
    model: _Tree,
    where: Any,
    rank: int,
    alpha: float | None = None,
    *,
    key: PRNGKeyArray,
) -> _Tree:
    """Wraps layers of a model in [`equinox_like.nn.LoRA`][], and freezes everything
    else.

    So [`equinox_like.trainable`][] chooses the matrices of the updates only, and
    [`equinox_like.filter_grad`][] differentiates nothing else. To train another part as
    well, unfreeze it: `tree_at("head", model, replace_fn=unfrozen)`.

    **Arguments:**

    - `model`: any pytree.
    - `where`: which layers, or parts of the model with all layers in them: a class; a
        pattern for paths, such as `"**.query_proj"`; a function that returns nodes, as
        in [`equinox_like.tree_at`][]; or a list of these. Layers that have a `weight`,
        `weight_ih` or `weight_hh` with at least two axes are wrapped. It must be an array,
        or that of a [`equinox_like.nn.Quantized`][]; a quantised weight of a class of
        your own is left as it is.
    - `rank`, `alpha`: as for `LoRA`.
    - `key`: each layer is wrapped with a key made of this one and its path.

    **Returns:**

    The new model. Parts that were frozen before stay frozen.

    **Raises:**

    `ValueError` if `where` chooses no such weight, or the weight of a layer in a LoRA.

    The result shares arrays with `model`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
        tuned = eqx.nn.add_lora(model, "layers[*]", rank=2, key=jax.random.key(1))
        params = eqx.filter(tuned, eqx.trainable)
        assert len(jax.tree.leaves(params)) == 2 * len(model.layers)
        assert eqx.tree_equal(eqx.nn.merge_lora(tuned), model)
        ```
    """
    flags, model = trainable_leaves(model), unfrozen(model)
    others = "another name, or is not an array, such as a quantised one of your own,"
    chosen = weights_under(model, where, "add_lora", others, "LoRA")
    for path, _ in select(model).of(LoRA):
        inner = f"{path}.layer".removeprefix(".")
        if inner in chosen:
            raise ValueError(
                f"`add_lora` cannot wrap `{inner}`: it is in a LoRA already. Correct "
                "`where`, or call `merge_lora` first."
            )

    def wrap(path: str, layer: Any) -> LoRA:
        names = chosen[path]
        (batch_ndim,) = set(names.values())
        name = next(iter(names)) if len(names) == 1 else tuple(names)
        number = zlib.crc32((path or "<root>").encode())
        with key_named(key, "`add_lora`"):
            layer_key = jax.random.fold_in(key, number)
        return LoRA(layer, rank, alpha, name, batch_ndim=batch_ndim, key=layer_key)

    model = _frozen_as_before(model, flags)
    layers = select(model).where(lambda path, node: path in chosen)
    return _frozen_but_lora(layers.apply(wrap))


def merge_lora(model: _Tree) -> _Tree:
    """Replaces each [`equinox_like.nn.LoRA`][] of a model by its layer with the updated
    weight, and unfreezes the whole model.

    It has the structure from before [`equinox_like.nn.add_lora`][], unless a part was
    frozen then. Each weight is rounded to its dtype.

    The result shares arrays with `model`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
        tuned = eqx.nn.LoRA(model, rank=2, key=jax.random.key(1))
        assert eqx.tree_equal(eqx.nn.merge_lora(tuned), model)
        ```
    """

    def merged(lora: LoRA) -> Any:
        return merge_lora(lora.merge().layer)

    return map_nodes(merged, unfrozen(model), _is_lora)


def _is_lora(node: Any) -> bool:
    return isinstance(node, LoRA)


class _Updated(Module):
    """Replaces an updated weight in layers that only index or multiply by it."""

    weight: Any
    b: Array
    a: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __matmul__(self, x: Array) -> Array:
        # `x` comes first, so that under `vmap` the batch axis needs no transpose.
        update = jnp.inner(jnp.inner(x, self.a), self.b)
        return rows_product(x, self.weight) + update

    def __getitem__(self, index: ArrayLike) -> Array:
        return indexed(self.weight, index) + indexed(self.b, index) @ self.a


def _product(b: Array, a: Array, weight: Array) -> Array:
    return like((b @ a).reshape(weight.shape), weight)


def _first_matrices(
    layer: Any, name: str, rank: int, batch_ndim: int | None, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """$A$ and $B$ for a weight of the layer."""
    weight: Any = getattr(layer, name, None)
    weight = None if weight is None else jnp.asarray(weight)
    if not is_inexact_array(weight):
        raise ValueError(
            f"LoRA takes a layer with a floating or complex array as its `{name}`; this "
            f"{type(layer).__name__} has none. Wrap its inner layers instead, for example "
            "by `add_lora`, or pass `weight_name`."
        )
    if batch_ndim is None:
        batch_ndim = leading_axes(layer, name, weight.ndim, 0)
    if weight.ndim < batch_ndim + 2:
        raise ValueError(
            f"LoRA takes a weight with at least two axes; the `{name}` of this "
            f"{type(layer).__name__} has shape {weight.shape}."
        )
    batch, (rows, *others) = weight.shape[:batch_ndim], weight.shape[batch_ndim:]
    columns = math.prod(others)
    normal = draw(jax.random.normal, key, (*batch, rank, columns), weight.dtype)
    a = normal / math.sqrt(max(columns, 1))
    return a, jnp.zeros((*batch, rows, rank), weight.dtype)


def _frozen_as_before(model: Any, flags: list[bool]) -> Any:
    """The model, with the matrices of its LoRAs frozen where the leaves' flags are
    false."""

    def each(node, flags):
        if not _is_lora(node):
            return node
        pairs = (node.a, node.b), (flags.a, flags.b)
        a, b = jax.tree.map(lambda x, flag: x if flag else frozen(x), *pairs)
        return filled(type(node), vars(node) | {"a": a, "b": b})

    trained = jax.tree.structure(model).unflatten(flags)
    return jax.tree.map(each, model, trained, is_leaf=_is_lora)


def _frozen_but_lora(model: Any) -> Any:
    def is_left(node):
        return isinstance(node, LoRA | StateIndex)

    def each(node, flag):
        return node if is_left(node) or flag is not True else frozen(node)

    return jax.tree.map(each, model, trainable(model), is_leaf=is_left)
