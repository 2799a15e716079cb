"""Tokens per second of a small GPT that generates with a KV cache.

The model consists of our layers, and `nn.generate` chooses the most likely tokens. It
is compared with a hand-written loop in plain `jax.numpy`, with its blocks in an
`nn.Stacked`, and with Flax NNX if it is installed, with the same weights. Each is one
compiled scan with a donated cache. All generate the same tokens, which is checked first.
The time includes waiting for the tokens.
"""

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import equinox_like as eqx
from equinox_like import nn

from ._measure import Contenders, Row, compare, show, spread

VOCABULARY, WIDTH, HEADS, DEPTH = 512, 256, 8, 4
HEAD = WIDTH // HEADS
SLOTS, TOKENS = 512, 64


class Block(eqx.Module):
    norms: list[nn.LayerNorm]
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.norms = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up = nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.down = nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x: jax.Array, cache: nn.KVCache) -> tuple[jax.Array, nn.KVCache]:
        y = jax.vmap(self.norms[0])(x)
        y, cache = self.attention(y, y, y, is_causal=True, cache=cache)
        x = x + y
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(y), cache


class GPT(eqx.Module):
    embedding: nn.Embedding
    positions: nn.Embedding
    blocks: Any  # a list, or a Stacked
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, DEPTH + 3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.positions = nn.Embedding(SLOTS, WIDTH, key=keys[1])
        self.head = nn.Linear(WIDTH, VOCABULARY, key=keys[2])
        self.blocks = [Block(k) for k in keys[3:]]
        self.norm = nn.LayerNorm(WIDTH)

    def __call__(self, tokens: jax.Array, caches: Any) -> Any:
        is_stacked = isinstance(self.blocks, nn.Stacked)
        length = caches.length[0] if is_stacked else caches[0].length
        positions = length + jnp.arange(len(tokens))
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(positions)
        if is_stacked:
            x, following = self.blocks(x, xs=caches)
        else:
            following = []
            for block, cache in zip(self.blocks, caches, strict=True):
                x, cache = block(x, cache)
                following.append(cache)
        return jax.vmap(lambda row: self.head(self.norm(row)))(x), following

    def init_caches(self) -> Any:
        if isinstance(self.blocks, nn.Stacked):
            attention = self.blocks.layers.attention
            return jax.vmap(lambda _: attention.init_cache(SLOTS))(jnp.arange(DEPTH))
        return [block.attention.init_cache(SLOTS) for block in self.blocks]


def by_ours(model: GPT, batch: int) -> Callable[[], jax.Array]:
    make_caches = jax.jit(
        lambda: jax.vmap(lambda _: model.init_caches())(jnp.arange(batch))
    )
    prompts = jnp.zeros((batch, 1), int)

    def run() -> jax.Array:
        caches = make_caches()
        return nn.generate(model, prompts, caches, TOKENS, temperature=0).tokens

    return run


# In plain `jax.numpy`


def product(p: Any, x: jax.Array) -> jax.Array:
    # Not `x @ p.weight.T`: for one row, XLA would transpose the weight at each token.
    return jnp.inner(x, p.weight)


def linear(p: Any, x: jax.Array) -> jax.Array:
    return product(p, x) + p.bias


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * p.weight + p.bias


def plain_step(model: Any, tokens: jax.Array, caches: Any, position: jax.Array) -> Any:
    """One token of each row; a cache has the shape (batch, slots, heads, size)."""
    x = model.embedding.weight[tokens] + model.positions.weight[position]
    following = []
    for block, (keys, values) in zip(model.blocks, caches, strict=True):
        a = block.attention
        y = layer_norm(block.norms[0], x)
        q, k, v = (
            product(p, y).reshape(-1, HEADS, HEAD)
            for p in (a.query_proj, a.key_proj, a.value_proj)
        )
        start = (0, position, 0, 0)
        keys = jax.lax.dynamic_update_slice(keys, k[:, None], start)
        values = jax.lax.dynamic_update_slice(values, v[:, None], start)
        # Matrix products would copy the cache, in any order of its axes.
        logits = ((q / HEAD**0.5)[:, None] * keys).sum(-1)
        filled = (jnp.arange(SLOTS) <= position)[:, None]
        weights = jax.nn.softmax(jnp.where(filled, logits, -1e30), axis=1)
        mixed = (weights[..., None] * values).sum(1)
        x = x + product(a.output_proj, mixed.reshape(-1, WIDTH))
        hidden = jax.nn.gelu(linear(block.up, layer_norm(block.norms[1], x)))
        x = x + linear(block.down, hidden)
        following.append((keys, values))
    return linear(model.head, layer_norm(model.norm, x)), following


def by_hand(model: GPT, batch: int) -> Callable[[], jax.Array]:
    arrays, rest = eqx.partition(model, eqx.is_array)
    shape = (batch, SLOTS, HEADS, HEAD)
    make_caches = jax.jit(
        lambda: [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(DEPTH)]
    )

    @partial(jax.jit, donate_argnums=1)
    def generate(arrays: Any, caches: Any, tokens: jax.Array) -> Any:
        whole = eqx.combine(arrays, rest)

        def step(carry: Any, position: jax.Array) -> Any:
            tokens, caches = carry
            logits, caches = plain_step(whole, tokens, caches, position)
            tokens = logits.argmax(-1)
            return (tokens, caches), tokens

        (_, caches), out = jax.lax.scan(step, (tokens, caches), jnp.arange(TOKENS))
        return out.T, caches

    return lambda: generate(arrays, make_caches(), jnp.zeros(batch, int))[0]


