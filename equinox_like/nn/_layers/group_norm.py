"""`GroupNorm` and `InstanceNorm`: normalise channels within one example."""

import math
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._errors import ShapeError
from ..._module import Module, field
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.precision import accumulation_dtype, computes
from .._base.shape import (
    as_eps,
    as_size,
    check_channels_first,
    jax_array,
    parameter_shape,
)
from .._base.sharding import like
from .._base.stateful import ABSENT, with_state
from .norm import cast, centred_and_factor, parameters

_State = TypeVar("_State")


class GroupNorm(Module):
    r"""Normalises groups of channels to mean 0 and variance 1, then scales each channel.

    $$y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \odot w + b,$$

    where mean and (biased) variance run over each group's channels and their spatial axes,
    and $w$ and $b$, one number for each channel, start as ones and zeros. From [Group
    Normalization](https://arxiv.org/abs/1803.08494) (Wu, He 2018).

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        norm = eqx.nn.GroupNorm(groups=2, channels=6)
        y = norm(jnp.arange(24.0).reshape(6, 2, 2))
        assert jnp.allclose(y[:3].mean(), 0, atol=1e-6)
        ```
    """

    groups: int = field(static=True)
    channels: int | None = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    weight: Array | None
    bias: Array | None

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        dtype: DTypeLike | None = None,
    ):
        r"""**Arguments:**

        - `groups`: the number of groups into which the channels are divided.
        - `channels`: the size of the input's first axis, a multiple of `groups`. May be
            left out without `channelwise_affine`.
        - `eps`: $\varepsilon$ above.
        - `channelwise_affine`: whether there are $w$ and $b$.
        - `dtype`: of both; by default float32, or float64 if `jax_enable_x64` is on.

        **Raises:**

        `ValueError` if `channels` is not a multiple of `groups`, or is missing.
        """
        self.groups = as_size(self, "groups", groups, 1)
        self.channels = _channels(self, channels, channelwise_affine)
        self.eps = as_eps(self, eps)
        self.channelwise_affine = channelwise_affine
        if self.channels is not None and self.channels % self.groups != 0:
            raise ValueError(
                "GroupNorm takes a number of `channels` that is a multiple of "
                f"`groups`; got {self.channels}, with {self.groups} groups."
            )
        shape = (self.channels or 0,)
        affine = channelwise_affine, channelwise_affine
        self.weight, self.bias = parameters(self, shape, *affine, dtype)

    @overload
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: ArrayLike, state: _State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, _State]: ...

    @computes("eqx.nn.GroupNorm")
    def __call__(
        self, x: ArrayLike, state: Any = ABSENT, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: shape `(channels, size_1, ..., size_n)`, with any number of spatial axes.
        - `state`: returned unchanged, so that the layer can replace a stateful one.
        - `key`: ignored.

        **Returns:**

        An array of the shape and dtype of `x`. It is computed in float32 at least. If
        `state` was passed, the pair of that array and `state`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another number of channels, or one number
        in each group, which has no variance.
        """
        _check_channels(self, x)
        x = jax_array(x)
        per_group = len(x) // self.groups * math.prod(x.shape[1:])
        _require_variance(self, x, "group", per_group)
        y = _normalised(self, x, self.groups)
        return y if state is ABSENT else with_state(self, y, state)


class InstanceNorm(Module):
    r"""Normalises each channel to mean 0 and variance 1, then scales and shifts it.

    $$y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \odot w + b,$$

    where mean and (biased) variance run over the spatial axes of each channel, and $w$ and
    $b$, one number for each channel, start as ones and zeros. From [Instance
    Normalization](https://arxiv.org/abs/1607.08022) (Ulyanov, Vedaldi, Lempitsky 2016),
    where there are no $w$ and $b$: pass `channelwise_affine=False` for that. It is a
    [`equinox_like.nn.GroupNorm`][] with as many groups as channels.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        norm = eqx.nn.InstanceNorm(3)
        y = norm(jnp.arange(12.0).reshape(3, 2, 2))
        assert jnp.allclose(y.mean(axis=(1, 2)), 0, atol=1e-6)
        ```
    """

    channels: int | None = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    weight: Array | None
    bias: Array | None

    def __init__(
        self,
        channels: int | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        dtype: DTypeLike | None = None,
    ):
        r"""**Arguments:**

        - `channels`: the size of the input's first axis. May be left out without
            `channelwise_affine`.
        - `eps`: $\varepsilon$ above.
        - `channelwise_affine`: whether there are $w$ and $b$.
        - `dtype`: of both; by default float32, or float64 if `jax_enable_x64` is on.

        **Raises:**

        `ValueError` if `channels` is negative, or is missing.
        """
        self.channels = _channels(self, channels, channelwise_affine)
        self.eps = as_eps(self, eps)
        self.channelwise_affine = channelwise_affine
        affine = channelwise_affine, channelwise_affine
        self.weight, self.bias = parameters(self, (self.channels or 0,), *affine, dtype)

    @overload
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: ArrayLike, state: _State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, _State]: ...

    @computes("eqx.nn.InstanceNorm")
    def __call__(
        self, x: ArrayLike, state: Any = ABSENT, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: shape `(channels, size_1, ..., size_n)`, with one spatial axis or more.
        - `state`: returned unchanged, so that the layer can replace a stateful one.
        - `key`: ignored.

        **Returns:**

        An array of the shape and dtype of `x`. It is computed in float32 at least. If
        `state` was passed, the pair of that array and `state`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another number of channels, or fewer
        than two numbers in each, which have no variance.
        """
        _check_channels(self, x)
        x = jax_array(x)
        _require_variance(self, x, "channel", math.prod(x.shape[1:]))
        y = _normalised(self, x, len(x))
        return y if state is ABSENT else with_state(self, y, state)


def _require_variance(norm: Any, x: Array, part: str, number: int) -> None:
    if number == 1:
        raise ShapeError(
            f"{type(norm).__name__} takes an `x` of shape (channels, size_1, ..., size_n) "
            f"with more than one number in each {part}, but was given shape "
            f"{np.shape(x)}. A single number is always normalised to 0."
        )


def _channels(norm: Any, channels: int | None, affine: bool) -> int | None:
    if channels is not None:
        return as_size(norm, "channels", channels)
    if affine:
        raise ValueError(
            f"{type(norm).__name__} needs to know `channels` for its weight and bias: pass "
            "it, or `channelwise_affine=False`."
        )
    return None


def _check_channels(norm: GroupNorm | InstanceNorm, x: Any) -> None:
    channels = norm.channels
    if norm.channelwise_affine:
        shape = parameter_shape(norm, "weight", 1)
        channels = channels if shape is None else shape[0]
    check_channels_first(norm, x, channels)
    if isinstance(norm, GroupNorm) and np.shape(x)[0] % norm.groups != 0:
        raise ShapeError(
            f"GroupNorm takes an `x` whose first axis, the channels, is a multiple of its "
            f"{norm.groups} groups, but was given shape {np.shape(x)}."
        )


def _normalised(norm: GroupNorm | InstanceNorm, x: Array, groups: int) -> Array:
    shape = groups, len(x) // max(groups, 1)
    grouped = x.astype(accumulation_dtype(x)).reshape(*shape, *x.shape[1:])
    centred, factor = jax.vmap(lambda group: centred_and_factor(group, norm.eps))(
        grouped
    )
    y = centred.reshape(x.shape)
    ones = (1,) * (x.ndim - 1)
    factor = jnp.expand_dims(factor, range(1, x.ndim + 1))
    factor = jnp.broadcast_to(factor, (*shape, *ones)).reshape(len(x), *ones)
    # The flag decides, not whether the parameters are `None`.
    if norm.channelwise_affine:
        # First the product of two numbers of each channel, which are few.
        factor = _per_channel(norm.weight, y) * factor
        return (y * factor + _per_channel(norm.bias, y)).astype(x.dtype)
    return (y * factor).astype(x.dtype)


def _per_channel(parameter: Any, y: Array) -> Any:
    spread = cast(parameter, y.dtype).reshape((-1,) + (1,) * (y.ndim - 1))
    return like(spread, y)
