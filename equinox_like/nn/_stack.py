"""Builds layers of equal structure as one layer, with a leading axis on its arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._transforms.trace import filter_eval_shape
from .._tree import combine, is_array, partition


def build_stacked(build: Callable[[Any], Any], keys: Array) -> Any:
    """The layers `build(key)` for each key, stacked into one."""
    if len(keys) == 0:  # `jax.disable_jit` refuses an empty loop
        one = filter_eval_shape(build, jax.eval_shape(lambda k: k[0], _one_row(keys)))
        return jax.tree.map(_without_rows, one)
    rests: list[Any] = []

    def step(key: Array) -> Any:
        arrays, rest = partition(build(key), is_array)
        rests.append(rest)
        return arrays

    # Not by `vmap`: with some PRNGs (`rbg`), a batch of keys draws other numbers than
    # the single keys.
    arrays = jax.lax.map(step, keys)
    return combine(arrays, rests[-1])


def _one_row(keys: Array) -> Any:
    return jax.ShapeDtypeStruct((1, *keys.shape[1:]), keys.dtype)


def _without_rows(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros((0, *leaf.shape), leaf.dtype)
    return leaf
