"""Fills arrays with NaN, or another conspicuous value, once a check has failed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._tree.arrays import is_typed_key, with_key, without_key
from .._tree.filters import is_array


def may_depend(x: Any) -> bool:
    """Whether a leaf is an array that a program can compute, and so not a float0."""
    return is_array(x) and x.dtype != jax.dtypes.float0


def spoilt(x: Any, mode: str = "raise") -> Any:
    """An array of NaN, of the largest integer or of `True`, in the dtype of `x`."""
    if is_typed_key(x):
        if mode == "nan":
            return x
        return with_key(spoilt(without_key(x), mode), x)
    if jnp.issubdtype(x.dtype, np.inexact):
        return x + lax.full_like(x, np.nan)
    if jnp.issubdtype(x.dtype, np.integer):
        return lax.full_like(x, jnp.iinfo(x.dtype).max)
    return lax.full_like(x, True)
