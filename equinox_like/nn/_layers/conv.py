"""`Conv` and `ConvTranspose` for any number of spatial axes."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._module import Module, field
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_padding,
    as_size,
    check_input,
    check_length,
    check_windows,
    jax_array,
    parameter_shape,
    per_axis,
    wrong_value,
)
from .._base.init import Init, channels_first, first_values
from .._base.precision import computes, in_float32
from .._base.sharding import parts, placed
from .cpu_conv import Windows, convolve

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

_PADDING_WORDS = ("SAME", "SAME_LOWER", "VALID")
_PADDING_MODES = {
    "ZEROS": "constant",
    "REFLECT": "reflect",
    "REPLICATE": "edge",
    "CIRCULAR": "wrap",
}


def _configure(
    conv: Any,
    sizes: tuple[int, int, int, int],
    padding: Any,
    padding_mode: str,
    preferred_element_type: DTypeLike | None,
    **axes: Any,
) -> None:
    """Sets static fields to validated values; in `axes`, to one for each spatial axis."""
    conv.num_spatial_dims = n = as_size(conv, "num_spatial_dims", sizes[0])
    conv.in_channels = as_size(conv, "in_channels", sizes[1], 1)
    conv.out_channels = as_size(conv, "out_channels", sizes[2])
    for name, value in axes.items():
        minimum = 0 if name == "output_padding" else 1
        values = per_axis(conv, name, value, n, minimum)
        check_length(conv, name, values, n)
        setattr(conv, name, values)
    if isinstance(padding, str):
        conv.padding = _one_of(conv, "padding", padding, _PADDING_WORDS)
    else:
        conv.padding = as_padding(conv, padding, n)
    conv.groups = groups = as_size(conv, "groups", sizes[3], 1)
    for name in ("in_channels", "out_channels"):
        if getattr(conv, name) % groups != 0:
            wanted = f"a multiple of `groups`, {groups},"
            raise wrong_value(conv, wanted, name, getattr(conv, name))
    conv.padding_mode = _one_of(conv, "padding_mode", padding_mode, _PADDING_MODES)
    preferred = preferred_element_type
    conv.preferred_element_type = None if preferred is None else jnp.dtype(preferred)


def _one_of(conv: Any, name: str, value: Any, words: Collection[str]) -> str:
    if isinstance(value, str) and value.upper() in words:
        return value.upper()
    raise wrong_value(conv, f"one of {', '.join(words)}", name, value, words=words)


def _parameters(
    conv: Any, dtype: Any, key: PRNGKeyArray, weight_init: Any, bias_init: Any
) -> Iterator[Any]:
    """The weight and bias of a layer, whose size fields must be set before."""
    per_group = conv.in_channels // conv.groups
    limit = 1 / math.sqrt(per_group * math.prod(conv.kernel_size))
    weight = weight_init, (conv.out_channels, per_group, *conv.kernel_size)
    bias_shape = conv.out_channels, *(1,) * conv.num_spatial_dims
    bias = bias_init, bias_shape if conv.use_bias else None
    return first_values(conv, key, limit, dtype, weight=weight, bias=bias)


def _convolved(
    conv: Any,
    x: ArrayLike,
    pad: Callable[[Any, Array, Sequence[int]], tuple[Array, Any]],
    out_sharding: PartitionSpec | None,
    strides: tuple[int, ...],
    lhs_dilation: tuple[int, ...],
) -> Array:
    """Calls a layer. `pad(conv, x, kernel_size)` returns `x`, padded with elements of its
    own if the mode says so, and the padding with zeros, which JAX adds."""
    n = conv.num_spatial_dims
    shape = parameter_shape(conv, "weight", n + 2)
    channels = None if shape is None else shape[1] * conv.groups
    check_input(conv, x, (channels,) + (None,) * n)
    x, weight = jax_array(x), jax_array(conv.weight)

    def apply(x, weight, bias):
        padded, padding = pad(conv, x, weight.shape[2:])
        axes = zip(padded.shape[1:], lhs_dilation, strict=True)
        sizes = [(n - 1) * step + 1 for n, step in axes]
        windows, pairs = _dilated(conv, weight.shape[2:]), padding
        if isinstance(padding, str):
            pairs = jax.lax.padtype_to_pads(sizes, windows, strides, padding)
        check_windows(conv, x.shape, sizes, pairs, windows)
        if x.dtype != weight.dtype:
            raise TypeError(
                f"{type(conv).__name__} takes an `x` of the dtype of its weight, "
                f"{weight.dtype}; got {x.dtype}. Convert it by "
                f"`x.astype({str(weight.dtype)!r})`."
            )
        # Of symbolic sizes, JAX computes the padding that a word stands for.
        is_known = all(isinstance(size, int) for size in sizes)
        added = tuple(map(tuple, pairs)) if is_known or pairs is padding else padding
        axes = strides, added, lhs_dilation, conv.dilation
        moves = Windows(*axes, conv.groups, conv.preferred_element_type)
        y = convolve(moves, padded, weight).astype(x.dtype)
        # The flag decides, not whether the bias is `None`.
        return in_float32(jnp.add, y, bias) if conv.use_bias else y

    if out_sharding is None:
        out_sharding = _default_sharding(conv, x, weight)
    return placed(apply, out_sharding, x, weight, conv.bias)


def _default_sharding(conv: Any, x: Array, weight: Array) -> PartitionSpec | None:
    """The output's sharding if JAX cannot derive it: channels, weights, or an axis that
    is padded with its own elements are split."""
    channels, *space = parts(x)
    of_weight = parts(weight)
    is_padded = conv.padding_mode != "ZEROS" and any(space)
    if channels is None and not any(of_weight) and not is_padded:
        return None
    return PartitionSpec(None if of_weight[0] in space else of_weight[0], *space)


class Conv(Module):
    r"""A convolution with any number of spatial axes, as in neural networks.

    That is a cross-correlation: the kernel is not flipped. Along one spatial axis, with
    stride $s$ and dilation $d$, and with $x$ padded already,

    $$y_{o, i} = b_o + \sum_{c, j} W_{o, c, j}\, x_{c, s i + d j}.$$

    An axis of size $n$ becomes one of size
    $\lfloor (n + p_0 + p_1 - d (k - 1) - 1) / s \rfloor + 1$ for a kernel of size $k$ and
    padding $(p_0, p_1)$. Weight and bias start uniform on
    $[-1/\sqrt{f}, 1/\sqrt{f})$, where
    $f = (\mathrm{in\_channels} / \mathrm{groups}) \prod \mathrm{kernel\_size}$.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        conv = eqx.nn.Conv(1, 3, 8, kernel_size=5, padding="SAME", key=jax.random.key(0))
        assert conv(jnp.ones((3, 20))).shape == (8, 20)
        ```
    """

    num_spatial_dims: int = field(static=True)
    weight: Array
    bias: Array | None
    in_channels: int = field(static=True)
    out_channels: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: str | tuple[tuple[int, int], ...] = field(static=True)
    dilation: tuple[int, ...] = field(static=True)
    groups: int = field(static=True)
    use_bias: bool = field(static=True)
    padding_mode: str = field(static=True)
    preferred_element_type: np.dtype | None = field(static=True, default=None)

    _layouts = MappingProxyType({"weight": channels_first})

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        preferred_element_type: DTypeLike | None = None,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `num_spatial_dims`: the number of spatial axes.
        - `in_channels`, `out_channels`: the sizes of the input's and the output's first
            axis. Both must be multiples of `groups`.
        - `kernel_size`, `stride`, `dilation`: each an int, or one for each spatial axis.
        - `padding`: how much to add to the spatial axes: an int, an int for each axis,
            a pair (before, after) for each axis; or `"VALID"` (nothing), `"SAME"` or
            `"SAME_LOWER"` (so that the output has the size of the input divided by the
            stride, rounded up; an odd element goes to the end or to the start).
            Negative padding crops.
        - `groups`: the number of groups into which the input and output channels are
            divided. Each group has its own convolution. With several groups on a
            mesh of several axes, split the batch over all axes: XLA computes a wrong
            gradient of the weight otherwise.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: what to pad with: `"ZEROS"`, `"REFLECT"` (the elements next to
            the edge, in reverse), `"REPLICATE"` (the edge) or `"CIRCULAR"` (the other
            end).
        - `dtype`: of the parameters; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `key`: a PRNG key for parameter initialisation.
        - `preferred_element_type`: the dtype in which the products are accumulated; by
            default that of the input.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Linear`][]. The weight's
            shape is given as `(*kernel_size, in_channels // groups, out_channels)`.

        **Raises:**

        `ValueError` for an invalid size, padding or number of groups.
        """
        self.use_bias = use_bias
        sizes = num_spatial_dims, in_channels, out_channels, groups
        modes = padding, padding_mode, preferred_element_type
        axes = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        _configure(self, sizes, *modes, **axes)
        inits = weight_init, bias_init
        self.weight, self.bias = _parameters(self, dtype, key, *inits)

    @computes("eqx.nn.Conv")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        out_sharding: PartitionSpec | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: shape `(in_channels, size_1, ..., size_n)`, of the dtype of the parameters.
        - `key`: ignored.
        - `out_sharding`: how to split the result of one example over the explicit axes of
            a mesh; by default the channels as those of the weight, and the space as that
            of `x`.

        **Returns:**

        An array of shape `(out_channels, new_size_1, ..., new_size_n)`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another rank or number of channels, if a
        spatial axis is empty, or if the dilated kernel does not fit into the padded input.
        `TypeError` if it has another dtype.
        """
        ones = (1,) * self.num_spatial_dims
        return _convolved(self, x, _padded, out_sharding, self.stride, ones)


