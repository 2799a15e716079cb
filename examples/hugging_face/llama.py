"""Llama 2 and 3, with the names of their layers in a checkpoint of Hugging Face."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray

import equinox_like as eqx

# From a part of a name here to the part in the checkpoint.
NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention": "self_attn",
    "query_proj": "q_proj",
    "key_proj": "k_proj",
    "value_proj": "v_proj",
    "output_proj": "o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


def make_rotary(config: dict[str, Any], size: int) -> eqx.nn.RotaryPositionalEmbedding:
    """The rotary embedding for heads of `size`, with the scaling of Llama 3.1."""
    # Before transformers 5, these settings were in two places.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind == "default":
        return eqx.nn.RotaryPositionalEmbedding(size, theta)
    if kind != "llama3":
        raise NotImplementedError(
            f"rope_type {kind!r}: compute its `frequencies` here."
        )
    frequencies = theta ** (-np.arange(0, size, 2) / size)
    # How often a pair turns within the length of the first training. The frequencies of
    # slow pairs are divided by `factor`, those of fast ones are kept.
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    frequencies = frequencies * (kept + (1 - kept) / rope["factor"])
    return eqx.nn.RotaryPositionalEmbedding(size, frequencies=frequencies)


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: dict[str, Any], *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        size, hidden = config["hidden_size"], config["intermediate_size"]
        heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
        per_head = config.get("head_dim") or size // heads
        self.norm1 = eqx.nn.RMSNorm(size, eps, use_bias=False)
        self.attention = eqx.nn.MultiheadAttention(
            heads,
            size,
            qk_size=per_head,
            vo_size=per_head,
            num_kv_heads=config.get("num_key_value_heads", heads),
            rotary=make_rotary(config, per_head),
            key=keys[0],
        )
        self.norm2 = eqx.nn.RMSNorm(size, eps, use_bias=False)
        self.gate = eqx.nn.Linear(size, hidden, use_bias=False, key=keys[1])
        self.up = eqx.nn.Linear(size, hidden, use_bias=False, key=keys[2])
        self.down = eqx.nn.Linear(hidden, size, use_bias=False, key=keys[3])

    def __call__(self, x: Array, cache: eqx.nn.KVCache | None) -> Any:
        y = jax.vmap(self.norm1)(x)
        y = self.attention(y, y, y, is_causal=True, cache=cache)
        y, cache = (y, None) if cache is None else y  # with a cache, a pair
        x = x + y
        y = jax.vmap(self.norm2)(x)
        y = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + jax.vmap(self.down)(y), cache


class Llama(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None  # None: the logits use the weights of the embedding

    def __init__(self, config: dict[str, Any], *, key: PRNGKeyArray):
        keys = jax.random.split(key, config["num_hidden_layers"] + 2)
        size, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embedding = eqx.nn.Embedding(vocabulary, size, key=keys[0])
        self.blocks = [Block(config, key=key) for key in keys[2:]]
        self.norm = eqx.nn.RMSNorm(size, config["rms_norm_eps"], use_bias=False)
        self.head = None
        if not config.get("tie_word_embeddings", False):
            self.head = eqx.nn.Linear(size, vocabulary, use_bias=False, key=keys[1])

    def __call__(self, tokens: Array, caches: list[eqx.nn.KVCache] | None = None):
        """Logits of shape `(n, vocabulary)` for `n` tokens, and the next caches."""
        x = jax.vmap(self.embedding)(tokens)
        new = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, None if caches is None else caches[i])
            new.append(cache)
        to_logits = self.embedding.attend if self.head is None else self.head
        return jax.vmap(to_logits)(jax.vmap(self.norm)(x)), new

    def init_caches(self, length: int) -> list[eqx.nn.KVCache]:
        return [block.attention.init_cache(length) for block in self.blocks]


def convert(theirs: dict[str, np.ndarray], config: dict[str, Any]):
    """The arrays of the checkpoint that the model here has."""
    unused = ["rotary_emb.inv_freq"]  # in old checkpoints
    if config.get("tie_word_embeddings", False):
        unused.append("lm_head.weight")
    return {name: x for name, x in theirs.items() if not name.endswith(tuple(unused))}
