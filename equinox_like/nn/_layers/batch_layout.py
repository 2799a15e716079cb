"""The batch axis and the channel axis of the input of a `BatchNorm`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ..._errors import ShapeError
from ..._typing import ArrayLike
from .._base.inputs import check_channels_first, check_input, jax_array, parameter_shape
from .._base.sharding import like


class Layout(NamedTuple):
    """The channel axis of an input, and a mask of the examples that count."""

    ndim: int
    channel_axis: int
    # It can be broadcast against the input; `None` if all examples count.
    mask: Array | None

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.ndim) if i != self.channel_axis)

    def spread(self, per_channel: Array, x: Array) -> Array:
        shape = [1] * self.ndim
        shape[self.channel_axis] = -1
        return like(per_channel.reshape(shape), x)


def laid_out(
    norm: Any, x: ArrayLike, mask: Any, inference: bool
) -> tuple[Array, Layout]:
    channels = norm.input_size
    if norm.channelwise_affine:
        (channels,) = parameter_shape(norm, "weight", 1) or (channels,)
    batch_axis = norm.batch_axis
    if batch_axis is None or (inference and _is_one_example(norm, x, mask, channels)):
        spatial = norm.num_spatial_dims
        if spatial is None:
            check_channels_first(norm, x, channels)
        else:
            check_input(norm, x, (channels,) + (None,) * spatial)
        x = jax_array(x)
        layout = Layout(x.ndim, 0, None)
        wanted, spread = (), ()
    else:
        x = _checked_batch(norm, x, batch_axis, channels)
        batch_axis %= x.ndim
        layout = Layout(x.ndim, 1 if batch_axis == 0 else 0, None)
        wanted = (x.shape[batch_axis],)
        spread = tuple(-1 if i == batch_axis else 1 for i in range(x.ndim))
    if mask is None:
        return x, layout
    check_input(norm, mask, wanted, "mask")
    return x, layout._replace(mask=jax_array(mask).astype(bool).reshape(spread))


def _is_one_example(norm: Any, x: Any, mask: Any, channels: int) -> bool:
    """Whether `x`, at inference, has no batch axis."""
    shape, batch_axis = jnp.shape(x), norm.batch_axis
    if norm.num_spatial_dims is not None:
        return len(shape) == norm.num_spatial_dims + 1
    if mask is not None:
        return jnp.shape(mask) == ()
    if len(shape) < 2:
        return True
    if batch_axis % len(shape) != 0:
        # The channels come first in a batch and in one example, so they cannot decide.
        return False
    if shape[:2] == (channels, channels) and channels > 1:
        raise ShapeError(
            f"BatchNorm was given shape {shape} at inference, with {channels} "
            f"channels. That may be a batch of {channels} examples, or one example. "
            f"Build the layer with `num_spatial_dims={len(shape) - 2}` if it is a "
            f"batch, or `num_spatial_dims={len(shape) - 1}` if it is one example."
        )
    return shape[0] == channels != shape[1]


def _checked_batch(norm: Any, x: Any, batch_axis: int, channels: int) -> Array:
    shape = jnp.shape(x)
    ndim = len(shape)
    in_range = ndim >= 2 and -ndim <= batch_axis < ndim
    channel_axis = 1 if in_range and batch_axis % ndim == 0 else 0
    spatial = norm.num_spatial_dims
    is_example = in_range and shape[channel_axis] != channels == shape[0]
    if spatial is not None:
        is_example = ndim == spatial + 1
    if is_example or not in_range:
        has_name = norm.axis_name is not None
        form = "with `batch_axis`" if has_name else "without an `axis_name`"
        raise ShapeError(
            f"BatchNorm {form} takes a whole batch in training, with its "
            f"examples along axis {batch_axis} and {channels} channels along the next, "
            f"but was given shape {shape}. Add a batch axis. Or, under a `jax.vmap` over "
            "the examples, name its axis: "
            f'`BatchNorm({channels}, axis_name="batch", mode="batch")`, called under '
            '`jax.vmap(..., axis_name="batch")`.'
        )
    wanted: list[int | None] = [None] * (ndim if spatial is None else spatial + 2)
    wanted[channel_axis] = channels
    check_input(norm, x, wanted)
    return jax_array(x)
