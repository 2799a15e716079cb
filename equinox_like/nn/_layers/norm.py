"""Norms within one example: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm`."""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._errors import ShapeError, warn
from ..._module import Module, field
from ..._tree import is_array
from ..._typing import NOT_GIVEN, ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_eps,
    as_size,
    check_channels_first,
    check_input,
    jax_array,
    parameter_shape,
)
from .._base.init import parameter_dtype
from .._base.precision import accumulation_dtype, computes
from .._base.sharding import like
from .._base.state import check_not_key

_State = TypeVar("_State")


class _Norm(Module):
    """What the norms share: their call, which passes a `state` on, and parameters."""

    @abc.abstractmethod
    def _normalised(self, x: ArrayLike) -> Array:
        """The output, computed in a scope of the class's name."""

    @overload
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: ArrayLike, state: _State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, _State]: ...

    @computes(None)
    def __call__(
        self, x: ArrayLike, state: Any = NOT_GIVEN, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: an array of the layer's `shape`. For `GroupNorm` and `InstanceNorm` an array
            of shape `(channels, size_1, ..., size_n)`, with any number of spatial axes.
        - `state`: returned unchanged, so that the layer can replace a stateful one.
        - `key`: ignored.

        **Returns:**

        An array of the shape and dtype of `x`. It is computed in float32 at least; if the
        squares are infinite there, it is NaN. If `state` was passed, the pair of that
        array and `state`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another shape or number of channels, or
        for `GroupNorm` and `InstanceNorm` if what is normalised together is one number,
        which has no variance.
        """
        y = self._normalised(x)
        check_not_key(self, state)
        return y if state is NOT_GIVEN else (y, state)


class _ElementwiseNorm(_Norm):
    """A norm of a whole array."""

    shape: tuple[int, ...] = field(static=True)
    eps: float = field(static=True)
    use_weight: bool = field(static=True)
    use_bias: bool = field(static=True)
    weight: Array | None
    bias: Array | None

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
    ):
        """**Arguments:**

        - `shape`: the shape of the input, `()` included; an int is a vector's.
        - `eps`: added to the variance or mean square, so that nothing is divided by zero.
        - `use_weight`, `use_bias`: whether to scale, and whether to shift.
        - `dtype`: of weight and bias; by default float32, or float64 if `jax_enable_x64` is
            on.

        **Raises:**

        `ValueError` for a negative size or `eps`, or a `dtype` of integers.
        """
        dims: Any = (shape,) if np.ndim(shape) == 0 else shape
        self.shape = tuple(as_size(self, "shape", size) for size in dims)
        self.eps = as_eps(self, eps)
        self.use_weight, self.use_bias = use_weight, use_bias
        flags = use_weight, use_bias
        self.weight, self.bias = parameters(self, self.shape, *flags, dtype)

    def _computed(
        self, x: ArrayLike, normalise: Callable[[Array, float], Array]
    ) -> Array:
        name = "weight" if self.use_weight else "bias"
        shape = self.shape
        if self.use_weight or self.use_bias:
            shape = parameter_shape(self, name, len(shape)) or shape
        check_input(self, x, shape)
        x = jax_array(x)
        accumulate = accumulation_dtype(x)
        y = normalise(cast(x, accumulate), self.eps)
        # The flags decide, not whether the parameters are `None`.
        if self.use_weight:
            y = like(cast(self.weight, accumulate), y) * y
        if self.use_bias:
            y = y + like(cast(self.bias, accumulate), y)
        return cast(y, x.dtype)


class LayerNorm(_ElementwiseNorm):
    r"""Normalises an array to mean 0 and variance 1, then scales and shifts each element.

    Mean and (biased) variance run over the whole array. The weight and the bias start as
    ones and zeros. From [Layer Normalization](https://arxiv.org/abs/1607.06450) (Ba, Kiros,
    Hinton 2016).

    $$y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \odot w + b$$

    To normalise only the last axes of an array, wrap the layer in `jax.vmap`. A single
    number, of shape `()` or `(1,)`, becomes 0, so that the result is the bias.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        norm = eqx.nn.LayerNorm(4)
        y = jax.vmap(norm)(jnp.arange(8.0).reshape(2, 4))
        assert jnp.allclose(y.mean(axis=1), 0, atol=1e-6)
        ```
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        elementwise_affine: bool | None = None,
    ):
        """**Arguments:**

        - `shape`: the shape of the input, `()` included; an int is a vector's.
        - `eps`: added to the variance, so that nothing is divided by zero.
        - `use_weight`, `use_bias`: whether to scale, and whether to shift.
        - `dtype`: of weight and bias; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `elementwise_affine`: sets both `use_weight` and `use_bias`. Deprecated.

        **Raises:**

        `ValueError` for a negative size or `eps`, or a `dtype` of integers.
        """
        if elementwise_affine is not None:
            use_weight = use_bias = elementwise_affine
            warn(
                "LayerNorm's `elementwise_affine` was split in two: pass `use_weight` and "
                "`use_bias` instead."
            )
        super().__init__(shape, eps, use_weight, use_bias, dtype)

    @computes("eqx.nn.LayerNorm")
    def _normalised(self, x: ArrayLike) -> Array:
        def standardise(x: Array, eps: float) -> Array:
            centred, factor = _centred_and_factor(x, eps)
            return centred * factor

        return self._computed(x, standardise)


class RMSNorm(_ElementwiseNorm, init=False):
    r"""Divides an array by its root mean square, then scales and shifts each element.

    The mean runs over the whole array. The weight and the bias start as ones and zeros.
    From [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467) (Zhang,
    Sennrich 2019), where there is no bias: pass `use_bias=False` for that.

    $$y = \frac{x}{\sqrt{\mathrm{E}[|x|^2] + \varepsilon}} \odot w + b$$

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        norm = eqx.nn.RMSNorm(4)
        y = jax.vmap(norm)(jnp.arange(8.0).reshape(2, 4))
        assert jnp.allclose((y**2).mean(axis=1), 1, atol=1e-4)
        ```
    """

    @computes("eqx.nn.RMSNorm")
    def _normalised(self, x: ArrayLike) -> Array:
        return self._computed(x, lambda x, eps: x * _factor(x, eps).astype(x.dtype))


class GroupNorm(_Norm):
    r"""Normalises groups of channels to mean 0 and variance 1, then scales each channel.

    Mean and (biased) variance run over each group's channels and their spatial axes. The
    weight and the bias, one number for each channel, start as ones and zeros. From [Group
    Normalization](https://arxiv.org/abs/1803.08494) (Wu, He 2018).

    $$y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \odot w + b$$

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
        """**Arguments:**

        - `groups`: the number of groups into which the channels are divided.
        - `channels`: the size of the input's first axis, a multiple of `groups`. May be
            left out without `channelwise_affine`.
        - `eps`: added to the variance, so that nothing is divided by zero.
        - `channelwise_affine`: whether to scale and shift each channel.
        - `dtype`: of weight and bias; by default float32, or float64 if `jax_enable_x64` is
            on.

        **Raises:**

        `ValueError` if `channels` is not a multiple of `groups`, or is missing.
        """
        self.groups = as_size(self, "groups", groups, 1)
        _set_channels(self, channels, eps, channelwise_affine, dtype)
        if self.channels is not None and self.channels % self.groups != 0:
            raise ValueError(
                "GroupNorm takes a number of `channels` that is a multiple of "
                f"`groups`; got {self.channels}, with {self.groups} groups."
            )

    @computes("eqx.nn.GroupNorm")
    def _normalised(self, x: ArrayLike) -> Array:
        x = _as_channels_first(self, x)
        if len(x) % self.groups != 0:
            raise ShapeError(
                "GroupNorm takes an `x` whose first axis, the channels, is a multiple of "
                f"its {self.groups} groups, but was given shape {x.shape}."
            )
        return _by_groups(self, x, self.groups, "group")


class InstanceNorm(_Norm):
    r"""Normalises each channel to mean 0 and variance 1, then scales and shifts it.

    Mean and (biased) variance run over the spatial axes of each channel. The weight and
    the bias, one number for each channel, start as ones and zeros. From [Instance
    Normalization](https://arxiv.org/abs/1607.08022) (Ulyanov, Vedaldi, Lempitsky 2016),
    which has neither: pass `channelwise_affine=False` for that. It is a
    [`equinox_like.nn.GroupNorm`][] with as many groups as channels.

    $$y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \odot w + b$$

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
        """**Arguments:**

        - `channels`: the size of the input's first axis. May be left out without
            `channelwise_affine`.
        - `eps`: added to the variance, so that nothing is divided by zero.
        - `channelwise_affine`: whether to scale and shift each channel.
        - `dtype`: of weight and bias; by default float32, or float64 if `jax_enable_x64` is
            on.

        **Raises:**

        `ValueError` if `channels` is negative, or is missing.
        """
        _set_channels(self, channels, eps, channelwise_affine, dtype)

    @computes("eqx.nn.InstanceNorm")
    def _normalised(self, x: ArrayLike) -> Array:
        x = _as_channels_first(self, x)
        return _by_groups(self, x, len(x), "channel")


def parameters(
    norm: Any, shape: tuple[int, ...], use_weight: bool, use_bias: bool, dtype: Any
) -> tuple[Array | None, Array | None]:
    dtype = parameter_dtype(norm, dtype)
    weight = jnp.ones(shape, dtype) if use_weight else None
    return weight, jnp.zeros(shape, dtype) if use_bias else None


def _set_channels(
    norm: Any, channels: int | None, eps: float, affine: bool, dtype: Any
) -> None:
    if channels is None and affine:
        raise ValueError(
            f"{type(norm).__name__} needs to know `channels` for its weight and bias: pass "
            "it, or `channelwise_affine=False`."
        )
    norm.channels = None if channels is None else as_size(norm, "channels", channels)
    norm.eps = as_eps(norm, eps)
    norm.channelwise_affine = affine
    shape = (norm.channels or 0,)
    norm.weight, norm.bias = parameters(norm, shape, affine, affine, dtype)


def _as_channels_first(norm: GroupNorm | InstanceNorm, x: Any) -> Array:
    channels = norm.channels
    if norm.channelwise_affine:
        (channels,) = parameter_shape(norm, "weight", 1) or (channels,)
    check_channels_first(norm, x, channels)
    return jax_array(x)


def _by_groups(
    norm: GroupNorm | InstanceNorm, x: Array, groups: int, part: str
) -> Array:
    shape = groups, len(x) // max(groups, 1)
    if shape[1] * math.prod(x.shape[1:]) == 1:
        raise ShapeError(
            f"{type(norm).__name__} takes an `x` of shape (channels, size_1, ..., size_n) "
            f"with more than one number in each {part}, but was given shape {x.shape}."
        )
    grouped = x.astype(accumulation_dtype(x)).reshape(*shape, *x.shape[1:])
    centred, factor = _of_groups(grouped, norm.eps)
    y = centred.reshape(x.shape)
    ones = (1,) * (x.ndim - 1)
    factor = jnp.expand_dims(factor, range(1, x.ndim + 1))
    factor = jnp.broadcast_to(factor, (*shape, *ones)).reshape(len(x), *ones)

    def per_channel(parameter: Any) -> Any:
        return like(cast(parameter, y.dtype).reshape(-1, *ones), y)

    # The flag decides, not whether the parameters are `None`.
    if norm.channelwise_affine:
        # First the product of two numbers of each channel, which are few.
        factor = per_channel(norm.weight) * factor
        return (y * factor + per_channel(norm.bias)).astype(x.dtype)
    return (y * factor).astype(x.dtype)


# Compiled, inline in a program of the user's: otherwise, each operation is a call.
@functools.partial(jax.jit, inline=True)
def _centred_and_factor(x: Array, eps: ArrayLike) -> tuple[Array, Array]:
    """`x` with a mean of 0, and the factor that makes its variance 1."""
    # With `jnp.var`, programs of many layers take three times as long to compile.
    centred = x - jnp.mean(x)
    return centred, _factor(centred, eps)


_of_groups: Final[Any] = jax.jit(jax.vmap(_centred_and_factor, (0, None)), inline=True)


@functools.partial(jax.jit, inline=True)
def _factor(x: Array, eps: ArrayLike) -> Array:
    return jax.lax.rsqrt(nan_if_infinite(jnp.mean(squared(x)) + eps))


def nan_if_infinite(x: Array) -> Array:
    """`x`, with NaN for infinity. The sum of squares of numbers near 1e20 is infinite in
    float32, and numbers divided by its root would be 0, silently."""
    return x + jax.lax.stop_gradient(x - x)


def squared(x: Array) -> Array:
    """The square of the absolute value, which is real."""
    return (x * x.conj()).real if jnp.iscomplexobj(x) else x * x


def cast(x: Any, dtype: DTypeLike) -> Any:
    # A cast that changes nothing is skipped, because it takes time to trace. An object
    # in place of an array, such as `Frozen`, becomes an array.
    return x if is_array(x) and x.dtype == dtype else jax_array(x).astype(dtype)
