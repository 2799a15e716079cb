"""Run by `test_layout.py` with eight devices: what a step of a GPT sends between them.

Prints a line of JSON for each mesh: the shapes of the arrays that each kind of collective
operation makes, the losses, the largest difference from one device's, and how often the
step was traced.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import equinox_like as eqx
from equinox_like import nn

WIDTH, DEPTH, HEADS, VOCABULARY, LENGTH = 64, 3, 8, 256, 20
RULES = [
    ("**.embedding.weight", "vocab embed"),
    ("**.query_proj.weight", "heads embed"),
    ("**.key_proj.weight", "heads embed"),
    ("**.value_proj.weight", "heads embed"),
    ("**.output_proj.weight", "embed heads"),
    ("**.mlp.layers[0].weight", "hidden embed"),
    ("**.mlp.layers[0].bias", "hidden"),
    ("**.mlp.layers[1].weight", "embed hidden"),
]
TENSOR = {"hidden": "model", "heads": "model", "vocab": "model"}
optimiser = optax.adamw(1e-3)


class Block(eqx.Module):
    norms: tuple
    attention: nn.MultiheadAttention
    mlp: nn.MLP

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norms = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        rotary = nn.RotaryPositionalEmbedding(WIDTH // HEADS)
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, rotary=rotary, key=a)
        self.mlp = nn.MLP(WIDTH, WIDTH, 5 * WIDTH, 1, jax.nn.gelu, key=b)

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, is_causal=True)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class GPT(eqx.Module):
    embedding: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RMSNorm

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=a)
        self.blocks = nn.Stacked(Block, DEPTH, key=b, checkpoint=True)
        self.norm = nn.RMSNorm(WIDTH)

    def __call__(self, tokens):
        x = self.blocks(jax.vmap(self.embedding)(tokens))
        return jax.vmap(self.norm)(x)


def make(key):
    model = GPT(key)
    return model, optimiser.init(eqx.filter(model, eqx.trainable))


def loss(model, tokens):
    model = eqx.gather(model)
    x = jax.vmap(model)(tokens[:, :-1])
    losses = jax.vmap(
        lambda x, labels: nn.linear_cross_entropy(x, model.embedding.weight, labels)
    )(x, tokens[:, 1:])
    return jnp.mean(losses)


def train(model, state, tokens):
    value, grads = eqx.filter_value_and_grad(loss)(model, tokens)
    updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.trainable))
    return eqx.apply_updates(model, updates), state, value


def tokens_of(batch, step):
    draw = np.random.default_rng(step)
    start, stride = draw.integers(0, VOCABULARY, (2, batch, 1))
    return ((start + stride * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)


def collectives(text):
    """The shapes of what each kind of collective operation makes."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = {}
    for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        for dimensions in re.findall(r"\w+\[([0-9,]*)\]", shapes):
            shape = [int(n) for n in dimensions.split(",") if n not in ("", "1")]
            if shape not in found.setdefault(kind, []):
                found[kind].append(shape)
    return found


def main(batch, cases):
    key = jax.random.key(0)
    held = eqx.filter_jit(make)(key)
    plain, expected = eqx.filter_jit(train), []
    for i in range(4):
        *held, value = plain(*held, tokens_of(batch, i))
        expected.append(float(value))
    for case in cases:
        mesh, _, kind = case.partition(":")
        if kind:
            types = (getattr(AxisType, kind),) * 2
            sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
            mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=types)
        layout = eqx.Layout(
            mesh,
            RULES,
            params={"embed": "data", **TENSOR},
            compute={"batch": "data", **TENSOR},
        )
        held = layout.init(make, key)
        step = layout.jit(train, donate=("model", "state"))
        text = step.lower(*held, layout.batch(tokens_of(batch, 0))).compile().as_text()
        losses = []
        for i in range(4):
            *held, value = step(*held, layout.batch(tokens_of(batch, i)))
            losses.append(float(value))
        moment = held[1][0].mu.blocks.layers.mlp.layers[0].weight
        found = {
            "mesh": list(layout.mesh.shape.values()),
            "collectives": collectives(text),
            "difference": np.abs(np.divide(losses, expected) - 1).max(),
            "traces": len(step._program.traces()),
            "moment": moment.sharding.shard_shape(moment.shape),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
