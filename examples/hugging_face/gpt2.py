"""GPT-2, with the names of its layers in a checkpoint of Hugging Face."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray

import equinox_like as eqx

# From a part of a name here to the part in the checkpoint.
NAMES = {
    "embedding": "wte",
    "position": "wpe",
    "blocks": "h",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention": "attn",
    "output_proj": "c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "norm": "ln_f",
}
PROJECTIONS = "query_proj", "key_proj", "value_proj"  # "c_attn" is all three


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: dict[str, Any], *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        size, eps = config["n_embd"], config["layer_norm_epsilon"]
        hidden = config.get("n_inner") or 4 * size
        self.norm1 = eqx.nn.LayerNorm(size, eps)
        self.attention = eqx.nn.MultiheadAttention(
            config["n_head"],
            size,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=keys[0],
        )
        self.norm2 = eqx.nn.LayerNorm(size, eps)
        self.up = eqx.nn.Linear(size, hidden, key=keys[1])
        self.down = eqx.nn.Linear(hidden, size, key=keys[2])

    def __call__(self, x: Array, cache: eqx.nn.KVCache | None) -> Any:
        y = jax.vmap(self.norm1)(x)
        y = self.attention(y, y, y, is_causal=True, cache=cache)
        y, cache = (y, None) if cache is None else y  # with a cache, a pair
        x = x + y
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(y), cache


class GPT2(eqx.Module):
    embedding: eqx.nn.Embedding
    position: eqx.nn.LearnedPositionalEmbedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, config: dict[str, Any], *, key: PRNGKeyArray):
        keys = jax.random.split(key, config["n_layer"] + 2)
        size, length = config["n_embd"], config["n_positions"]
        self.embedding = eqx.nn.Embedding(config["vocab_size"], size, key=keys[0])
        self.position = eqx.nn.LearnedPositionalEmbedding(length, size, key=keys[1])
        self.blocks = [Block(config, key=key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(size, config["layer_norm_epsilon"])

    def __call__(self, tokens: Array, caches: list[eqx.nn.KVCache] | None = None):
        """Logits of shape `(n, vocabulary)` for `n` tokens, and the next caches."""
        x = jax.vmap(self.embedding)(tokens)
        x = self.position(x, offset=0 if caches is None else caches[0].length)
        new = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, None if caches is None else caches[i])
            new.append(cache)
        return jax.vmap(self.embedding.attend)(jax.vmap(self.norm)(x)), new

    def init_caches(self, length: int) -> list[eqx.nn.KVCache]:
        return [block.attention.init_cache(length) for block in self.blocks]


def convert(theirs: dict[str, np.ndarray], config: dict[str, Any]):
    """The arrays of the checkpoint, in the layout of the layers here."""
    ours = {}
    for name, x in theirs.items():
        name = name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # old checkpoints have the causal mask
        if name == "lm_head.weight" and config.get("tie_word_embeddings", True):
            continue
        if ".c_" in name:  # a `Conv1D`, whose weight has the shape `(in, out)`
            x = x.T
        if "c_attn" in name:
            for projection, part in zip(PROJECTIONS, np.split(x, 3), strict=True):
                ours[name.replace("c_attn", projection)] = part
        else:
            ours[name] = x
    return ours
