"""The GPT by Haliax."""

import sys

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import optax
from haliax.nn.attention import causal_mask, dot_product_attention
from jax.sharding import AxisType

from ._sizes import BATCH, DEPTH, HEADS, LENGTH, STEPS, VOCABULARY, WIDTH, tokens_of

sizes = [int(size) for size in sys.argv[2].split(",")]  # mesh
kinds = (AxisType.Auto, AxisType.Auto)  # mesh
mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=kinds)  # mesh
tensor = {"vocab": "model", "heads": "model", "mlp": "model"}  # mesh
params = {"batch": "data", "embed": "data", **tensor}  # mesh
compute = {"batch": "data", **tensor}  # mesh

Batch, Pos, KeyPos = hax.make_axes(batch=BATCH, pos=LENGTH, key_pos=LENGTH)
Embed, Mlp, Vocab = hax.make_axes(embed=WIDTH, mlp=5 * WIDTH, vocab=VOCABULARY)
Heads, Size, Layers = hax.make_axes(heads=HEADS, size=WIDTH // HEADS, layers=DEPTH)
optimiser = optax.adamw(1e-3)


class Block(eqx.Module):
    norms: tuple[hnn.RmsNorm, hnn.RmsNorm]
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 6)
        norm = hnn.RmsNorm.init(Embed, use_bias=False)
        return Block(
            (norm, norm),
            hnn.Linear.init(Embed, (Heads, Size), key=keys[0], use_bias=False),
            hnn.Linear.init(Embed, (Heads, Size), key=keys[1], use_bias=False),
            hnn.Linear.init(Embed, (Heads, Size), key=keys[2], use_bias=False),
            hnn.Linear.init((Heads, Size), Embed, key=keys[3], use_bias=False),
            hnn.Linear.init(Embed, Mlp, key=keys[4]),
            hnn.Linear.init(Mlp, Embed, key=keys[5]),
        )

    def __call__(self, x):
        self = hax.auto_sharded(self)  # mesh
        y = self.norms[0](x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        k, v = k.rename({"pos": "key_pos"}), v.rename({"pos": "key_pos"})
        mask = causal_mask(Pos, KeyPos)
        y = dot_product_attention(KeyPos, Size, q, k, v, mask=mask)
        x = x + self.output(y)
        x = x + self.down(hnn.gelu(self.up(self.norms[1](x))))
        return hax.auto_sharded(x)  # mesh


class GPT(eqx.Module):
    embedding: hnn.Embedding
    blocks: hnn.Stacked
    norm: hnn.RmsNorm

    @staticmethod
    def init(key):
        a, b = jax.random.split(key)
        blocks = hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)
        return GPT(
            hnn.Embedding.init(Vocab, Embed, key=a),
            blocks(key=jax.random.split(b, DEPTH)),
            hnn.RmsNorm.init(Embed, use_bias=False),
        )

    def __call__(self, tokens):
        embedding = hax.auto_sharded(self.embedding)  # mesh
        x = self.blocks.fold(embedding(tokens))
        return embedding.unembed(self.norm(x))


@hax.named_jit(axis_resources=params)
def make(key):
    model = GPT.init(key)
    return model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))


def loss_fn(model, tokens, labels):
    logits = model(tokens).rearrange((Batch, Pos, Vocab)).array
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels.array)
    return losses.mean()


@hax.named_jit(
    in_axis_resources=params,  # mesh
    out_axis_resources=params,  # mesh
    axis_resources=compute,  # mesh
    donate_args=(True, True, False, False),
)
def train_step(model, state, tokens, labels):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens, labels)
    arrays = eqx.filter(model, eqx.is_inexact_array)
    updates, state = optimiser.update(grads, state, arrays)
    return eqx.apply_updates(model, updates), state, loss


with jax.set_mesh(mesh):  # mesh
    model, state = make(jax.random.key(0))
    for i in range(STEPS):
        rows = tokens_of(i)
        tokens = hax.named(rows[:, :-1], (Batch, Pos))
        labels = hax.named(rows[:, 1:], (Batch, Pos))
        tokens, labels = hax.shard((tokens, labels), params)  # mesh
        model, state, loss = train_step(model, state, tokens, labels)
        print(f"{loss:.4f}")
