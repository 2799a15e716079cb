"""Arrays of 64 bits in a file, for a template with a JAX array of 32 bits.

Without `jax_enable_x64` JAX has no arrays of 64 bits, and converts those of NumPy. So a
template from `filter_eval_shape` has 32 bits where the saved model has an array of NumPy
with 64. A JAX array of 64 bits is not narrowed: the template lacks `jax_enable_x64`.
"""

from typing import Any, Final

import numpy as np
from jax.dtypes import canonicalize_dtype

# The dtypes that JAX has with `jax_enable_x64` only; `complex128` has parts of 64 bits.
WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})
_FIX: Final = "set `jax_enable_x64`, or use a template that has a NumPy array there"


def narrows_to(name: str, dtype: Any) -> bool:
    """Whether JAX converts NumPy's arrays of the dtype `name` to the narrower `dtype`."""
    return name in WIDE and name != dtype.name == canonicalize_dtype(name).name


def not_in_jax(dtype: Any) -> str | None:
    """A description of a dtype of 64 bits that JAX would convert now, else `None`."""
    if dtype.name not in WIDE or canonicalize_dtype(dtype) == dtype:
        return None
    return f"the dtype {dtype}, which JAX does not support now: {_FIX}"


def narrowed(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in a narrower dtype, or in the native byte order.

    **Raises:**

    `OverflowError` for an integer that does not fit; JAX would change it.
    """
    with np.errstate(over="ignore"):
        new = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(new, array):
        raise OverflowError(
            f"integers in the file that {new.dtype} cannot hold: {_FIX}"
        )
    return new
