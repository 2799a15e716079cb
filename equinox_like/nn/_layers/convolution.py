"""Helpers shared by `Conv` and `ConvTranspose`: they validate arguments, initialise
parameters, and do everything in a call except the padding.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.init import Init, first_values
from .._base.keys import split_key
from .._base.precision import in_float32
from .._base.shape import (
    as_padding,
    as_size,
    check_input,
    check_length,
    jax_array,
    parameter_shape,
    per_axis,
)
from .._base.sharding import parts, placed

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

PADDING_WORDS = ("SAME", "SAME_LOWER", "VALID")
PADDING_MODES = {
    "ZEROS": "constant",
    "REFLECT": "reflect",
    "REPLICATE": "edge",
    "CIRCULAR": "wrap",
}


def conv_per_axis(
    conv: Any, name: str, value: Any, minimum: int = 1
) -> tuple[int, ...]:
    values = per_axis(conv, name, value, conv.num_spatial_dims, minimum)
    check_length(conv, name, values, conv.num_spatial_dims)
    return values


def conv_padding(conv: Any, value: Any) -> str | tuple[tuple[int, int], ...]:
    if isinstance(value, str):
        return one_of(conv, "padding", value, PADDING_WORDS)
    return as_padding(conv, value, conv.num_spatial_dims)


def one_of(conv: Any, name: str, value: Any, words: Collection[str]) -> str:
    if isinstance(value, str) and value.upper() in words:
        return value.upper()
    raise ValueError(
        f"{type(conv).__name__} takes one of {', '.join(words)} as `{name}`; got "
        f"{value!r}."
    )


def conv_groups(conv: Any, value: Any) -> int:
    groups = as_size(conv, "groups", value, 1)
    for name in ("in_channels", "out_channels"):
        if getattr(conv, name) % groups != 0:
            raise ValueError(
                f"{type(conv).__name__} takes an `{name}` that is a multiple of "
                f"`groups`; got {getattr(conv, name)}, with {groups} groups."
            )
    return groups


def conv_parameters(
    conv: Any,
    dtype: DTypeLike | None,
    key: PRNGKeyArray,
    weight_init: Init | None,
    bias_init: Init | None,
) -> tuple[Array, Array | None]:
    """The weight and bias of a layer, whose size fields must be set before."""
    per_group = conv.in_channels // conv.groups
    limit = 1 / math.sqrt(per_group * math.prod(conv.kernel_size))
    weight_key, bias_key = split_key(key, 2, conv)
    first = functools.partial(first_values, conv, limit=limit, dtype=dtype)
    shape = conv.out_channels, per_group, *conv.kernel_size
    weight = first("weight", weight_init, weight_key, shape)
    shape = conv.out_channels, *(1,) * conv.num_spatial_dims
    bias = first("bias", bias_init, bias_key, shape) if conv.use_bias else None
    return weight, bias


def convolved(
    conv: Any,
    x: ArrayLike,
    pad: Callable[[Any, Array, Sequence[int]], tuple[Array, Any]],
    out_sharding: PartitionSpec | None,
    strides: Sequence[int],
    lhs_dilation: Sequence[int] | None = None,
) -> Array:
    """Calls a layer. `pad(conv, x, kernel_size)` returns `x`, padded with elements of its
    own if the mode says so, and the padding with zeros, which JAX adds."""
    _check_channels(conv, x)
    x, weight = jax_array(x), jax_array(conv.weight)

    def apply(x, weight, bias):
        padded, padding = pad(conv, x, weight.shape[2:])
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


def _check_channels(conv: Any, x: Any) -> None:
    n = conv.num_spatial_dims
    shape = parameter_shape(conv, "weight", n + 2)
    channels = None if shape is None else shape[1] * conv.groups
    check_input(conv, x, (channels,) + (None,) * n)
