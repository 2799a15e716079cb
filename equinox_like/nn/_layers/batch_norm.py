"""`BatchNorm`: statistics over the batch, and running averages of them for inference."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._compat.axes import pmean, psum
from ..._errors import ShapeError, warn
from ..._module import field
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_axis,
    as_eps,
    as_number,
    as_size,
    check_channels_first,
    check_input,
    jax_array,
    parameter_shape,
    wrong_value,
)
from .._base.init import parameter_dtype
from .._base.precision import accumulation_dtype, computes, saturated
from .._base.sharding import explicit_mesh, like, parts, placed
from .._base.state import State, StatefulLayer, StateIndex, at_inference, check_state
from .norm import nan_if_infinite, parameters, squared

_Mode = Literal["batch", "ema", "legacy"]


class BatchNorm(StatefulLayer):
    r"""Normalises each channel to mean 0 and variance 1 over the batch.

    In training the layer also keeps running averages of mean and variance, in a
    [`equinox_like.nn.State`][], and uses these at inference. From [Batch
    Normalization](https://arxiv.org/abs/1502.03167) (Ioffe, Szegedy 2015).

    $$y = \frac{x - \mu}{\sqrt{v + \varepsilon}} \odot w + b,$$

    where $\mu$ and $v$ are mean and (biased) variance of a channel over the batch and the
    spatial axes, and $w$ and $b$ start as ones and zeros.

    Of the two modes, `"batch"` is the one of that paper: the batch's own statistics
    normalise in training. The running averages start at 0 and 1; inference corrects for
    this bias, as in [Adam](https://arxiv.org/abs/1412.6980) (Kingma, Ba 2015), by the
    number of steps in `state.get(norm.batch_counter)`. In mode `"ema"` training
    normalises by the running averages, too, after the batch has updated them.

    Without an `axis_name` the layer takes a whole batch at once:

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3)
        y, state = norm(jax.random.normal(jax.random.key(0), (8, 3)), state)
        assert jnp.allclose(y.mean(axis=0), 0, atol=1e-5)
        ```

    With one, it takes an example at a time, under a `jax.vmap` of that name:

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
        apply = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = apply(jax.random.normal(jax.random.key(0), (8, 3)), state)
        assert jnp.allclose(y.mean(axis=0), 0, atol=1e-5)
        y, _ = norm(jnp.ones(3), state, inference=True)
        ```
    """

    weight: Array | None
    bias: Array | None
    ema_first_time_index: StateIndex[Any] | None
    ema_state_index: StateIndex[Any] | None
    batch_counter: StateIndex[Any] | None
    batch_state_index: StateIndex[Any] | None
    axis_name: Any
    inference: bool | Array | None
    input_size: int = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    momentum: float = field(static=True)
    mode: Literal["batch", "ema"] = field(static=True)
    batch_axis: int | None = field(static=True)
    debias: Literal["exact", "peer"] = field(static=True)
    unbiased: bool = field(static=True)
    num_spatial_dims: int | None = field(static=True, default=None)

    def __init__(
        self,
        input_size: int,
        axis_name: Hashable | Sequence[Hashable] | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        inference: bool | None = False,
        dtype: DTypeLike | None = None,
        mode: _Mode = "legacy",
        *,
        batch_axis: int | None = None,
        debias: Literal["exact", "peer"] = "exact",
        unbiased: bool = False,
        num_spatial_dims: int | None = None,
    ):
        """**Arguments:**

        - `input_size`: the number of channels.
        - `axis_name`: the name of the `jax.vmap` (or `pmap`, or `shard_map`) over the
            batch, or a sequence of several. By default there is none.
        - `eps`: added to the variance, so that nothing is divided by zero.
        - `channelwise_affine`: whether to scale and shift each channel.
        - `momentum`: the part of a running average that is kept at each step. (PyTorch's
            `momentum` is 1 minus this.)
        - `inference`: if `True`, the layer uses the running averages and does not update
            them. If `None`, [`equinox_like.inference`][] and [`equinox_like.training`][]
            decide.
        - `dtype`: of parameters and state; by default float32, or float64 if
            `jax_enable_x64` is on. In half precision the running averages are inaccurate:
            with a `momentum` near 1, one step changes less than they can resolve.
        - `mode`: `"batch"` or `"ema"`, see the class. By default `"batch"` without an
            `axis_name`; with one `"ema"`, as in Equinox, and a warning.
        - `batch_axis`: the axis of the input that is the batch; the first of the others is
            that of the channels. By default 0 without an `axis_name`, and none with one. If
            both are given, the statistics run over both.
        - `debias`: `"exact"`, or `"peer"` for the values of Equinox, which ignores
            that the running variance starts at 1.
        - `unbiased`: whether to store the variance times `n / (n - 1)`, where `n` is the
            number of elements of each channel.
        - `num_spatial_dims`: the number of spatial axes of an example. Only used without an
            `axis_name`, to distinguish a batch from one example at inference. Without it
            the shape must tell: `(4, 4, 4)` is an error, because it may be a batch of 4
            examples with 4 channels, or one example.

        **Raises:**

        `ValueError` for another `mode` or `debias`, a negative `eps` or
        `num_spatial_dims`, a `momentum` outside of 0 to 1, or a `batch_axis` that is not
        an integer.
        """
        self.mode = _checked_mode(mode, axis_name)
        if debias not in ("exact", "peer"):
            raise wrong_value(self, "'exact' or 'peer'", "debias", debias)
        self.input_size = as_size(self, "input_size", input_size)
        self.axis_name = axis_name
        self.eps = as_eps(self, eps)
        self.channelwise_affine = channelwise_affine
        self.momentum = as_number(
            self, "momentum", momentum, "a number from 0 to 1", lambda x: 0 <= x <= 1
        )
        self.inference = inference
        if batch_axis is None and axis_name is None:
            batch_axis = 0
        if batch_axis is not None:
            batch_axis = as_axis(self, "batch_axis", batch_axis)
        self.batch_axis = batch_axis
        self.debias = debias
        self.unbiased = unbiased
        if num_spatial_dims is not None:
            num_spatial_dims = as_size(self, "num_spatial_dims", num_spatial_dims)
        self.num_spatial_dims = num_spatial_dims

        dtype, shape = parameter_dtype(self, dtype), (self.input_size,)
        affine = channelwise_affine, channelwise_affine
        self.weight, self.bias = parameters(self, shape, *affine, dtype)
        self.ema_first_time_index = self.ema_state_index = None
        self.batch_counter = self.batch_state_index = None
        # Each is an array of its own, so that the state can be donated.
        mean = jnp.zeros(shape, dtype)
        if self.mode == "ema":
            self.ema_first_time_index = StateIndex(jnp.array(True))
            self.ema_state_index = StateIndex((mean, jnp.zeros(shape, dtype)))
        else:
            # Not `jnp.array(0)`, whose weak type makes the sum with 1 an int64 once
            # `jax_enable_x64` is set.
            self.batch_counter = StateIndex(jnp.zeros((), int))
            self.batch_state_index = StateIndex((mean, jnp.ones(shape, dtype)))

    @computes("eqx.nn.BatchNorm")
    def __call__(
        self,
        x: ArrayLike,
        state: State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        mask: ArrayLike | None = None,
    ) -> tuple[Array, State]:
        """**Arguments:**

        - `x`: with an `axis_name`, one example of shape `(channels, size_1, ..., size_n)`.
            Without one, a batch of such; at inference, a batch or one example (see
            `num_spatial_dims`).
        - `state`: from [`equinox_like.nn.make_with_state`][], or the last call.
        - `key`: ignored.
        - `inference`: overrides the layer's own, unless it is `None`.
        - `mask`: which examples count for the statistics: shape `(batch,)`, or `()` for one
            example. The others are normalised, too, with 0 in place of their infinities and
            NaN. If at most one number of each channel counts, or the batch is empty, the
            state does not change, and the running averages are used.

        **Returns:**

        The pair of an array of the shape of `x`, of the dtype to which JAX promotes those
        of `x` and the parameters, and the new state. It is computed in float32 at least.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x`, `mask` or a value of the state has another
        shape, if `x` may be a batch or one example, or if in training, in mode `"batch"`, a
        batch without a mask has one number of each channel, which has no variance.
        `NameError` in training if there is no `jax.vmap` of the `axis_name`, and
        `ValueError` for a complex `x` if the running averages are real. `TypeError` if
        `state` is not a [`equinox_like.nn.State`][].
        """
        check_state(self, state)
        for_inference = bool(at_inference(self, inference))
        x, channel = _laid_out(self, x, mask, for_inference)
        of_steps, of_averages = _indices(self)
        running = _Running(state.get(of_steps), *state.get(of_averages))
        _check_running(running, x.shape[channel.axis])
        stored = running.mean.dtype
        is_complex = jnp.issubdtype(stored, jnp.complexfloating)
        if not for_inference and jnp.iscomplexobj(x) and not is_complex:
            raise ValueError(
                f"BatchNorm was given {x.dtype} in training, but its running averages are "
                f"{stored}, which would drop the imaginary part of the mean. Build it with "
                f"`dtype=jnp.{x.dtype}`."
            )
        # Under a `Policy` the parameters are cast, but the state is not. So a layer without
        # parameters has only a kind of number, which JAX promotes as a Python scalar.
        kind = complex if is_complex else float
        own = kind if self.weight is None else jax_array(self.weight).dtype
        work = accumulation_dtype(x, running.mean)
        with jax.numpy_dtype_promotion("standard"):
            out_dtype = jnp.result_type(x.dtype, own)
        x = x.astype(work)
        if channel.mask is not None:
            # The gradient of what does not count is zero, and zero times NaN is NaN.
            x = jnp.where(channel.mask | jnp.isfinite(x), x, 0)
        running = running.astype(work)
        count: Any = None if for_inference else _count(self, x, channel)
        known = count if isinstance(count, int) else None
        if known == 1 and self.mode == "batch":
            raise ShapeError(
                "BatchNorm takes more than one number of each channel in training, but "
                f"was given one, in an `x` of shape {x.shape}. It is always normalised to "
                "0. Pass a larger batch, or `inference=True`."
            )
        if for_inference or known == 0:
            used = _for_inference(self, running)
        else:
            batch = _batch_moments(self, x, channel, count)
            used, new = _blend(self, running, batch, count)
            if mask is not None:
                # A single number has no variance: the running averages are used and kept.
                used = _where(count > 1, used, _for_inference(self, running))
                new = _where(count > 1, new, running)
            steps, *averages = new.astype(stored)
            state = state.set(of_steps, steps).set(of_averages, tuple(averages))
        variance = channel.spread(used.variance, x) + jnp.asarray(self.eps, work)
        y = (x - channel.spread(used.mean, x)) / jnp.sqrt(variance)
        if self.channelwise_affine:
            # The flag decides, not whether the parameters are `None`.
            weight, bias = jax_array(self.weight), jax_array(self.bias)
            y = channel.spread(weight.astype(work), y) * y
            y = y + channel.spread(bias.astype(work), y)
        return y.astype(out_dtype), state


def _checked_mode(mode: _Mode, axis_name: Any) -> Literal["batch", "ema"]:
    if mode not in ("batch", "ema", "legacy"):
        raise wrong_value("BatchNorm", "'batch' or 'ema'", "mode", mode)
    if mode != "legacy":
        return mode
    if axis_name is None:
        return "batch"
    warn(
        "BatchNorm's `mode` is 'ema' by default. Pass `mode='batch'`, which is the "
        "usual way to normalise, or `mode='ema'` to keep the default."
    )
    return "ema"


class _ChannelAxis(NamedTuple):
    """The channel axis of an input, the others, and a mask of the examples that count."""

    axis: int
    others: tuple[int, ...]
    # It can be broadcast against the input; `None` if all examples count.
    mask: Array | None

    def spread(self, per_channel: Array, x: Array) -> Array:
        return like(jax.lax.expand_dims(per_channel, self.others), x)


def _laid_out(
    norm: Any, x: ArrayLike, mask: Any, inference: bool
) -> tuple[Array, _ChannelAxis]:
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
        x, axis = jax_array(x), 0
        wanted, spread = (), ()
    else:
        x = _checked_batch(norm, x, batch_axis, channels)
        batch_axis %= x.ndim
        axis = 1 if batch_axis == 0 else 0
        wanted = (x.shape[batch_axis],)
        spread = tuple(-1 if i == batch_axis else 1 for i in range(x.ndim))
    if mask is not None:
        check_input(norm, mask, wanted, "mask")
        mask = jax_array(mask).astype(bool).reshape(spread)
    others = tuple(i for i in range(x.ndim) if i != axis)
    return x, _ChannelAxis(axis, others, mask)


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
        raise ShapeError(
            "BatchNorm takes a whole batch in training, with its examples along axis "
            f"{batch_axis} and {channels} channels along the next, but was given shape "
            f"{shape}. Add a batch axis. Or, under a `jax.vmap`, name its axis: "
            f'`BatchNorm({channels}, axis_name="batch", mode="batch")`, called under '
            '`jax.vmap(..., axis_name="batch")`.'
        )
    wanted: list[int | None] = [None] * (ndim if spatial is None else spatial + 2)
    wanted[channel_axis] = channels
    check_input(norm, x, wanted)
    return jax_array(x)


class _Running(NamedTuple):
    """The values in the state. `steps` is the number of steps in mode "batch", and
    whether this is the first step in mode "ema"."""

    steps: Array
    mean: Array
    variance: Array

    def astype(self, dtype: Any) -> "_Running":
        mean, variance = saturated(self.mean, dtype), saturated(self.variance, dtype)
        return _Running(self.steps, mean, variance)


class _Moments(NamedTuple):
    mean: Array
    variance: Array


def _where(condition: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _indices(norm: Any) -> tuple[StateIndex[Any], StateIndex[Any]]:
    """The places in the state of `steps`, and of the mean and variance."""
    if norm.mode == "ema":
        return norm.ema_first_time_index, norm.ema_state_index
    return norm.batch_counter, norm.batch_state_index


def _check_running(running: _Running, channels: int) -> None:
    if running.mean.ndim != 1:
        raise ShapeError(
            "BatchNorm takes a `state` whose running averages have shape (channels,); got "
            f"shape {running.mean.shape}. If an earlier call was mapped over the batch, "
            "do not map the state: `jax.vmap(model, axis_name=..., in_axes=(0, None), "
            "out_axes=(0, None))`. If the layer is an ensemble, map it as well."
        )
    if running.mean.shape != (channels,):
        raise ShapeError(
            f"BatchNorm was given {channels} channels, but the running averages in "
            f"`state` have shape {running.mean.shape}. If you changed the size of the "
            "layer, change its part of the state as well: `state.update(jax.tree.map("
            "lambda a: a[keep] if a.ndim else a, state.substate(norm)))`, where `keep` "
            "are the channels that are left."
        )


def _for_inference(norm: BatchNorm, running: _Running) -> _Moments:
    if norm.mode == "ema":
        return _Moments(running.mean, running.variance)
    left = norm.momentum ** running.steps.astype(running.mean.real.dtype)
    # Before the first step, and with a momentum of 1, there is no average yet.
    started = left < 1
    divisor = jnp.where(started, 1 - left, 1).astype(running.mean.dtype)
    variance = running.variance
    if norm.debias == "exact":
        variance = jnp.where(started, variance - left.astype(variance.dtype), variance)
        # Rounding may leave a little less than 0.
        variance = jnp.maximum(variance.real, 0).astype(variance.dtype)
    return _Moments(running.mean / divisor, variance / divisor)


def _count(norm: BatchNorm, x: Array, channel: _ChannelAxis) -> Any:
    """How many numbers of each channel count; an array only if there is a mask."""
    size = math.prod(x.shape[i] for i in channel.others)
    if channel.mask is not None:
        # In floats, since a large batch has more numbers than an int32 can count.
        counted = channel.mask.sum(dtype=x.real.dtype)
        size = counted * (size // max(channel.mask.size, 1))
    return _over_names(psum, size, norm)


def _batch_moments(
    norm: BatchNorm, x: Array, channel: _ChannelAxis, count: Any
) -> _Moments:
    """The mean and variance of each channel, over the whole batch."""

    def mean(values: Array) -> Array:
        if channel.mask is None:
            return _over_names(pmean, jnp.mean(values, channel.others), norm)
        total = jnp.sum(jnp.where(channel.mask, values, 0), channel.others)
        total = _over_names(psum, total, norm)
        return total / jnp.maximum(count, 1).astype(total.real.dtype)

    center = mean(x)
    off = x - channel.spread(center, x)
    variance = jnp.maximum(nan_if_infinite(mean(squared(off))), 0).astype(x.dtype)
    return _Moments(center, variance)


def _over_names(reduce: Any, x: Any, norm: BatchNorm) -> Any:
    names = norm.axis_name
    if names is None:
        return x
    names = tuple(names) if isinstance(names, list) else names
    try:
        if explicit_mesh(x) is None:
            return reduce(x, names)
        # By itself JAX would give the result the sharding of the batch, whose spec has
        # too many entries for it.
        return placed(lambda x: reduce(x, names), PartitionSpec(*parts(x)), x)
    except NameError as error:
        raise NameError(
            f"In training, BatchNorm computes its statistics over the axis {names!r}, "
            "but there is no such axis here. Call it under `jax.vmap(..., "
            f"axis_name={names!r}, in_axes=(0, None), out_axes=(0, None))`, or with "
            "`inference=True`."
        ) from error


def _blend(
    norm: BatchNorm, running: _Running, batch: _Moments, count: Any
) -> tuple[_Moments, _Running]:
    """The moments that normalise the batch, and the next running averages."""
    is_ema = norm.mode == "ema"
    to_store = batch.variance
    if norm.unbiased:
        count = jnp.asarray(count, to_store.real.dtype)
        to_store = to_store * jnp.where(count > 1, count / jnp.maximum(count - 1, 1), 1)

    # Rounded first, or the weights of old and new might not sum to 1: in float32, they
    # do not for 0.9999 and 1 - 0.9999, and the averages would be off by 2e-4.
    dtype = running.mean.real.dtype
    momentum = float(np.asarray(norm.momentum, dtype))

    def average(old: Array, new: Array) -> Array:
        blended = momentum * old + (1 - momentum) * new
        # In mode "ema" the average starts from the first batch.
        return jnp.where(running.steps, new, blended) if is_ema else blended

    mean = average(running.mean, batch.mean)
    variance = average(running.variance, to_store)
    if not is_ema:
        used = _Moments(batch.mean, batch.variance)
        return used, _Running(running.steps + 1, mean, variance)
    used = _Moments(mean, average(running.variance, batch.variance))
    return used, _Running(jnp.zeros_like(running.steps), mean, variance)