class _ConvNd(Conv):
    """Base class of those with a fixed number of spatial axes."""

    _num_spatial_dims = 0

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        preferred_element_type: DTypeLike | None = None,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `in_channels`, `out_channels`: the sizes of the input's and the output's first
            axis. Both must be multiples of `groups`.
        - `kernel_size`, `stride`, `dilation`: each an int, or one for each spatial axis.
        - `padding`: how much to add to the spatial axes: an int, an int for each axis,
            a pair (before, after) for each axis; or `"VALID"` (nothing), `"SAME"` or
            `"SAME_LOWER"` (so that the output has the size of the input divided by the
            stride, rounded up; an odd element goes to the end or to the start).
            Negative padding crops.
        - `groups`: the number of groups into which the input and output channels are
            divided. Each group has its own convolution. With several groups on a mesh of
            several axes, split the batch over all axes: XLA computes a wrong gradient of
            the weight otherwise.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: what to pad with: `"ZEROS"`, `"REFLECT"` (the elements next to
            the edge, in reverse), `"REPLICATE"` (the edge) or `"CIRCULAR"` (the other
            end).
        - `dtype`: of the parameters; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `key`: a PRNG key for parameter initialisation.
        - `preferred_element_type`: the dtype in which the products are accumulated; by
            default that of the input.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Conv`][].

        **Raises:**

        `ValueError` for an invalid size, padding or number of groups.
        """
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation
        options = groups, use_bias, padding_mode, dtype
        super().__init__(
            self._num_spatial_dims,
            *sizes,
            *options,
            key=key,
            preferred_element_type=preferred_element_type,
            weight_init=weight_init,
            bias_init=bias_init,
        )


class Conv1d(_ConvNd, init=False):
    """A convolution with one spatial axis, for sequences: [`equinox_like.nn.Conv`][].

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        conv = eqx.nn.Conv1d(3, 8, kernel_size=5, key=jax.random.key(0))
        assert conv(jnp.ones((3, 20))).shape == (8, 16)
        ```
    """

    _num_spatial_dims = 1


class Conv2d(_ConvNd, init=False):
    """A convolution with two spatial axes, for images: [`equinox_like.nn.Conv`][].

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        conv = eqx.nn.Conv2d(3, 8, kernel_size=3, padding=1, key=jax.random.key(0))
        assert conv(jnp.ones((3, 9, 9))).shape == (8, 9, 9)
        ```
    """

    _num_spatial_dims = 2


class Conv3d(_ConvNd, init=False):
    """A convolution with three spatial axes, for volumes: [`equinox_like.nn.Conv`][].

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        conv = eqx.nn.Conv3d(3, 8, kernel_size=3, padding=1, key=jax.random.key(0))
        assert conv(jnp.ones((3, 9, 9, 9))).shape == (8, 9, 9, 9)
        ```
    """

    _num_spatial_dims = 3


def _padded(conv: Conv, x: Array, kernel: Sequence[int]) -> tuple[Array, Any]:
    if conv.padding_mode == "ZEROS" or 0 in x.shape:
        return x, conv.padding
    padding = conv.padding
    if isinstance(padding, str):
        windows = _dilated(conv, kernel)
        padding = jax.lax.padtype_to_pads(x.shape[1:], windows, conv.stride, padding)
    added = [(max(low, 0), max(high, 0)) for low, high in padding]
    x = jnp.pad(x, [(0, 0), *added], _PADDING_MODES[conv.padding_mode])
    return x, [(min(low, 0), min(high, 0)) for low, high in padding]


def _dilated(conv: Any, kernel: Sequence[int]) -> list[int]:
    """How many elements of each axis the dilated kernel spans."""
    return [d * (k - 1) + 1 for k, d in zip(kernel, conv.dilation, strict=True)]


class ConvTranspose(Module):
    r"""A transposed convolution: it maps the output shape of a convolution to its input
    shape.

    All arguments describe that convolution. Along one axis, with kernel size $k$,
    stride $s$, padding $(p_0, p_1)$, dilation $d$ and output padding $a$, the input is
    spread out by $s$ with zeros between, and then

    $$y_{o, i} = b_o + \sum_{c, j} W_{o, c, j}\, \tilde x_{c, i + d j},$$

    where $\tilde x$ is padded by $(d (k - 1) - p_0, d (k - 1) - p_1 + a)$. An axis of size
    $n$ becomes one of size $s (n - 1) + 1 + d (k - 1) - p_0 - p_1 + a$. Relation 14 of [A
    guide to convolution arithmetic for deep learning](https://arxiv.org/abs/1603.07285)
    (Dumoulin, Visin 2016).

    The weight has the layout of [`equinox_like.nn.Conv`][]. The exact transpose of a
    `Conv` has the weight of the `Conv`, flipped along each spatial axis, with its first
    two axes swapped; if there are groups, within each group.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        up = eqx.nn.ConvTranspose(1, 3, 8, 4, stride=2, padding=1, key=jax.random.key(0))
        assert up(jnp.ones((3, 10))).shape == (8, 20)
        ```
    """

    num_spatial_dims: int = field(static=True)
    weight: Array
    bias: Array | None
    in_channels: int = field(static=True)
    out_channels: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: str | tuple[tuple[int, int], ...] = field(static=True)
    output_padding: tuple[int, ...] = field(static=True)
    dilation: tuple[int, ...] = field(static=True)
    groups: int = field(static=True)
    use_bias: bool = field(static=True)
    padding_mode: str = field(static=True)
    preferred_element_type: np.dtype | None = field(static=True, default=None)

    _layouts = MappingProxyType({"weight": channels_first})

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        preferred_element_type: DTypeLike | None = None,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `num_spatial_dims`: the number of spatial axes.
        - `in_channels`, `out_channels`: the sizes of the input's and the output's first
            axis. Both must be multiples of `groups`.
        - `kernel_size`, `stride`, `dilation`: each an int, or one for each spatial axis.
        - `padding`: the padding of the convolution, in any form that
            [`equinox_like.nn.Conv`][] takes. With `"SAME"` and `"SAME_LOWER"` an axis of
            size `n` becomes one of size `stride * n - output_padding`.
        - `output_padding`: how much to add to the end of the output: an int, or one for
            each spatial axis, less than the stride or the dilation. (With a stride, inputs
            of several sizes have the same output size.) With `"SAME"` it is removed.
        - `groups`: the number of groups into which the input and output channels are
            divided. Each group has its own convolution. With several groups on a mesh of
            several axes, split the batch over all axes: XLA computes a wrong gradient of
            the weight otherwise.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: `"ZEROS"`; or `"CIRCULAR"`, with `"SAME"` or `"SAME_LOWER"` and no
            `output_padding`.
        - `dtype`: of the parameters; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `key`: a PRNG key for parameter initialisation.
        - `preferred_element_type`: the dtype in which the products are accumulated; by
            default that of the input.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Conv`][].

        **Raises:**

        `ValueError` for an invalid size, padding or number of groups.
        `NotImplementedError` for a padding mode that has no transpose here.
        """
        self.use_bias = use_bias
        sizes = num_spatial_dims, in_channels, out_channels, groups
        modes = padding, padding_mode, preferred_element_type
        axes = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        axes["output_padding"] = output_padding
        _configure(self, sizes, *modes, **axes)
        _check_paddings(self)
        inits = weight_init, bias_init
        self.weight, self.bias = _parameters(self, dtype, key, *inits)

    @computes("eqx.nn.ConvTranspose")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        out_sharding: PartitionSpec | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: shape `(in_channels, size_1, ..., size_n)`, of the dtype of the parameters.
        - `key`: ignored.
        - `out_sharding`: as for [`equinox_like.nn.Conv`][].

        **Returns:**

        An array of shape `(out_channels, new_size_1, ..., new_size_n)`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another rank or number of channels, if a
        spatial axis is empty, or if the padding leaves nothing of the output. `TypeError`
        if it has another dtype.
        """
        ones = (1,) * self.num_spatial_dims
        return _convolved(self, x, _padded_transposed, out_sharding, ones, self.stride)


