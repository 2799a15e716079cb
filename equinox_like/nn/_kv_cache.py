"""`KVCache`: the keys and values of the tokens that attention has seen so far."""

from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from .._compat.tracer import Tracer
from .._errors import ShapeError
from .._module import Module, field
from .._runtime.error_if import error_if


class KVCache(Module):
    """What [`equinox_like.nn.MultiheadAttention`][] remembers of the tokens before.

    Made by `attention.init_cache(...)`; passed to a call, which returns the next one.
    Shapes and dtypes never change, so it is a carry of `jax.lax.scan`, and can be donated.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))

        def step(cache, token):
            token = token[None]
            out, cache = attention(token, token, token, is_causal=True, cache=cache)
            return cache, out[0]

        tokens = jax.random.normal(jax.random.key(1), (5, 8))
        _, outs = jax.lax.scan(step, attention.init_cache(max_length=5), tokens)
        at_once = attention(tokens, tokens, tokens, is_causal=True)
        assert jnp.allclose(outs, at_once, atol=1e-5)
        ```
    """

    key: Array = field(trainable=False)
    value: Array = field(trainable=False)
    position: Array = field(trainable=False)
    length: Array = field(trainable=False)
    overflow: Literal["error", "ring"] = field(static=True, default="error")


def empty_cache(
    max_length: int,
    num_heads: int,
    sizes: tuple[int, int],
    dtype: DTypeLike,
    overflow: Literal["error", "ring"],
) -> KVCache:
    if overflow not in ("error", "ring"):
        raise ValueError(f"`overflow` is 'error' or 'ring'; got {overflow!r}.")
    if max_length < 1:
        raise ValueError(f"A KVCache takes a `max_length` >= 1; got {max_length}.")
    key_size, value_size = sizes
    return KVCache(
        key=jnp.zeros((max_length, num_heads, key_size), dtype),
        value=jnp.zeros((max_length, num_heads, value_size), dtype),
        position=jnp.full((max_length,), -1, jnp.int32),
        length=jnp.zeros((), jnp.int32),
        overflow=overflow,
    )


def extended(cache: KVCache, key: Array, value: Array) -> tuple[Array, Array, KVCache]:
    """Keys and values of all slots and then of the new tokens; and the next cache."""
    _check_new(cache, key, value)
    key, value = key.astype(cache.key.dtype), value.astype(cache.value.dtype)
    # Of more tokens than there are slots, only the last stay.
    kept = slice(max(len(key) - len(cache.key), 0), None)
    position = new_positions(cache, len(key))[kept]
    slots = position % len(cache.key)
    next_cache = KVCache(
        key=cache.key.at[slots].set(key[kept]),
        value=cache.value.at[slots].set(value[kept]),
        position=cache.position.at[slots].set(position),
        length=cache.length + len(key),
        overflow=cache.overflow,
    )
    keys = jnp.concatenate([cache.key, key])
    return keys, jnp.concatenate([cache.value, value]), next_cache


def new_positions(cache: KVCache, number: int) -> Array:
    """The places in the sequence of the next tokens."""
    return cache.length + jnp.arange(number, dtype=jnp.int32)


def _check_new(cache: KVCache, key: Array, value: Array) -> None:
    for name, new, old in ("key", key, cache.key), ("value", value, cache.value):
        if new.shape[1:] != old.shape[1:]:
            raise ShapeError(
                f"The KVCache holds for each token a `{name}` of shape {old.shape[1:]}, "
                f"in (heads, size); the layer made one of shape {new.shape[1:]}. Make the "
                "cache by the `init_cache` of this layer."
            )
    slots, number = len(cache.key), len(key)
    if cache.overflow == "ring":
        return
    if number > slots:
        raise ShapeError(
            f"The KVCache has slots for {slots} tokens, and was given {number} at once. "
            "Make a longer one by `init_cache`, or one with `overflow='ring'`."
        )
    if not is_traced(cache.length) and cache.length + number > slots:
        raise RuntimeError(
            f"The KVCache has slots for {slots} tokens, holds {int(cache.length)} and was "
            f"given {number} more. Make a longer one by `init_cache`, or one with "
            "`overflow='ring'`."
        )


def is_traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def refuse_overfull(cache: KVCache, out: Array) -> Array:
    """`out`, with an error at run time if tokens were lost that were not to be.

    A cache stays overfull, so the error comes at the latest when it is attended to.
    """
    slots = len(cache.key)
    return error_if(
        out,
        cache.overflow == "error" and cache.length > slots,
        f"The KVCache has slots for {slots} tokens, and was given more. Make a longer one "
        "by `init_cache`, or one with `overflow='ring'`.",
    )
