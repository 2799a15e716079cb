"""The layers as a user's type checker sees them: checked by pyright, never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
import jax.numpy as jnp

import equinox_like as eqx

key = jax.random.key(0)
x = jnp.ones((5, 8))

# Attention returns what the flags say.
attention = eqx.nn.MultiheadAttention(2, 8, key=key)
cache = attention.init_cache(5)
assert_type(attention(x, x, x), jax.Array)
assert_type(attention(x, x, x, None, is_causal=True, window=2), jax.Array)
assert_type(attention(x, x, x, cache=cache), tuple[jax.Array, eqx.nn.KVCache])
assert_type(attention(x, x, x, return_weights=True), tuple[jax.Array, jax.Array])
assert_type(
    attention(x, x, x, cache=cache, return_weights=True),
    tuple[jax.Array, eqx.nn.KVCache, jax.Array],
)
assert_type(jax.vmap(attention)(x, x, x), jax.Array)
assert_type(eqx.filter_jit(attention)(x, x, x), jax.Array)
# Of a layer with overloads, the type of a transformed call is that of the first one.
eqx.filter_jit(attention)(x, x, x, cache=cache)  # pyright: ignore[reportArgumentType]
jitted = eqx.filter_jit(lambda x, cache: attention(x, x, x, cache=cache))
assert_type(jitted(x, cache), tuple[jax.Array, eqx.nn.KVCache])
attention(x, x, x, caceh=cache)  # pyright: ignore[reportCallIssue]
attention(x, x, x, cache="x")  # pyright: ignore[reportCallIssue, reportArgumentType]


# A flag that is not known yet gives the union.
def attend(cache: eqx.nn.KVCache | None, return_weights: bool) -> None:
    out = attention(x, x, x, cache=cache)
    assert_type(out, jax.Array | tuple[jax.Array, eqx.nn.KVCache])
    out = attention(x, x, x, return_weights=return_weights)
    assert_type(out, jax.Array | tuple[jax.Array, jax.Array])


# A norm returns a state as it is.
for norm in (
    eqx.nn.LayerNorm(8),
    eqx.nn.RMSNorm(8),
    eqx.nn.GroupNorm(2, 8),
    eqx.nn.InstanceNorm(8),
):
    assert_type(norm(x), jax.Array)
    assert_type(norm(x, {"a": 1}), tuple[jax.Array, dict[str, int]])
    assert_type(norm(x, eqx.nn.State(norm)), tuple[jax.Array, eqx.nn.State])