# In Flax NNX


def flax_nnx() -> Any:
    try:
        return importlib.import_module("flax.nnx")
    except ImportError:
        return None


def make_flax_model(nnx: Any, model: GPT) -> Any:
    """The same model in Flax NNX, with the same weights."""
    rngs = nnx.Rngs(0)

    def like_linear(p: Any) -> Any:
        made = nnx.Linear(p.in_features, p.out_features, rngs=rngs)
        made.kernel.set_value(p.weight.T)
        made.bias.set_value(p.bias)
        return made

    def like_embedding(p: Any) -> Any:
        made = nnx.Embed(p.num_embeddings, p.embedding_size, rngs=rngs)
        made.embedding.set_value(p.weight)
        return made

    def like_attention(p: Any) -> Any:
        made = nnx.MultiHeadAttention(
            HEADS, WIDTH, use_bias=False, decode=True, rngs=rngs
        )
        for name in ("query", "key", "value"):
            weight = getattr(p, f"{name}_proj").weight
            kernel = weight.T.reshape(WIDTH, HEADS, HEAD)
            getattr(made, name).kernel.set_value(kernel)
        made.out.kernel.set_value(p.output_proj.weight.T.reshape(HEADS, HEAD, WIDTH))
        return made

    def norm() -> Any:
        return nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    class FlaxBlock(nnx.Module):
        def __init__(self, block: Block):
            self.norms = nnx.List([norm(), norm()])
            self.attention = like_attention(block.attention)
            self.up, self.down = like_linear(block.up), like_linear(block.down)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norms[0](x))
            return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))

    class FlaxGPT(nnx.Module):
        def __init__(self):
            self.embedding = like_embedding(model.embedding)
            self.positions = like_embedding(model.positions)
            self.blocks = nnx.List([FlaxBlock(block) for block in model.blocks])
            self.norm, self.head = norm(), like_linear(model.head)

        def __call__(self, tokens: jax.Array, position: jax.Array) -> jax.Array:
            x = (self.embedding(tokens) + self.positions(position))[:, None]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))[:, 0]

    return FlaxGPT()


def by_flax(nnx: Any, model: GPT, batch: int) -> Callable[[], jax.Array]:
    made = make_flax_model(nnx, model)
    for block in made.blocks:
        block.attention.init_cache((batch, SLOTS, WIDTH))
    structure, cache, rest = nnx.split(made, nnx.Cache, ...)
    make_caches = jax.jit(lambda: jax.tree.map(jnp.zeros_like, cache))

    @partial(jax.jit, donate_argnums=1)
    def generate(rest: Any, cache: Any, tokens: jax.Array) -> Any:
        def step(carry: Any, position: jax.Array) -> Any:
            tokens, cache = carry
            whole = nnx.merge(structure, cache, rest)
            tokens = whole(tokens, position).argmax(-1)
            return (tokens, nnx.state(whole, nnx.Cache)), tokens

        (_, cache), out = jax.lax.scan(step, (tokens, cache), jnp.arange(TOKENS))
        return out.T, cache

    return lambda: generate(rest, make_caches(), jnp.zeros(batch, int))[0]


def contenders(batch: int) -> Contenders:
    model = GPT(jax.random.key(0))
    found = {"by hand": by_hand(model, batch), "ours": by_ours(model, batch)}
    stacked = eqx.tree_at("blocks", model, nn.Stacked.from_layers(model.blocks))
    found["ours, Stacked"] = by_ours(stacked, batch)
    nnx = flax_nnx()
    if nnx is not None:
        found["Flax NNX"] = by_flax(nnx, model, batch)
    expected, *others = (run().tolist() for run in found.values())
    assert all(tokens == expected for tokens in others), "they draw different tokens"
    return {name: partial(finished, run) for name, run in found.items()}


def finished(run: Callable[[], jax.Array]) -> jax.Array:
    return jax.block_until_ready(run())


def cpu_seconds(found: Contenders, rounds: int) -> dict[str, float]:
    """The median CPU time. Other processes affect it less than the wall time."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, run in found.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: spread(taken)[0] for name, taken in times.items()}


def run(rounds: int) -> None:
    rows: list[Row] = []
    lines: list[str] = []
    for batch in (1, 8):
        found = contenders(batch)
        row = compare(f"batch of {batch}", found, rounds=rounds, repeats=1)
        rows.append(row)
        rate = batch * TOKENS / row.seconds[0]
        rates = {"by hand": rate} | {k: rate / r[0] for k, r in row.ratios.items()}
        shown = ", ".join(f"{name} {value:.0f}" for name, value in rates.items())
        lines.append(f"{row.name}, tokens per second: {shown}")
        cpu = cpu_seconds(found, rounds)
        shown = ", ".join(f"{k} {v / cpu['by hand']:.2f}x" for k, v in cpu.items())
        lines.append(f"{row.name}, CPU time: {shown}")
    show(f"Generation: {TOKENS} tokens of a GPT of {DEPTH} blocks, width {WIDTH}", rows)
    print("\n".join(lines))
