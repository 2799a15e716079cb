"""Builds layers of equal structure as one layer, with a leading axis on its arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._core.flat_call import Template, take_apart
from ..._transforms.trace import filter_eval_shape


def build_stacked(build: Callable[[Any], Any], keys: Array) -> Any:
    """The layers `build(key)` for each key, stacked into one."""
    if len(keys) == 0:  # `jax.disable_jit` refuses an empty loop
        key = jax.ShapeDtypeStruct(keys.shape[1:], keys.dtype)
        one = filter_eval_shape(build, key)
        return jax.tree.map(_without_rows, one)
    rests: list[Template] = []

    def step(key: Array) -> list[Any]:
        arrays, rest = take_apart(build(key))
        rests.append(rest)
        return arrays

    if jax.random.key_impl(keys) == "threefry2x32":
        arrays = jax.vmap(step)(keys)  # compiles nothing
    else:
        # With other PRNGs (`rbg`) a batch of keys draws other numbers than single keys.
        arrays = jax.lax.map(step, keys)
    return rests[-1].fill(arrays)


def _without_rows(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros((0, *leaf.shape), leaf.dtype)
    return leaf
