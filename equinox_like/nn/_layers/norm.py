"""`LayerNorm` and `RMSNorm`: normalise a whole array.

These norms, `GroupNorm` and `InstanceNorm` compute in at least float32 for any input
dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._module import Module, field
from ..._tree import is_array
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from ..._warn import warn
from .._base.init import parameter_dtype
from .._base.precision import accumulation_dtype, computes
from .._base.shape import as_eps, as_size, check_input, jax_array, parameter_shape
from .._base.sharding import like
from .._base.stateful import ABSENT, with_state

_State = TypeVar("_State")


class LayerNorm(Module):
    r"""Normalises an array to mean 0 and variance 1, then scales and shifts each element.

    $$y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \odot w + b,$$

    where mean and (biased) variance run over the whole array, and $w$ and $b$ start as
    ones and zeros. From [Layer Normalization](https://arxiv.org/abs/1607.06450) (Ba,
    Kiros, Hinton 2016).

    To normalise only the last axes of an array, wrap the layer in `jax.vmap`. A single
    number, of shape `()` or `(1,)`, becomes 0, so that the result is $b$.

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
        *,
        elementwise_affine: bool | None = None,
    ):
        r"""**Arguments:**

        - `shape`: the shape of the input, `()` included; an int is a vector's.
        - `eps`: $\varepsilon$ above.
        - `use_weight`, `use_bias`: whether there is $w$, and whether there is $b$.
        - `dtype`: of both; by default float32, or float64 if `jax_enable_x64` is on.
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
        self.shape = _dims(self, shape)
        self.eps = as_eps(self, eps)
        self.use_weight = use_weight
        self.use_bias = use_bias
        self.weight, self.bias = parameters(
            self, self.shape, use_weight, use_bias, dtype
        )

    @overload
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: ArrayLike, state: _State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, _State]: ...

    @computes("eqx.nn.LayerNorm")
    def __call__(
        self, x: ArrayLike, state: Any = ABSENT, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: an array of shape `shape`.
        - `state`: returned unchanged, so that the layer can replace a stateful one.
        - `key`: ignored.

        **Returns:**

        An array of the shape and dtype of `x`. It is computed in float32 at least; if the
        squares are infinite there, it is NaN. If `state` was passed, the pair of that
        array and `state`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another shape.
        """
        check_input(self, x, _wanted_shape(self))
        y = _normalised(self, x, _standardise)
        return y if state is ABSENT else with_state(self, y, state)


class RMSNorm(Module):
    r"""Divides an array by its root mean square, then scales and shifts each element.

    $$y = \frac{x}{\sqrt{\mathrm{E}[|x|^2] + \varepsilon}} \odot w + b,$$

    where the mean runs over the whole array, and $w$ and $b$ start as ones and zeros. From
    [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467) (Zhang,
    Sennrich 2019), where there is no $b$: pass `use_bias=False` for that.

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
        """Arguments as for [`equinox_like.nn.LayerNorm`][]."""
        self.shape = _dims(self, shape)
        self.eps = as_eps(self, eps)
        self.use_weight = use_weight
        self.use_bias = use_bias
        self.weight, self.bias = parameters(
            self, self.shape, use_weight, use_bias, dtype
        )

    @overload
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: ArrayLike, state: _State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, _State]: ...

    @computes("eqx.nn.RMSNorm")
    def __call__(
        self, x: ArrayLike, state: Any = ABSENT, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """As for [`equinox_like.nn.LayerNorm`][]."""
        check_input(self, x, _wanted_shape(self))
        y = _normalised(self, x, _divide_by_rms)
        return y if state is ABSENT else with_state(self, y, state)


def _dims(norm: Any, shape: int | Sequence[int]) -> tuple[int, ...]:
    dims: Any = (shape,) if np.ndim(shape) == 0 else shape
    return tuple(as_size(norm, "shape", size) for size in dims)


def parameters(
    norm: Any,
    shape: tuple[int, ...],
    use_weight: bool,
    use_bias: bool,
    dtype: DTypeLike | None,
) -> tuple[Array | None, Array | None]:
    dtype = parameter_dtype(norm, dtype)
    weight = jnp.ones(shape, dtype) if use_weight else None
    return weight, jnp.zeros(shape, dtype) if use_bias else None


def _wanted_shape(norm: LayerNorm | RMSNorm) -> tuple[int, ...]:
    if not (norm.use_weight or norm.use_bias):
        return norm.shape
    name = "weight" if norm.use_weight else "bias"
    shape = parameter_shape(norm, name, len(norm.shape))
    return norm.shape if shape is None else shape


def _normalised(
    norm: LayerNorm | RMSNorm, x: ArrayLike, normalise: Callable[[Array, float], Array]
) -> Array:
    x = jax_array(x)
    accumulate = accumulation_dtype(x)
    y = normalise(cast(x, accumulate), norm.eps)
    # The flags decide, not whether the parameters are `None`.
    if norm.use_weight:
        y = like(cast(norm.weight, accumulate), y) * y
    if norm.use_bias:
        y = y + like(cast(norm.bias, accumulate), y)
    return cast(y, x.dtype)


def _standardise(x: Array, eps: float) -> Array:
    centred, factor = centred_and_factor(x, eps)
    return centred * factor


def centred_and_factor(x: Array, eps: float) -> tuple[Array, Array]:
    """`x` with a mean of 0, and the factor that makes its variance 1."""
    # With `jnp.var`, programs of many layers take three times as long to compile.
    centred = x - jnp.mean(x)
    return centred, _factor(centred, eps)


def _divide_by_rms(x: Array, eps: float) -> Array:
    return x * _factor(x, eps).astype(x.dtype)


def _factor(x: Array, eps: float) -> Array:
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
