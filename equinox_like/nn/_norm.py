"""`LayerNorm`: statistics over one whole example."""

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PRNGKeyArray

from .._module import Module, field
from .._warn import warn
from ._init import default_dtype
from ._shape import as_size, check_input, parameter_shape
from ._stateful import ABSENT


class LayerNorm(Module):
    r"""Normalises an array to mean 0 and variance 1, then scales and shifts each element.

    $$y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \odot w + b,$$

    where mean and (biased) variance run over the whole array, and $w$ and $b$ start as
    ones and zeros. From [Layer Normalization](https://arxiv.org/abs/1607.06450) (Ba,
    Kiros, Hinton 2016).

    To normalise only the last axes of an array, wrap the layer in `jax.vmap`.

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
        """
        if elementwise_affine is not None:
            use_weight = use_bias = elementwise_affine
            warn(
                "LayerNorm's `elementwise_affine` was split in two: pass `use_weight` and "
                "`use_bias` instead."
            )
        dims = shape if isinstance(shape, Sequence) else (shape,)
        dtype = default_dtype(dtype)
        self.shape = tuple(as_size(self, "shape", size) for size in dims)
        self.eps = eps
        self.use_weight = use_weight
        self.use_bias = use_bias
        self.weight = jnp.ones(self.shape, dtype) if use_weight else None
        self.bias = jnp.zeros(self.shape, dtype) if use_bias else None

    @overload
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: ArrayLike, state: Any, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, Any]: ...

    @jax.named_scope("eqx.nn.LayerNorm")
    def __call__(
        self, x: ArrayLike, state: Any = ABSENT, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: an array of shape `shape`.
        - `state`: returned untouched, so that the layer can take the place of one that
            uses it.
        - `key`: ignored.

        **Returns:**

        An array of the shape and dtype of `x`. It is computed in float32 at least. If
        `state` was passed, the pair of that array and `state`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another shape.
        """
        check_input(self, x, _wanted_shape(self))
        x = jnp.asarray(x)
        with jax.numpy_dtype_promotion("standard"):
            accumulate = jnp.result_type(x.dtype, jnp.float32)
        y = _normalise(x.astype(accumulate), self.eps)
        if self.use_weight:
            y = _cast(self.weight, accumulate) * y
        if self.use_bias:
            y = y + _cast(self.bias, accumulate)
        y = y.astype(x.dtype)
        return y if state is ABSENT else (y, state)


def _wanted_shape(norm: LayerNorm) -> tuple[int, ...]:
    if not (norm.use_weight or norm.use_bias):
        return norm.shape
    name = "weight" if norm.use_weight else "bias"
    shape = parameter_shape(norm, name, len(norm.shape))
    return norm.shape if shape is None else shape


def _normalise(x: Array, eps: float) -> Array:
    return (x - jnp.mean(x)) * jax.lax.rsqrt(jnp.var(x) + eps)


def _cast(parameter: Any, dtype: DTypeLike) -> Any:
    return parameter.astype(dtype)
