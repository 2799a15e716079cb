"""`QuantizedWeight`: what stands for a weight that is stored as small integers or float8.

Its arrays have as many axes as the weight, so a `Stacked`, `vmap` and rules for shardings
treat them as they treat the weight.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._module import Module, field
from ..._tree import combine, is_array, partition
from ..._tree.partitioning import map_nodes
from .._base.precision import accumulation_dtype

_Tree = TypeVar("_Tree")

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
        weight, x = in_loop((self, x))
        if not self.dynamic or jnp.iscomplexobj(x):
            # `x` comes first, so that under `vmap` the batch axis needs no transpose.
            return jnp.inner(x, jnp.asarray(weight))
        return _dynamic(x.astype(jnp.result_type(x, self.dtype)), weight)


def in_loop(tree: _Tree) -> _Tree:
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
    if is_quantised(weight):
        return is_array(weight.values)
    return is_array(weight) or hasattr(weight, "__jax_array__")


def dequantised(tree: _Tree) -> _Tree:
    """The tree with arrays as its weights."""
    convert = lambda node: jnp.asarray(node) if has_values(node) else node  # noqa: E731
    return map_nodes(convert, tree, is_quantised)


def is_quantised(node: Any) -> bool:
    return isinstance(node, QuantizedWeight)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def stored(weight: Array, axes: Any, groups: Any, how: Any) -> QuantizedWeight:
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
    # Divided first: the difference of two large numbers may be infinite.
    scale = greatest / limit if symmetric else high / number - low / number
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
