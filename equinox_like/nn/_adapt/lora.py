"""`LoRA`: trains a low-rank update of the weight of a layer.

The update of a layer is its adapter. A `LoRA` may hold several, each with a name: the one
that is used, in its own fields, and the others beside it.

Like the other layers that compute the weight of a layer (`reparam.py`), it calls a
copy of the layer with another weight.
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._call_path import call_part
from ..._io.checkpoint import load, load_metadata, save
from ..._module import Module, field, frozen, trainable, unfrozen
from ..._module.construct import filled
from ..._module.freezing import trainable_leaves
from ..._module.wrappers import check_forwards
from ..._runtime.harvest import class_of
from ..._tree import is_inexact_array
from ..._tree.partitioning import map_nodes
from ..._tree.selection import select
from ..._typing import ArrayLike, FilePath, PRNGKeyArray, Writable
from .._base.checks import as_number, as_size, check_not_layer_class, wrong_value
from .._base.init import draw, key_named, leading_axes, split_key
from .._base.precision import computes
from .._base.sharding import explicit_mesh, like
from .._base.state import StatefulLayer, StateIndex, is_stateful, takes_key
from .._layers.elementwise import Dropout
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


class _Adapter(Module):
    """An update of a layer that is not used at present."""

    a: Any
    b: Any
    alpha: float = field(static=True)


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

    [`equinox_like.nn.add_lora`][] does this to the layers of a whole model. A layer may
    have several updates with names, see [`equinox_like.nn.choose_lora`][].

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
    name: str | None = field(static=True)
    others: dict[str, _Adapter] = field(trainable=False)

    def __init__(
        self,
        layer: _Layer,
        rank: int,
        alpha: float | None = None,
        weight_name: str | tuple[str, ...] = "weight",
        *,
        batch_ndim: int | None = None,
        name: str = "default",
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
        - `name`: of the update, which [`equinox_like.nn.choose_lora`][] takes.
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
        self.name, self.others = name, {}
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
        return _rank(self.b)

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
        layer, scale = self.layer, self.alpha / max(self.rank, 1)
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

    def _named(self) -> dict[str, _Adapter]:
        """All adapters that have names."""
        own = _Adapter(unfrozen(self.a), unfrozen(self.b), self.alpha)
        return self.others if self.name is None else {**self.others, self.name: own}

    def _using(self, name: str | None, adapter: "_Adapter | LoRA") -> "LoRA[_Layer]":
        """A copy that uses this adapter, and keeps the others. It is not merged."""
        others = {n: x for n, x in self._named().items() if n != name}
        changed = {"a": adapter.a, "b": adapter.b, "alpha": adapter.alpha}
        changed |= {"name": name, "others": others}
        return filled(type(self), vars(self.unmerge()) | changed)


def add_lora(
    model: _Tree,
    where: Any,
    rank: int,
    alpha: float | None = None,
    *,
    name: str = "default",
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
    - `name`: of the updates, which are then used and trained in place of those of other
        names: see [`equinox_like.nn.choose_lora`][]. A layer may have several.
    - `key`: each layer is wrapped with a key made of this one and its path.

    **Returns:**

    The new model. Parts that were frozen before stay frozen.

    **Raises:**

    `ValueError` if `where` chooses no such weight, or the weight of a layer that has an
    update of this name.

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
    found = weights_under(unfrozen(model), where, "add_lora", "LoRA")
    wanted: dict[str, dict[str, Any]] = {}
    for path, names in found.items():
        (batch_ndim,) = set(names.values())
        weight = next(iter(names)) if len(names) == 1 else tuple(names)
        wanted[path] = {"rank": rank, "alpha": alpha, "batch_ndim": batch_ndim}
        wanted[path]["weight_name"] = weight
    return _with_adapters(model, wanted, name, key, "add_lora")


def _with_adapters(
    model: Any, wanted: dict[str, dict[str, Any]], name: str, key: Any, taker: str
) -> Any:
    """The model with adapters for the layers of these paths, by the arguments of `LoRA`.

    All else is frozen.
    """
    flags, model = trainable_leaves(model), unfrozen(model)
    for path, lora in select(model).of(LoRA):
        inner = _path_within(path)
        if inner in wanted:
            if name in lora._named():
                raise ValueError(
                    f"`{taker}` cannot wrap `{inner}`: it is in a LoRA already, with the "
                    f"name {name!r}. Pass another `name`, or call `merge_lora` first."
                )
            wanted[path] = wanted.pop(inner)

    def wrap(path: str, layer: Any) -> LoRA:
        inner = layer.layer if _is_lora(layer) else layer
        layer_key = _key_at(path, key, f"`{taker}`")
        new = LoRA(inner, **wanted[path], name=name, key=layer_key)
        return layer._using(name, new) if _is_lora(layer) else new

    model = _frozen_as_before(model, flags)
    layers = select(model).where(lambda path, node: path in wanted)
    return _frozen_but_lora(choose_lora(layers.apply(wrap), name))


def _path_within(path: str) -> str:
    """The path of the layer in the LoRA at this path."""
    return f"{path}.layer".removeprefix(".")


def _key_at(path: str, key: Any, taker: str) -> Any:
    """A key for the layer at this path."""
    with key_named(key, taker):
        return jax.random.fold_in(key, zlib.crc32((path or "<root>").encode()))


def choose_lora(model: _Tree, adapters: str | Mapping[str, ArrayLike]) -> _Tree:
    """Chooses which of the updates of each [`equinox_like.nn.LoRA`][] is used.

    The others stay in the model: they are saved and donated with it, but not trained.

    **Arguments:**

    - `model`: any pytree, to which [`equinox_like.nn.add_lora`][] or
        [`equinox_like.nn.load_lora`][] added updates with names.
    - `adapters`: the name of the updates to use. Or a dictionary with a factor for each
        name, which may be traced: then the sum of the updates, times their factors, is
        used. It has no name, so the next choice drops it. `{}` is no update at all.

    **Returns:**

    The new model. A layer without an update of a name does without it, and a merged LoRA
    is unmerged. Each choice is another structure, for which a function is compiled again,
    unless only the factors differ.

    **Raises:**

    `ValueError` if no layer has an update of a name.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
        for i, name in enumerate(["french", "law"]):
            model = eqx.nn.add_lora(model, "**", 2, name=name, key=jax.random.key(i))
        assert model.layers[0].name == "law"
        french = eqx.nn.choose_lora(model, "french")
        both = eqx.nn.choose_lora(model, {"french": 0.7, "law": 0.3})
        assert both.layers[0].rank == 4
        merged = eqx.nn.merge_lora(both)
        ```
    """
    weights = {adapters: 1.0} if isinstance(adapters, str) else dict(adapters)
    loras = select(model).of(LoRA)
    known = {name for _, lora in loras for name in lora._named()}
    for name in weights:
        if name not in known:
            wanted = f"names of updates in the model, {sorted(known)},"
            raise wrong_value("`choose_lora`", wanted, "adapters", name, known)

    def chosen(lora: LoRA) -> LoRA:
        held = lora._named()
        if adapters == lora.name:  # which may be frozen or merged
            return lora
        if isinstance(adapters, str) and adapters in held:
            return lora._using(adapters, held[adapters])
        parts = [(held[n], weight) for n, weight in weights.items() if n in held]
        return lora._using(None, _mixed(lora, parts))

    return loras.apply(chosen)


def _mixed(lora: LoRA, parts: list[tuple[_Adapter, Any]]) -> _Adapter:
    """The sum of adapters times factors: one adapter, whose rank is the sum of ranks."""
    # Without any, matrices of rank 0.
    of_a = [jax.tree.map(lambda x: x[..., :0, :], unfrozen(lora.a))]
    of_b = [jax.tree.map(lambda x: x[..., :0], unfrozen(lora.b))]
    for adapter, factor in parts:
        scale = factor * adapter.alpha / max(_rank(adapter.b), 1)
        of_a.append(adapter.a)
        times = lambda x, scale=scale: x * jnp.asarray(scale, x.dtype)  # noqa: E731
        of_b.append(jax.tree.map(times, adapter.b))
    a = jax.tree.map(lambda *each: jnp.concatenate(each, -2), *of_a)
    b = jax.tree.map(lambda *each: jnp.concatenate(each, -1), *of_b)
    return _Adapter(a, b, float(_rank(b)))


def _rank(b: Any) -> int:
    return jax.tree.leaves(b)[0].shape[-1]


def drop_lora(model: _Tree, p: float, *, key: PRNGKeyArray) -> _Tree:
    """Drops inputs of the update of each [`equinox_like.nn.LoRA`][], as a dropout before
    its `a` would. The layer itself gets all of its inputs.

    Call it in the loss function, so that the gradients are those of the model before:

    ```python
    def loss_fn(model, x, y, key):
        model = eqx.nn.drop_lora(model, 0.1, key=key)
        return ...
    ```

    **Arguments:**

    - `model`: any pytree.
    - `p`: the probability that an input is dropped, as for [`equinox_like.nn.Dropout`][].
    - `key`: a PRNG key. Each matrix has its own numbers.

    **Returns:**

    The model, in which columns of each $A$ are zero, and the rest is multiplied by
    `1 / (1 - p)`. So an input is dropped in all calls of a layer: for all tokens of a
    sequence, for example. For other inputs in each example, call it within `jax.vmap`.
    """
    dropout = Dropout(p)

    def dropped(path: str, lora: LoRA) -> LoRA:
        leaves, structure = jax.tree.flatten(lora.a)
        keys = jax.random.split(_key_at(path, key, "`drop_lora`"), len(leaves))
        # To drop an input is to drop the column of `a` that it is multiplied by.
        ones = (jnp.ones_like(a[..., :1, :]) for a in leaves)
        masks = (dropout(x, key=k) for x, k in zip(ones, keys, strict=True))
        a = structure.unflatten(map(jnp.multiply, leaves, masks))
        return filled(type(lora), vars(lora) | {"a": a})

    return select(model).of(LoRA).apply(dropped)


def save_lora(path_or_file: FilePath | Writable, model: Any) -> None:
    """Saves the updates of a model alone, those that it uses: see
    [`equinox_like.nn.choose_lora`][].

    **Arguments:**

    - `path_or_file`: as for [`equinox_like.save`][].
    - `model`: a model with [`equinox_like.nn.LoRA`][]s. The file has the matrices of each,
        by its path in the model, with its `alpha`.

    **Raises:**

    `ValueError` if the model uses no updates.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        base = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
        tuned = eqx.nn.add_lora(base, "**", 2, key=jax.random.key(1))
        eqx.nn.save_lora("french", tuned)  # after training
        loaded = eqx.nn.load_lora("french", base, name="french")
        assert (loaded.layers[0].a == tuned.layers[0].a).all()
        ```
    """
    loras = {path: lora for path, lora in select(model).of(LoRA) if lora.rank}
    if not loras:
        raise ValueError(
            "`save_lora` takes a model that uses updates; this one has none."
        )
    options = {
        path: {"rank": x.rank, "alpha": x.alpha, "weight_name": x.weight_name}
        | {"batch_ndim": jax.tree.leaves(x.a)[0].ndim - 2}
        for path, x in loras.items()
    }
    save(path_or_file, _matrices(loras), {"lora": json.dumps(options)})


def load_lora(path: FilePath, model: _Tree, name: str = "default") -> _Tree:
    """Adds the updates that [`equinox_like.nn.save_lora`][] saved to a model.

    **Arguments:**

    - `path`: that of the file.
    - `model`: a model with the layers of the saved one, whether these are in LoRAs
        already or not.
    - `name`: of the updates, which are then used.

    **Returns:**

    The new model, in which all else is frozen, as by [`equinox_like.nn.add_lora`][].

    **Raises:**

    `ValueError` if the file is another one, or the model has no such layer, or updates of
    this name. The errors of [`equinox_like.load`][].
    """
    saved = json.loads(load_metadata(path).get("lora", "{}"))
    layers = dict(select(model))
    if not saved or not layers.keys() >= saved.keys():
        absent = sorted(saved.keys() - layers.keys())
        has = (
            f"updates of {absent}, which the model has not" if absent else "no updates"
        )
        raise ValueError(
            "`load_lora` takes a file of `save_lora` with updates for layers of the model; "
            f"`{path}` has {has}."
        )
    wanted = {}
    for at, options in saved.items():
        if isinstance(options["weight_name"], list):
            options["weight_name"] = tuple(options["weight_name"])
        wanted[_path_within(at) if _is_lora(layers[at]) else at] = options
    model = _with_adapters(model, wanted, name, jax.random.key(0), "load_lora")
    chosen = select(model).where(lambda path, node: path in saved and _is_lora(node))
    matrices = load(path, _matrices(dict(chosen)))
    return chosen.apply(lambda at, x: filled(type(x), vars(x) | matrices[at]))


def _matrices(loras: dict[str, LoRA]) -> dict[str, dict[str, Any]]:
    return {path: unfrozen({"a": x.a, "b": x.b}) for path, x in loras.items()}


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

    return map_nodes(lambda x: merge_lora(x.merge().layer), unfrozen(model), _is_lora)


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
            f"{type(layer).__name__} has none. Use `add_lora`, or pass `weight_name`."
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
