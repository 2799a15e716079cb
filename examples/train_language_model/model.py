"""The model: a small GPT, whose attention takes a KV cache when it generates text."""

from typing import Any

import jax
import jax.numpy as jnp
from config import Config
from data import VOCABULARY
from jax.nn.initializers import normal
from jaxtyping import Array, PRNGKeyArray

import equinox_like as eqx


class Block(eqx.Module):
    """Attention and an MLP, each after a norm. Takes `x` of shape `(n, width)`."""

    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        width, heads = config.width, config.heads
        self.norms = eqx.nn.RMSNorm(width), eqx.nn.RMSNorm(width)
        rotary = eqx.nn.RotaryPositionalEmbedding(width // heads)
        self.attention = eqx.nn.MultiheadAttention(
            heads, width, rotary=rotary, key=attention_key
        )
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=mlp_key)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self,
        x: Array,
        cache: eqx.nn.KVCache | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Any:
        """The output, of the shape of `x`; with a cache, the next cache, too."""
        keys = (None, None) if key is None else jax.random.split(key)
        y = jax.vmap(self.norms[0])(x)
        if cache is None:
            y = self.attention(y, y, y, is_causal=True)
        else:
            y, cache = self.attention(y, y, y, is_causal=True, cache=cache)
        x = x + self.dropout(y, key=keys[0])
        y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        x = x + self.dropout(y, key=keys[1])
        return x if cache is None else (x, cache)


class GPT(eqx.Module):
    """For each of `n` tokens, the logits of the next one: shape `(n, VOCABULARY)`."""

    embedding: eqx.nn.Embedding
    blocks: eqx.nn.Stacked[Block]
    norm: eqx.nn.RMSNorm

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        embedding_key, blocks_key = jax.random.split(key)
        width = config.width
        self.embedding = eqx.nn.Embedding(
            VOCABULARY, width, weight_init=normal(width**-0.5), key=embedding_key
        )
        self.blocks = eqx.nn.Stacked(
            lambda key: Block(config, key=key), config.depth, key=blocks_key
        )
        self.norm = eqx.nn.RMSNorm(width)

    def __call__(
        self,
        tokens: Array,
        cache: eqx.nn.KVCache | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, eqx.nn.KVCache | None]:
        """The logits for tokens of shape `(n,)`; with a cache, also the next cache."""
        x = jax.vmap(self.embedding)(tokens)
        if cache is None:
            x = self.blocks(x, key=key)
        else:  # each block has its part of the cache
            x, cache = self.blocks(x, xs=cache)
        return jax.vmap(self.embedding.attend)(jax.vmap(self.norm)(x)), cache

    def init_cache(self, length: int) -> eqx.nn.KVCache:
        """An empty cache for all blocks, which keeps the last `length` tokens."""

        def make(_: Array) -> eqx.nn.KVCache:
            attention = self.blocks.layers.attention
            return attention.init_cache(length, overflow="ring")

        return jax.vmap(make)(jnp.arange(self.blocks.depth))


def make_model(config: Config, *, key: PRNGKeyArray):
    """A GPT that computes in the precision of the settings."""
    return eqx.nn.mixed(GPT(config, key=key), config.precision)
