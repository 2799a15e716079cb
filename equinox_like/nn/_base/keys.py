"""Use of the `key` of a layer, with an error that names the layer."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from ..._tree import is_array
from ..._tree.arrays import describe_array
from .shape import taker_name


def split_key(key: Any, number: int, layer: Any) -> jax.Array:
    """`jax.random.split` of the key that `layer` was given."""
    with key_named(key, layer):
        return jax.random.split(key, number)


@contextlib.contextmanager
def key_named(key: Any, layer: Any) -> Iterator[None]:
    """An error of JAX within names `layer`, if the cause is that `key` is not a single
    PRNG key."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if _is_single_key(key):
            raise
        given = describe_array(key) if is_array(key) else repr(key)
        # Error classes of JAX may take other arguments than a message.
        error_class = TypeError if isinstance(error, TypeError) else ValueError
        raise error_class(
            f"`key` of {taker_name(layer)} must be one PRNG key, such as "
            f"`jax.random.key(0)`; got {given}."
        ) from error


def _is_single_key(key: Any) -> bool:
    try:
        jax.eval_shape(jax.random.split, key)
    except (TypeError, ValueError):
        return False
    return True
