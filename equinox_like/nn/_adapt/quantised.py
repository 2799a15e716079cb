"""`Quantized`: a layer whose weights are stored as small integers or float8.

A `QuantizedWeight` stands for the weight. Its arrays have as many axes as the weight, so
a `Stacked`, `vmap` and rules for shardings treat them as they treat the weight.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._call_path import call_part
from ..._module import Frozen, Module, field, frozen, unfrozen
from ..._module.freezing import leaves_under
from ..._module.wrappers import check_forwards
from ..._runtime.harvest import class_of
from ..._tree import combine, is_array, is_inexact_array, partition, tree_at
from ..._tree.nodes import Nodes, path_within
from ..._tree.partitioning import map_nodes
from ..._tree.paths import near_paths, read
from ..._tree.selection import select
from .._base.checks import as_size, check_not_layer_class, wrong_type, wrong_value
from .._base.init import WEIGHTS, layout_of, leading_axes
from .._base.precision import accumulation_dtype, computes, is_real
from .._base.sharding import explicit_mesh
from .._base.state import StatefulLayer, is_stateful, takes_key
from .._layers.embedding import Embedding
from .._layers.linear import EinsumLayout, Linear
from .._sequence.recurrent import GRUCell, LSTMCell
from .parameters import places

_Layer = TypeVar("_Layer", covariant=True)
_P = ParamSpec("_P")
_Tree = TypeVar("_Tree")
_Y = TypeVar("_Y")

Bits = Literal[8, 4, "float8_e4m3fn"]
# The dtype of the stored values, and the largest one that is used.
_KINDS: Final[dict[Any, tuple[Any, int]]] = {
    8: (jnp.int8, 127),
    4: (jnp.int4, 7),
    "float8_e4m3fn": (jnp.float8_e4m3fn, 448),
}


class QuantizedWeight(Module):
    """Replaces a weight of this `dtype`: `(values - zero) * scale`, each scale for a group
    of values. A scale has 32 bits at least: in float16 it could be subnormal."""

    values: Array = field(trainable=False)
    scale: Array = field(trainable=False)
    zero: Array | None = field(trainable=False)
    dynamic: bool = field(static=True)
    dtype: Any = field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __jax_array__(self) -> Array:
        values = self.values.astype(self.scale.dtype)
        if self.zero is not None:
            values = values - _spread(self.zero, self.shape).astype(values.dtype)
        weight = values * _spread(self.scale, self.shape)
        # The multiple of the scale that is next to a large number may be infinite.
        bounds = jnp.finfo(self.dtype)
        return jnp.clip(weight, float(bounds.min), float(bounds.max)).astype(self.dtype)

    def _in_dtype(self, dtype: Any) -> "QuantizedWeight":
        # What is stored would be rounded again.
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def __getitem__(self, index: Any) -> Array:
        return jnp.asarray(jax.tree.map(lambda x: x[index], self))

    def __matmul__(self, x: Array) -> Array:
        weight, x = _in_loop((self, x))
        if not self.dynamic or jnp.iscomplexobj(x):
            # `x` comes first, so that under `vmap` the batch axis needs no transpose.
            return jnp.inner(x, jnp.asarray(weight))
        return _dynamic(x.astype(jnp.result_type(x, self.dtype)), weight)


def _in_loop(tree: _Tree) -> _Tree:
    """The tree of weights and an input, such that XLA computes the weights only together
    with the input. Otherwise it would compute those of all layers before a loop over the
    inputs, as in `generate`, and keep them."""
    arrays, rest = partition(tree, is_array)
    return combine(jax.lax.optimization_barrier(arrays), rest)


@jax.custom_jvp
def _dynamic(x: Array, weight: QuantizedWeight) -> Array:
    """The product with `x` rounded to 8 bits, too. Its sums are exact."""
    scale, work = weight.scale, accumulation_dtype(x, weight.scale)
    wide = x.astype(work).reshape(scale.shape[1], -1 if x.size else 0)
    step = _at_least_normal(jnp.max(jnp.abs(wide), initial=0) / 127)
    rounded = jnp.round(wide / step).astype(jnp.int8)
    # Not -1, which is ambiguous if there are no inputs.
    values = weight.values.astype(jnp.int8).reshape(len(scale), *rounded.shape)
    sums = jnp.einsum("gi,ogi->og", rounded, values, preferred_element_type=jnp.int32)
    if weight.zero is not None:
        sums = sums - weight.zero.astype(jnp.int32) * rounded.sum(-1, dtype=jnp.int32)
    return ((sums.astype(work) * scale.astype(work)).sum(-1) * step).astype(x.dtype)


@_dynamic.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    # The derivative of rounding is zero: that of the product without it is used.
    (x, weight), (tangent, _) = primals, tangents
    return _dynamic(x, weight), jnp.inner(tangent, jnp.asarray(weight)).astype(x.dtype)


def _spread(x: Array, shape: Sequence[int]) -> Array:
    """`x`, with each element repeated over its group, unless broadcasting does that."""
    for axis, (size, number) in enumerate(zip(shape, x.shape, strict=True)):
        if number not in (1, size):
            x = jnp.repeat(x, size // number, axis)
    return x


def has_values(weight: Any) -> bool:
    """Whether this is an array, or converts to one. Within `tree_at` it may be anything."""
    if _is_quantised(weight):
        return is_array(weight.values)
    return is_array(weight) or hasattr(weight, "__jax_array__")


def _dequantised(tree: _Tree) -> _Tree:
    """The tree with arrays as its weights."""
    convert = lambda node: jnp.asarray(node) if has_values(node) else node  # noqa: E731
    return map_nodes(convert, tree, _is_quantised)


def _is_quantised(node: Any) -> bool:
    return isinstance(node, QuantizedWeight)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _stored(weight: Array, axes: Any, groups: Any, how: Any) -> QuantizedWeight:
    """What stands for a weight, with a scale for all elements along `axes`.

    `groups` may be one of these axes and a number of elements, which then have a scale.
    `how` is the triple `(bits, symmetric, dynamic)`.
    """
    bits, symmetric, dynamic = how
    dtype, limit = _KINDS[bits]
    blocks, split = weight.astype(accumulation_dtype(weight)), ()
    if groups is not None:
        axis, size = groups
        before, (length, *after) = weight.shape[:axis], weight.shape[axis:]
        blocks = blocks.reshape(*before, length // size, size, *after)
        axes = split = (axis + 1,)
    reduced: Any = {"axis": axes, "keepdims": True, "initial": 0}
    low, high = jnp.min(blocks, **reduced), jnp.max(blocks, **reduced)
    greatest, number = jnp.maximum(high, -low), 2 * limit + 1
    # Of halves: the difference of two large numbers may be infinite.
    scale = greatest / limit if symmetric else (high / 2 - low / 2) / (number / 2)
    scale = _at_least_normal(jnp.where(jnp.isfinite(greatest), scale, jnp.nan))
    steps, least, zero = blocks / scale, -limit, None
    if jnp.issubdtype(dtype, jnp.integer):
        steps = jnp.round(steps)
    if not symmetric:
        least -= 1
        zero = least - jnp.round(low / scale)
        steps, zero = steps + zero, jnp.squeeze(zero, split).astype(dtype)
    values = jnp.clip(steps, least, limit).astype(dtype).reshape(weight.shape)
    scale = jnp.squeeze(scale, split)
    return QuantizedWeight(values, scale, zero, dynamic, weight.dtype)


def _at_least_normal(step: Array) -> Array:
    """`step`, but not so small that XLA would take it, or half of it, for zero."""
    return jnp.maximum(step, 2 * jnp.finfo(step.dtype).tiny)


# These multiply by a weight, or index it: they take an object in place of an array.
_MULTIPLYING = (Linear, GRUCell, LSTMCell)
TAKE_STAND_INS = (*_MULTIPLYING, Embedding)
_BITS = '8, 4 or "float8_e4m3fn"'


class Quantized(StatefulLayer, Generic[_Layer]):
    r"""A layer whose weights are stored in 8 or 4 bits for each element.

    $$W \approx s\,(q - z),$$

    where $q$ are integers, and each output channel of the layer has a scale $s$ and a
    zero point $z$ of its own; or each group of `group_size` weights of a channel. If
    `symmetric`, $z$ is 0. Each element is rounded to the nearest multiple of its scale,
    so it differs by at most $s / 2$, and by the rounding to its dtype. Scales are in
    float32, or in float64 for weights in float64.

    The weights are computed from $q$ in each call, in the dtype that they had. They are
    not trained: [`equinox_like.trainable`][] leaves their arrays out. A bias is trained as
    before. Attributes and methods are those of the layer with the weights $s\,(q - z)$.
    [`equinox_like.nn.LoRA`][] takes a `Quantized` as its layer.

    [`equinox_like.nn.quantize`][] does this to the layers of a whole model. There is a
    guide: [Quantisation](../../quantisation.md).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        linear = eqx.nn.Linear(64, 8, key=jax.random.key(0))
        layer = eqx.nn.Quantized(linear, bits=4, group_size=16)
        assert layer.layer.weight.values.dtype == jnp.int4
        assert layer.layer.weight.scale.shape == (8, 4)
        x = jnp.ones(64)
        assert jnp.allclose(layer(x), linear(x), atol=0.2)
        assert layer.weight.dtype == jnp.float32
        ```
    """

    layer: _Layer

    def __init__(
        self,
        layer: _Layer,
        bits: Bits = 8,
        group_size: int | None = None,
        symmetric: bool = True,
        *,
        dynamic: bool = False,
        weight_name: str | tuple[str, ...] | None = None,
        batch_ndim: int | None = None,
    ):
        """**Arguments:**

        - `layer`: the layer to wrap: any Module with a weight.
        - `bits`: 8 or 4, for int8 or int4; XLA stores two int4 in a byte. Or
            `"float8_e4m3fn"`, for floats of 8 bits, which are rounded relative to their
            size.
        - `group_size`: how many weights share a scale. They are neighbours along the
            longest of the axes that are summed over. By default all weights of an output
            channel.
        - `symmetric`: whether the integers stand for numbers from `-a` to `a`. If not,
            they stand for those from the least to the greatest weight, or zero.
        - `dynamic`: whether the inputs are rounded to 8 bits, too, so that the product is
            one of integers, with sums in int32. Each input vector has one scale. Only for
            `Linear`, `GRUCell` and `LSTMCell`. The derivative is that of the product
            without this rounding. On a mesh with explicit axes the inputs are not rounded.
        - `weight_name`: the name of a weight with two axes at least, or a tuple of names.
            By default those of `weight`, `weight_ih` and `weight_hh` that the layer has.
        - `batch_ndim`: the number of leading axes of the weights that belong to an
            ensemble or a [`equinox_like.nn.Stacked`][], as for `LoRA`.

        **Raises:**

        `ValueError` for other `bits`, a `group_size` that does not divide the axis, a
        float8 that is not symmetric or is dynamic, or if there is no such weight.
        `TypeError` if `layer` is a `Quantized` itself, or cannot be `dynamic`.
        """
        _check_options(self, bits, group_size, symmetric, dynamic)
        check_not_layer_class("Quantized", "layer", layer)
        if isinstance(layer, Quantized):
            fix = " Choose other layers, or pass `layer.dequantized()`."
            raise wrong_type(self, "a layer that is not quantised", "layer", layer, fix)
        if dynamic and class_of(layer) not in _MULTIPLYING:
            wanted = "a Linear, a GRUCell or an LSTMCell, if `dynamic`,"
            raise wrong_type(self, wanted, "layer", layer, " Pass `dynamic=False`.")
        if batch_ndim is not None:
            batch_ndim = as_size(self, "batch_ndim", batch_ndim)
        names = (weight_name,) if isinstance(weight_name, str) else weight_name
        found = {n: _input_axes(layer, n, batch_ndim) for n in names or WEIGHTS}
        if not any(found.values()) or (names and not all(found.values())):
            raise ValueError(
                "Quantized takes a layer with a real floating array of two axes at least "
                f"as its {', '.join(f'`{n}`' for n in found)}; this "
                f"{type(layer).__name__} has none. Quantise its inner layers instead, "
                'by `quantize(layer, "**")`, or pass `weight_name`.'
            )
        for name, axes in found.items():
            if axes:
                weight, groups = jnp.asarray(getattr(layer, name)), None
                if group_size is not None:
                    axis = max(axes, key=lambda i: weight.shape[i])
                    groups = axis, group_size
                    _check_group(layer, name, weight.shape[axis], group_size)
                new = _stored(weight, axes, groups, (bits, symmetric, dynamic))
                layer = with_weight(layer, name, new)
        self.layer = layer

    @computes("eqx.nn.Quantized")
    def __call__(
        self: "Quantized[Callable[_P, _Y]]", /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _Y:
        """Calls the layer with the weights computed from the stored values."""
        if not takes_key(self.layer):
            kwargs.pop("key", None)
        meets_mesh = explicit_mesh(*jax.tree.leaves((self, args, kwargs))) is not None
        if meets_mesh or class_of(self.layer) not in TAKE_STAND_INS:
            layer, args, kwargs = _in_loop((self.layer, args, kwargs))
            layer = _dequantised(layer)
            return call_part(self.layer, (), layer, layer, *args, **kwargs)
        return self.layer(*args, **kwargs)

    def dequantized(self) -> _Layer:
        """The layer with the weights computed from the stored values. They can be
        trained."""
        return _dequantised(self.layer)

    def is_stateful(self) -> bool:
        """Whether the wrapped layer is stateful."""
        return is_stateful(self.layer)

    def __getattr__(self, name: str) -> Any:
        check_forwards(self, name, "layer")
        found = getattr(self.layer, name)
        if name in vars(self.layer) and not _is_quantised(found):
            return found
        # Methods and properties of the layer must see arrays.
        return getattr(self.dequantized(), name)


def quantize(
    model: _Tree,
    where: Any,
    bits: Bits = 8,
    group_size: int | None = None,
    symmetric: bool = True,
    *,
    dynamic: bool = False,
) -> _Tree:
    """Wraps layers of a model in [`equinox_like.nn.Quantized`][].

    **Arguments:**

    - `model`: any pytree.
    - `where`: which layers, or parts of the model with all layers in them: a class; a
        pattern for paths, such as `"**"` or `"blocks[*].mlp"`; a function that returns
        nodes, as in [`equinox_like.tree_at`][]; or a list of these. Layers that have a
        `weight`, `weight_ih` or `weight_hh` with at least two axes are wrapped.
    - `bits`, `group_size`, `symmetric`, `dynamic`: as for `Quantized`.

    **Returns:**

    The new model. Each layer of a [`equinox_like.nn.Stacked`][] or of an ensemble has its
    own scales. In a `LoRA`, the layer is wrapped, not the `LoRA`.

    **Raises:**

    As `Quantized`, naming the path of the layer. `ValueError` if `where` chooses no such
    weight, or a layer that is quantised already.

    The result shares arrays with `model`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
        small = eqx.nn.quantize(model, "layers[*]", bits=8)
        assert small.layers[0].layer.weight.values.dtype == jnp.int8
        x = jnp.ones(4)
        assert jnp.allclose(small(x), model(x), atol=0.05)
        ```
    """
    _check_options("`quantize`", bits, group_size, symmetric, dynamic)
    chosen = weights_under(unfrozen(model), where, "quantize", "Quantized")

    def wrap(path: str, layer: Any) -> Any:
        if isinstance(layer, Frozen):
            return frozen(wrap(path, layer.value))
        names, (batch_ndim, *_) = zip(*chosen[path].items(), strict=True)
        more: Any = {"weight_name": names, "batch_ndim": batch_ndim, "dynamic": dynamic}
        try:
            return Quantized(layer, bits, group_size, symmetric, **more)
        except (TypeError, ValueError) as error:
            error.args = (f"At `{path or '<root>'}`: {error}",)
            raise

    return select(model).where(lambda path, node: path in chosen).apply(wrap)


def with_weight(layer: Any, name: str, weight: Any) -> Any:
    """A copy of the layer, without a `Quantized` around it, with another weight."""
    return tree_at(lambda layer: getattr(layer, name), unwrapped(layer), weight)


def unwrapped(layer: Any) -> Any:
    return layer.layer if isinstance(layer, Quantized) else layer


def weights_under(
    model: Any, where: Any, taker: str, wrapper: str
) -> dict[str, dict[str, int]]:
    """The weights that `where` chooses: by the path of each layer, as in `select`, the
    names of its weights, and how many leading axes they have for stacking or an
    ensemble. A `Quantized` counts as its layer. An error names the function `taker`, and
    says that `wrapper` wraps layers whose weights have other names."""
    selectors = where if isinstance(where, list) else [where]
    flags = [leaves_under(model, each) for each in selectors]
    found: dict[str, dict[str, int]] = {}
    for i, place in enumerate(places(model)):
        leaf, name, owner, path = place.leaf, place.name, place.owner, place.path[:-1]
        if _is_quantised(owner):
            is_one = name == "values"
            name, path = getattr(path[-1], "name", None), path[:-2]
            owner = read(path_within(path), model)
            is_one = is_one and isinstance(owner, Quantized)
        else:
            # Its field, and not somewhere below it.
            is_one = is_inexact_array(leaf) and getattr(owner, name or "", None) is leaf
        if is_one and name in WEIGHTS and any(chosen[i] for chosen in flags):
            batch_ndim = leading_axes(owner, name, leaf.ndim, len(place.rows))
            if leaf.ndim >= batch_ndim + 2:
                found.setdefault(path_within(path), {})[name] = batch_ndim
    if not found:
        raise ValueError(
            f"`{taker}` found no weight with at least two axes under {where!r}. "
            f"Correct `where`, or wrap a layer with another weight by `{wrapper}`."
            f"{near_paths(selectors, Nodes(model).plain_paths)}"
        )
    return found


def _input_axes(layer: Any, name: str, batch_ndim: int | None) -> tuple[int, ...]:
    """The axes of a weight that are summed over; none if there is no such weight. The
    others are an output channel."""
    weight = getattr(layer, name, None)
    # A LoRA computes its weight: to replace it, there must be a field.
    owner = layer.value if isinstance(layer, Frozen) else layer
    if weight is None or name not in getattr(owner, "__dict__", ()):
        return ()
    weight, layout = jnp.asarray(weight), layout_of(layer, name)
    if batch_ndim is None:
        batch_ndim = leading_axes(layer, name, weight.ndim, 0)
    axes = range(batch_ndim + 1, weight.ndim)
    if isinstance(layout, EinsumLayout):
        letters = layout.axes.weight
        axes = [batch_ndim + letters.index(n) for n in layout.axes.summed]
    return tuple(axes) if is_real(weight) else ()


def _check_options(
    taker: Any, bits: Any, group_size: Any, symmetric: bool, dynamic: bool
) -> None:
    of_integers = dynamic or not symmetric
    if bits not in ([8, 4] if of_integers else [8, 4, "float8_e4m3fn"]):
        wanted = "8 or 4, if `dynamic` or not `symmetric`," if of_integers else _BITS
        raise wrong_value(taker, wanted, "bits", bits)
    if group_size is not None:
        as_size(taker, "group_size", group_size, 1)


def _check_group(layer: Any, name: str, length: int, size: int) -> None:
    if length % size != 0:
        fitting = max(n for n in range(1, size + 1) if length % n == 0)
        raise ValueError(
            f"Quantized takes a `group_size` that divides the axis of {length} elements "
            f"over which a {type(layer).__name__} sums with its `{name}`; got {size}. Pass "
            f"`group_size={fitting}`, or `None` for one scale for each output channel."
        )
