"""Splitting the `key` of a layer, with an error that names the layer."""

from typing import Any

import jax

from .._tree import is_array
from .._tree.arrays import describe_array


def split_key(key: Any, number: int, layer: Any) -> jax.Array:
    """`jax.random.split` of the key that `layer` was given."""
    try:
        return jax.random.split(key, number)
    except (TypeError, ValueError) as error:
        raise refused_key(error, key, layer) from error


def refused_key(error: TypeError | ValueError, key: Any, layer: Any) -> Exception:
    """The error to raise in place of JAX's own, if `key` is not a single PRNG key."""
    given = describe_array(key) if is_array(key) else repr(key)
    return type(error)(
        f"`key` of {type(layer).__name__} must be one PRNG key, such as "
        f"`jax.random.key(0)`; got {given}."
    )
