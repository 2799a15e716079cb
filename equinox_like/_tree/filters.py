"""Filters for one leaf: whether it is an array, and whether it can be differentiated.

The filters decide what every transformation traces. So they depend on the type and the
dtype alone, never on a value.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_array(element: Any) -> bool:
    """Whether `element` is a JAX or NumPy array.

    `True` for a `jax.Array` (tracers and typed PRNG keys included), a `numpy.ndarray` of
    any dtype and a NumPy scalar. `False` for Python numbers, `None`,
    `jax.ShapeDtypeStruct` and everything else.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.is_array(jnp.ones(2))
        assert not eqx.is_array(1.0)
        ```
    """
    return isinstance(element, (jax.Array, np.ndarray, np.generic))


def is_array_like(element: Any) -> bool:
    """Whether `element` is an array, a Python number, or converts itself to an array.

    As [`equinox_like.is_array`][], and `True` for Python `bool`, `int`, `float` and
    `complex`, and for objects with a `__jax_array__` attribute (which is not called).

    !!! example

        ```python
        import equinox_like as eqx

        assert eqx.is_array_like(1.0)
        assert not eqx.is_array_like([1.0])
        ```
    """
    return is_array(element) or is_number(element) or has_conversion(element)


def is_inexact_array(element: Any) -> bool:
    """Whether `element` is an array of floating or complex dtype.

    `True` for JAX and NumPy arrays of these dtypes, `bfloat16` and the 8-bit floats
    included. `False` for integers, booleans, typed PRNG keys, `float0` and Python
    numbers.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.is_inexact_array(jnp.ones(2, jnp.bfloat16))
        assert not eqx.is_inexact_array(jnp.arange(2))
        ```
    """
    return is_array(element) and jnp.issubdtype(element.dtype, jnp.inexact)


def is_inexact_array_like(element: Any) -> bool:
    """Whether `element` becomes an array of floating or complex dtype.

    As [`equinox_like.is_inexact_array`][], and `True` for Python `float` and `complex`.
    For an object with a method `__jax_array__`, the result of this method decides; an
    error in it is raised.

    !!! example

        ```python
        import equinox_like as eqx

        assert eqx.is_inexact_array_like(1.0)
        assert not eqx.is_inexact_array_like(1)
        ```
    """
    if is_array(element):
        return is_inexact_array(element)
    if has_conversion(element) and callable(element.__jax_array__):
        element = element.__jax_array__()
    return is_inexact_array(element) or isinstance(element, (float, complex))


def is_number(element: Any) -> bool:
    """Whether `element` is a Python number. NumPy's `float64` scalars are, too."""
    return isinstance(element, bool | int | float | complex)


def is_array_or_struct(element: Any) -> bool:
    """Whether `element` is an array, or has the shape and dtype of one."""
    return is_array(element) or isinstance(element, jax.ShapeDtypeStruct)


def array_filter(leaves: Iterable[Any]) -> Callable[[Any], bool]:
    """What counts as an array among these leaves.

    A struct stands for an array in a tree of structs, and is a value beside arrays.
    """
    return is_array if any(map(is_array, leaves)) else is_array_or_struct


def is_none(element: Any) -> bool:
    return element is None


def has_conversion(element: Any) -> bool:
    # A class with this attribute cannot be converted; its instances can.
    return hasattr(element, "__jax_array__") and not isinstance(element, type)
