"""`Conv` for any number of spatial axes, and what it shares with `ConvTranspose`."""

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
from .._base.arguments import as_padding, as_size, check_length, per_axis, wrong_value
from .._base.init import Init, channels_first, first_values
from .._base.inputs import check_input, check_windows, jax_array, parameter_shape
from .._base.precision import computes, in_float32
from .._base.sharding import parts, placed

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

PADDING_WORDS = ("SAME", "SAME_LOWER", "VALID")
PADDING_MODES = {
    "ZEROS": "constant",
    "REFLECT": "reflect",
    "REPLICATE": "edge",
    "CIRCULAR": "wrap",
}


def configure(
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
        conv.padding = _one_of(conv, "padding", padding, PADDING_WORDS)
    else:
        conv.padding = as_padding(conv, padding, n)
    conv.groups = groups = as_size(conv, "groups", sizes[3], 1)
    for name in ("in_channels", "out_channels"):
        if getattr(conv, name) % groups != 0:
            raise ValueError(
                f"{type(conv).__name__} takes an `{name}` that is a multiple of "
                f"`groups`; got {getattr(conv, name)}, with {groups} groups."
            )
    conv.padding_mode = _one_of(conv, "padding_mode", padding_mode, PADDING_MODES)
    preferred = preferred_element_type
    conv.preferred_element_type = None if preferred is None else jnp.dtype(preferred)


def _one_of(conv: Any, name: str, value: Any, words: Collection[str]) -> str:
    if isinstance(value, str) and value.upper() in words:
        return value.upper()
    raise wrong_value(conv, f"one of {', '.join(words)}", name, value, words=words)


def conv_parameters(
    conv: Any, dtype: Any, key: PRNGKeyArray, weight_init: Any, bias_init: Any
) -> Iterator[Any]:
    """The weight and bias of a layer, whose size fields must be set before."""
    per_group = conv.in_channels // conv.groups
    limit = 1 / math.sqrt(per_group * math.prod(conv.kernel_size))
    weight = weight_init, (conv.out_channels, per_group, *conv.kernel_size)
    bias_shape = conv.out_channels, *(1,) * conv.num_spatial_dims
    bias = bias_init, bias_shape if conv.use_bias else None
    return first_values(conv, key, limit, dtype, weight=weight, bias=bias)


def convolved(
    conv: Any,
    x: ArrayLike,
    pad: Callable[[Any, Array, Sequence[int]], tuple[Array, Any]],
    out_sharding: PartitionSpec | None,
    strides: Sequence[int],
    lhs_dilation: Sequence[int],
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
        windows, pairs = dilated(conv, weight.shape[2:]), padding
        if isinstance(padding, str):
            pairs = jax.lax.padtype_to_pads(sizes, windows, strides, padding)
        check_windows(conv, x.shape, sizes, pairs, windows)
        try:
            y = jax.lax.conv_general_dilated(
                jax.lax.expand_dims(padded, (0,)),
                weight,
                strides,
                padding,
                lhs_dilation,
                rhs_dilation=conv.dilation,
                feature_group_count=conv.groups,
                preferred_element_type=conv.preferred_element_type,
            )
        except TypeError as error:
            if x.dtype == weight.dtype:
                raise
            raise TypeError(
                f"{type(conv).__name__} takes an `x` of the dtype of its weight, "
                f"{weight.dtype}; got {x.dtype}. Convert it by "
                f"`x.astype({str(weight.dtype)!r})`."
            ) from error
        y = jax.lax.squeeze(y, (0,)).astype(x.dtype)
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
        configure(self, sizes, *modes, **axes)
        inits = weight_init, bias_init
        self.weight, self.bias = conv_parameters(self, dtype, key, *inits)

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
        return convolved(self, x, _padded, out_sharding, self.stride, ones)


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
        windows = dilated(conv, kernel)
        padding = jax.lax.padtype_to_pads(x.shape[1:], windows, conv.stride, padding)
    added = [(max(low, 0), max(high, 0)) for low, high in padding]
    x = jnp.pad(x, [(0, 0), *added], PADDING_MODES[conv.padding_mode])
    return x, [(min(low, 0), min(high, 0)) for low, high in padding]


def dilated(conv: Any, kernel: Sequence[int]) -> list[int]:
    """How many elements of each axis the dilated kernel spans."""
    return [d * (k - 1) + 1 for k, d in zip(kernel, conv.dilation, strict=True)]
