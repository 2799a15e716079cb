"""The GPT by `Layout`."""

import sys

import jax
import optax

import equinox_like as eqx
from equinox_like import nn

from ._sizes import DEPTH, HEADS, STEPS, VOCABULARY, WIDTH, tokens_of

data, model = sys.argv[2].split(",")  # mesh
tensor = {"vocab": "model", "heads": "model", "mlp": "model"}  # mesh
layout = eqx.Layout(  # mesh
    f"data={data},model={model}",  # mesh
    [  # mesh
        ("**.embedding.weight", "vocab embed"),  # mesh
        ("**.output_proj.weight", "embed heads"),  # mesh
        ("**.*_proj.weight", "heads embed"),  # mesh
        ("**.layers[0].weight", "mlp embed"),  # mesh
        ("**.layers[0].bias", "mlp"),  # mesh
        ("**.layers[1].weight", "embed mlp"),  # mesh
    ],  # mesh
    params={"embed": "data", **tensor},  # mesh
    compute={"batch": "data", **tensor},  # mesh
)  # mesh
optimiser = optax.adamw(1e-3)


class Block(eqx.Module):
    norms: tuple[nn.RMSNorm, nn.RMSNorm]
    attention: nn.MultiheadAttention
    mlp: nn.MLP

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norms = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, key=a)
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
        small = jax.nn.initializers.normal(WIDTH**-0.5)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, weight_init=small, key=a)
        self.blocks = nn.Stacked(Block, DEPTH, key=b, checkpoint=True)
        self.norm = nn.RMSNorm(WIDTH)

    def __call__(self, tokens):
        x = self.blocks(jax.vmap(self.embedding)(tokens))
        return jax.vmap(self.embedding.attend)(jax.vmap(self.norm)(x))


def make(key):
    model = GPT(key)
    return model, optimiser.init(eqx.filter(model, eqx.trainable))


def loss_fn(model, tokens):
    logits = jax.vmap(eqx.gather(model))(tokens[:, :-1])  # mesh
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@layout.jit(donate=("model", "state"))
def train_step(model, state, tokens):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens)
    updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.trainable))
    return eqx.apply_updates(model, updates), state, loss


model, state = layout.init(make, jax.random.key(0))
for i in range(STEPS):
    model, state, loss = train_step(model, state, layout.batch(tokens_of(i)))
    print(f"{loss:.4f}")
