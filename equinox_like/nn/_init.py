"""How parameters get their first values. All layers draw them here, so that one key gives
the same model everywhere."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PRNGKeyArray


def default_dtype(dtype: DTypeLike | None) -> DTypeLike:
    """`dtype`, or else JAX's default: float64 where `jax_enable_x64` is on by now."""
    return jnp.result_type(float) if dtype is None else dtype


def uniform(
    key: PRNGKeyArray, shape: Sequence[int], limit: float, dtype: DTypeLike
) -> Inexact[Array, "..."]:
    r"""A uniform draw from $[-\mathrm{limit}, \mathrm{limit})$, in each complex part."""
    shape = tuple(shape)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.uniform(key, shape, dtype, minval=-limit, maxval=limit)
    real_key, imag_key = jax.random.split(key, 2)
    component = jnp.finfo(dtype).dtype
    return jax.lax.complex(
        uniform(real_key, shape, limit, component),
        uniform(imag_key, shape, limit, component),
    )
