"""Convolutions on a CPU, in forms that XLA compiles to fast programs.

XLA is fast on a CPU for one or two spatial axes without groups. With groups, with more
axes, and for the gradient of the weight of a transposed convolution it takes up to 1000
times as long as needed. There, a convolution is computed

- with groups, or for that gradient: as a sum over the taps of the kernel, of products of
  `x` with the weights of one tap; the gradient of a depthwise weight, as the sums of all
  taps in one loop;
- with more than two axes: as one with an axis fewer, in which the taps of the first axis
  are channels.

A program for another platform holds the convolution of JAX.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from ..._runtime.primitives import create_vprim
from .._base.precision import accumulation_dtype
from .._base.sharding import explicit_mesh

_MOST_TAPS: Final = 64
"""Each tap is compiled. Kernels with more of them keep the convolution of JAX."""


class Windows(NamedTuple):
    """What `jax.lax.conv_general_dilated` gets beside the arrays."""

    strides: tuple[int, ...]
    padding: Any  # a pair of integers for each axis; a word, for symbolic sizes
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int
    dtype: np.dtype | None

    @property
    def is_transposed(self) -> bool:
        return any(step > 1 for step in self.lhs_dilation)


_Tangent = Literal["x", "weight"] | None
"""Which argument stands for a tangent: then the transpose has to be fast."""


# Compiled, inline in a program of the user's: an operation of JAX by itself takes longer.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def convolve(windows: Windows, x: Array, weight: Array) -> Array:
    """`jax.lax.conv_general_dilated` of an example `(channels, *space)`."""
    kernel = weight.shape[2:]
    is_slow = windows.groups > 1 or len(kernel) > 2 or windows.is_transposed
    is_real = all(jnp.issubdtype(y.dtype, jnp.floating) for y in (x, weight))
    if not (is_slow and is_real and math.prod(kernel[-2:]) <= _MOST_TAPS):
        return _by_xla(windows, x, weight)
    is_word = isinstance(windows.padding, str)
    if is_word or weight.size == 0 or explicit_mesh(x, weight) is not None:
        return _by_xla(windows, x, weight)
    return _chosen(windows, None, x, weight)


def _by_xla(windows: Windows, x: Array, weight: Array) -> Array:
    y = lax.conv_general_dilated(
        lax.expand_dims(x, (0,)),
        weight,
        windows.strides,
        windows.padding,
        windows.lhs_dilation,
        rhs_dilation=windows.rhs_dilation,
        feature_group_count=windows.groups,
        preferred_element_type=windows.dtype,
    )
    return lax.squeeze(y, (0,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _chosen(windows: Windows, tangent: _Tangent, x: Array, weight: Array) -> Array:
    if _is_fast(windows, tangent):
        return _by_xla(windows, x, weight)
    # With checkpoints the gradient keeps `x` and the weight, instead of a slice of `x` for
    # each tap.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)
    on_cpu = checkpoint(functools.partial(_on_cpu, windows, tangent))
    elsewhere = functools.partial(_by_xla, windows)
    run = functools.partial(lax.platform_dependent, cpu=on_cpu, default=elsewhere)
    return (run if tangent is None else checkpoint(run))(x, weight)


@functools.partial(_chosen.defjvp, symbolic_zeros=True)
def _(windows: Windows, tangent: _Tangent, primals: Any, tangents: Any) -> Any:
    (x, weight), (dx, dw) = primals, tangents
    y, terms = _chosen(windows, tangent, x, weight), []
    if not isinstance(dx, SymbolicZero):
        terms.append(_chosen(windows, "x", dx, weight))
    if not isinstance(dw, SymbolicZero):
        terms.append(_chosen(windows, "weight", x, dw))
    return y, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(y)


def _is_fast(windows: Windows, tangent: _Tangent) -> bool:
    """Whether XLA itself is fast on a CPU."""
    is_dense = windows.groups == 1 and len(windows.strides) <= 2
    return is_dense and not (tangent == "weight" and windows.is_transposed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_cpu(windows: Windows, tangent: _Tangent, x: Array, weight: Array) -> Array:
    dtype = windows.dtype or x.dtype
    wide = accumulation_dtype(x, weight, jnp.zeros((), dtype))
    # Otherwise XLA would compute the sums again in each operation that takes the result,
    # or, in the backward pass, its cotangent.
    x, weight = (lax.optimization_barrier(y.astype(wide)) for y in (x, weight))
    y = _rewritten(windows._replace(dtype=None), tangent, x, weight)
    return lax.optimization_barrier(y.astype(dtype))


def _rewritten(windows: Windows, tangent: _Tangent, x: Array, weight: Array) -> Array:
    is_depthwise = weight.shape[1] == 1 and windows.groups > 1
    if len(windows.strides) > 2 and not is_depthwise:
        is_transposed = windows.lhs_dilation[0] > 1
        remove = _to_outputs if is_transposed else _to_inputs
        return remove(windows, tangent, x, weight)
    if _is_fast(windows, tangent):
        return _by_xla(windows, x, weight)
    if is_depthwise and tangent == "weight":
        return _depthwise_p.bind(x, weight, windows=windows)[0]
    # What was fastest: XLA fuses the products of a depthwise convolution with slices of
    # `x`. The transpose of each form is the other one, but for the strides.
    if is_depthwise:
        is_scattered = tangent == "x"
    else:
        is_strided = any(step > 1 for step in windows.strides)
        is_scattered = windows.is_transposed or not (tangent or is_strided)
    return (_scattered if is_scattered else _gathered)(windows, x, weight)


def _gathered(windows: Windows, x: Array, weight: Array) -> Array:
    """The sum over the taps of the weights of a tap times what it sees of `x`."""
    return _total(map(_product, _seen(windows, x, weight), _taps(windows, weight)))


def _scattered(windows: Windows, x: Array, weight: Array) -> Array:
    """The sum over the taps of `x` times the weights of a tap, each at its place."""
    steps = [step - 1 for step in windows.lhs_dilation]
    reach = _reach(windows, weight)

    def placed(offset: tuple[int, ...], w: Array) -> Array:
        pads = [(r - low, low) for r, low in zip(reach, offset, strict=True)]
        return _padded(_product(x, w), pads, steps)

    full = _total(map(placed, _offsets(windows, weight), _taps(windows, weight)))
    axes = zip(windows.padding, reach, strict=True)
    y = _padded(full, [(low - r, high - r) for (low, high), r in axes])
    return lax.slice(y, (0,) * y.ndim, y.shape, (1, *windows.strides))


def _offsets(windows: Windows, weight: Any) -> Iterator[tuple[int, ...]]:
    axes = zip(weight.shape[2:], windows.rhs_dilation, strict=True)
    return itertools.product(*(range(0, size * step, step) for size, step in axes))


def _seen(windows: Windows, x: Array, weight: Any) -> Iterator[Array]:
    """What each tap sees of `x`."""
    x = _padded(x, windows.padding, [step - 1 for step in windows.lhs_dilation])
    sizes = zip(x.shape[1:], _reach(windows, weight), windows.strides, strict=True)
    # From the first to the last element that a tap sees.
    spans = [(n - reach - 1) // step * step + 1 for n, reach, step in sizes]
    for offset in _offsets(windows, weight):
        ends = [low + span for low, span in zip(offset, spans, strict=True)]
        yield lax.slice(x, (0, *offset), (x.shape[0], *ends), (1, *windows.strides))


def _taps(windows: Windows, weight: Array) -> list[Array]:
    """The weights of each tap, of shape `(groups, outputs, inputs)`."""
    outputs, inputs = weight.shape[0] // windows.groups, weight.shape[1]
    return _unstacked(weight.reshape(windows.groups, outputs, inputs, -1), 3)


def _product(x: Array, w: Array) -> Array:
    """At each position the product with the weights of one tap."""
    (groups, outputs, inputs), space = w.shape, x.shape[1:]
    if inputs == 1:
        y = x.reshape(groups, 1, *space) * w.reshape(w.shape[:2] + (1,) * len(space))
    else:
        flat = x.reshape(groups, inputs, math.prod(space))
        y = lax.dot_general(w, flat, (([2], [1]), ([0], [0])))
    return y.reshape(groups * outputs, *space)


def _sums(windows: Windows, x: Array, y: Array, weight: Any) -> Array:
    """The sums of what each tap sees of `x` times `y`, in the shape of the weight.

    XLA computes the sums of one operation for all taps in one loop.
    """
    y = y.reshape(windows.groups, -1, *y.shape[1:])
    terms = [part[:, None] * y for part in _seen(windows, x, weight)]
    zeros, space = [jnp.zeros((), y.dtype)] * len(terms), range(2, y.ndim)
    sums = lax.reduce(terms, zeros, functools.partial(jax.tree.map, jnp.add), space)
    return jnp.stack(sums, 2).reshape(weight.shape)


def _run(x: Array, weight: Array, *, windows: Windows) -> list[Array]:
    return [_gathered(windows, x, weight)]


def _type(x: Any, weight: Any, *, windows: Windows) -> Any:
    return jax.make_jaxpr(functools.partial(_run, windows=windows))(x, weight).out_avals


def _pull_back(cotangents: Any, x: Any, weight: Any, *, windows: Windows) -> list[Any]:
    return [None, _sums(windows, x, cotangents[0], weight.aval)]


def _push_forward(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("The derivative is that of `_chosen`.")


_depthwise_p = create_vprim("depthwise", _run, _type, _push_forward, _pull_back)
"""A depthwise convolution, linear in the weight. The transpose is `_sums`."""


def _to_inputs(windows: Windows, tangent: _Tangent, x: Array, weight: Array) -> Array:
    """Without the first axis: what each of its taps sees of `x` is an input channel."""
    x = _padded(x, [windows.padding[0]])
    size, step, dilation = weight.shape[2], windows.strides[0], windows.rhs_dilation[0]
    span = x.shape[1] - dilation * (size - 1)
    seen = [
        lax.slice_in_dim(x, low, low + span, step, axis=1)
        for low in range(0, dilation * size, dilation)
    ]
    x = jnp.stack(seen, 1).reshape(-1, *seen[0].shape[1:])
    weight = weight.reshape(weight.shape[0], -1, *weight.shape[3:])
    return _over_others(windows, tangent, x, weight)


def _to_outputs(windows: Windows, tangent: _Tangent, x: Array, weight: Array) -> Array:
    """The same if it is transposed: each tap has output channels of its own."""
    outputs, _, size, *kernel = weight.shape
    by_tap = jnp.moveaxis(weight, 2, 1).reshape(outputs * size, -1, *kernel)
    y = _over_others(windows, tangent, x, by_tap)
    y = y.reshape(outputs, size, *y.shape[1:])
    dilation, (low, high) = windows.rhs_dilation[0], windows.padding[0]
    offsets = range(0, dilation * size, dilation)
    return _total(
        _padded(
            part, [(low - at, high - offsets[-1] + at)], [windows.lhs_dilation[0] - 1]
        )
        for at, part in zip(offsets, _unstacked(y, 1), strict=True)
    )


def _over_others(windows: Windows, tangent: _Tangent, x: Array, weight: Array) -> Array:
    """The convolution over the other axes at each position of the first one."""
    others = windows._replace(
        strides=windows.strides[1:],
        padding=windows.padding[1:],
        lhs_dilation=windows.lhs_dilation[1:],
        rhs_dilation=windows.rhs_dilation[1:],
    )
    convolve_one = functools.partial(_rewritten, others, tangent)
    return jax.vmap(convolve_one, in_axes=(1, None), out_axes=1)(x, weight)


def _reach(windows: Windows, weight: Any) -> list[int]:
    axes = zip(weight.shape[2:], windows.rhs_dilation, strict=True)
    return [(size - 1) * step for size, step in axes]


def _padded(x: Array, pads: Any, steps: Any = None) -> Array:
    """`x` with zeros around and between the elements of its first axes of space."""
    steps = steps or [0] * len(pads)
    axes = [(*pair, step) for pair, step in zip(pads, steps, strict=True)]
    others = [(0, 0, 0)] * (x.ndim - 1 - len(axes))
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *axes, *others])


def _unstacked(x: Array, axis: int) -> list[Array]:
    parts = lax.split(x, (1,) * x.shape[axis], axis)
    return [lax.squeeze(part, (axis,)) for part in parts]


def _total(terms: Iterator[Array]) -> Array:
    return functools.reduce(jnp.add, terms)