class _ConvTransposeNd(ConvTranspose):
    """Base class of those with a fixed number of spatial axes."""

    _num_spatial_dims = 0

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        output_padding: int | Sequence[int] = 0,
        padding: Padding = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        preferred_element_type: DTypeLike | None = None,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `in_channels`, `out_channels`: the sizes of the input's and the output's first
            axis. Both must be multiples of `groups`.
        - `kernel_size`, `stride`, `dilation`: each an int, or one for each spatial axis.
        - `output_padding`: how much to add to the end of the output: an int, or one for
            each spatial axis, less than the stride or the dilation. (With a stride, inputs
            of several sizes have the same output size.) With `"SAME"` it is removed.
        - `padding`: the padding of the convolution, in any form that
            [`equinox_like.nn.Conv`][] takes. With `"SAME"` and `"SAME_LOWER"` an axis of
            size `n` becomes one of size `stride * n - output_padding`.
        - `groups`: the number of groups into which the input and output channels are
            divided. Each group has its own convolution. With several groups on a mesh of
            several axes, split the batch over all axes: XLA computes a wrong gradient of
            the weight otherwise.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: `"ZEROS"`; or `"CIRCULAR"`, with `"SAME"` or `"SAME_LOWER"` and no
            `output_padding`.
        - `dtype`: of the parameters; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `key`: a PRNG key for parameter initialisation.
        - `preferred_element_type`: the dtype in which the products are accumulated; by
            default that of the input.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Conv`][].

        **Raises:**

        `ValueError` for an invalid size, padding or number of groups.
        `NotImplementedError` for a padding mode that has no transpose here.
        """
        sizes = in_channels, out_channels, kernel_size, stride
        options = dilation, groups, use_bias, padding_mode, dtype
        super().__init__(
            self._num_spatial_dims,
            *sizes,
            padding,
            output_padding,
            *options,
            key=key,
            preferred_element_type=preferred_element_type,
            weight_init=weight_init,
            bias_init=bias_init,
        )


class ConvTranspose1d(_ConvTransposeNd, init=False):
    """A transposed convolution with one spatial axis, for sequences.

    It is a [`equinox_like.nn.ConvTranspose`][], but `output_padding` comes before
    `padding`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        up = eqx.nn.ConvTranspose1d(3, 8, 4, stride=2, padding=1, key=jax.random.key(0))
        assert up(jnp.ones((3, 10))).shape == (8, 20)
        ```
    """

    _num_spatial_dims = 1


class ConvTranspose2d(_ConvTransposeNd, init=False):
    """A transposed convolution with two spatial axes, for images.

    It is a [`equinox_like.nn.ConvTranspose`][], but `output_padding` comes before
    `padding`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        up = eqx.nn.ConvTranspose2d(3, 8, 2, stride=2, key=jax.random.key(0))
        assert up(jnp.ones((3, 5, 5))).shape == (8, 10, 10)
        ```
    """

    _num_spatial_dims = 2


class ConvTranspose3d(_ConvTransposeNd, init=False):
    """A transposed convolution with three spatial axes, for volumes.

    It is a [`equinox_like.nn.ConvTranspose`][], but `output_padding` comes before
    `padding`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        up = eqx.nn.ConvTranspose3d(3, 8, 2, stride=2, key=jax.random.key(0))
        assert up(jnp.ones((3, 2, 2, 2))).shape == (8, 4, 4, 4)
        ```
    """

    _num_spatial_dims = 3


def _check_paddings(conv: ConvTranspose) -> None:
    axes = zip(conv.output_padding, conv.stride, conv.dilation, strict=True)
    if any(added >= max(stride, dilation) for added, stride, dilation in axes):
        raise ValueError(
            f"{type(conv).__name__} takes an `output_padding` less than the stride or the "
            f"dilation; got {conv.output_padding} for the stride {conv.stride} and the "
            f"dilation {conv.dilation}."
        )
    is_same = conv.padding in ("SAME", "SAME_LOWER") and not any(conv.output_padding)
    if conv.padding_mode not in (("ZEROS", "CIRCULAR") if is_same else ("ZEROS",)):
        raise NotImplementedError(
            f"{type(conv).__name__} takes ZEROS as `padding_mode`, or CIRCULAR with a "
            "`padding` of SAME or SAME_LOWER and an `output_padding` of 0; got "
            f"{conv.padding_mode}, {conv.padding!r} and {conv.output_padding}."
        )


def _padded_transposed(
    conv: ConvTranspose, x: Array, kernel: Sequence[int]
) -> tuple[Array, Any]:
    padding = _added(conv, kernel)
    if conv.padding_mode == "CIRCULAR" and 0 not in x.shape:
        axes = list(zip(padding, conv.stride, strict=True))
        wrapped = [(low // s, high // s) for (low, high), s in axes]
        x = jnp.pad(x, [(0, 0), *wrapped], "wrap")
        padding = [(low % s, high % s) for (low, high), s in axes]
    return x, padding


def _added(conv: ConvTranspose, kernel: Sequence[int]) -> list[tuple[int, int]]:
    """The padding of each axis of the input, after it is dilated by the stride."""
    reach = [window - 1 for window in _dilated(conv, kernel)]
    if isinstance(conv.padding, str):
        axes = zip(reach, conv.stride, conv.output_padding, strict=True)
        undone = [_undone_by_word(conv.padding, *axis) for axis in axes]
    else:
        pairs = zip(conv.padding, conv.output_padding, strict=True)
        undone = [(low, high - extra) for (low, high), extra in pairs]
    return [(r - low, r - high) for r, (low, high) in zip(reach, undone, strict=True)]


def _undone_by_word(
    word: str, reach: int, stride: int, output_padding: int
) -> tuple[int, int]:
    """How much of the full padding of one axis the padding `word` removes."""
    if word == "VALID":
        return 0, -output_padding
    total = reach - stride + output_padding + 1
    if total < 0:  # more must be added than the full padding
        return 0, total
    low = (total + 1) // 2 if word == "SAME_LOWER" else total // 2
    return low, total - low
