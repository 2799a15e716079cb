"""The random numbers of layers: initial values of parameters, and masks of dropout."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from ..._compat.tracing import within_program
from ..._typing import DTypeLike, PRNGKeyArray


def draw(
    sample: Callable[..., Array],
    key: PRNGKeyArray,
    shape: Sequence[int],
    dtype: DTypeLike,
    *args: Any,
) -> Array:
    """`sample(key, shape, dtype, *args)`, for a function of `jax.random`.

    Drawn along one axis and reshaped, the numbers are the same, and on a CPU they take
    less time to compile: a quarter for the weight of a `Conv2d`. But in a program for
    several devices, each of them would draw all numbers, and not only its own.
    """
    shape = tuple(shape)
    if within_program() and (jax.device_count() > 1 or jax.default_backend() != "cpu"):
        return sample(key, shape, dtype, *args)
    return _draw_flat(sample, key, shape, dtype, *args)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _draw_flat(sample: Any, key: Any, shape: Any, dtype: Any, *args: Any) -> Array:
    return sample(key, (math.prod(shape),), dtype, *args).reshape(shape)
