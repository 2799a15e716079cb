"""A small network with a layout, and its training, in one process or in several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import equinox_like as eqx
from equinox_like import nn

WIDTH, DEPTH, BATCH = 8, 3, 16
RULES = [
    ("**.first.weight", "hidden embed"),
    ("**.first.bias", "hidden"),
    ("**.second.weight", "embed hidden"),
    ("head.weight", ". embed"),
]
PARAMS = {"hidden": "model", "embed": "data"}
COMPUTE = {"batch": "data", "hidden": "model"}


class Block(eqx.Module):
    first: nn.Linear
    second: nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.first = nn.Linear(WIDTH, 4 * WIDTH, key=a)
        self.second = nn.Linear(4 * WIDTH, WIDTH, use_bias=False, key=b)

    def __call__(self, x):
        return x + self.second(jax.nn.relu(self.first(x)))


class Net(eqx.Module):
    blocks: nn.Stacked
    head: nn.Linear

    def __init__(self, key, checkpoint=None):
        a, b = jax.random.split(key)
        self.blocks = nn.Stacked(Block, DEPTH, key=a, checkpoint=checkpoint)
        self.head = nn.Linear(WIDTH, 2, use_bias=False, key=b)

    def __call__(self, x):
        return self.head(self.blocks(x))


optimiser = optax.adam(1e-2)


def make(key, optimiser=optimiser):
    model = Net(key)
    return model, optimiser.init(eqx.filter(model, eqx.trainable))


def loss(model, x, y):
    return jnp.mean((jax.vmap(eqx.gather(model))(x) - y) ** 2)


def train(model, state, x, y):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


def layout_of(mesh="data=2,model=2", rules=RULES, params=PARAMS, compute=COMPUTE):
    return eqx.Layout(mesh, rules, params=params, compute=compute)


def rows(seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(BATCH, WIDTH)).astype("float32")
    return x, x[:, :2] * 2
