"""What runs outside of jit: filter_grad and filter_vmap, beside jax.grad and jax.vmap, and
the call of each layer, beside plain jax.numpy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._measure import compare, show
from ._models import LIBRARIES, nested_dict


def loss(tree: Any) -> jax.Array:
    return sum(x.sum() for x in jax.tree.leaves(tree))  # pyright: ignore[reportReturnType]


def add_one(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, tree)


KEY = jax.random.key(0)
VECTOR, ROWS, IMAGE = jnp.ones(8), jnp.ones((5, 8)), jnp.ones((4, 8, 8))


def dropped(_: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x / 0.5, 0)


def normalised(layer: Any, x: Any) -> Any:
    centred = x - jnp.mean(x)
    y = centred * jax.lax.rsqrt(jnp.mean(centred * centred) + 1e-5)
    return y * layer.weight + layer.bias


def convolved(layer: Any, x: Any) -> Any:
    y = jax.lax.conv(x[None], layer.weight, (1, 1), "VALID")
    return y[0] + layer.bias


def grouped(layer: Any, x: Any) -> Any:
    groups = x.reshape(2, -1)
    centred = groups - jnp.mean(groups, 1, keepdims=True)
    variance = jnp.mean(centred * centred, 1, keepdims=True)
    y = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return y * layer.weight[:, None, None] + layer.bias[:, None, None]


def rotated(_: Any, x: Any) -> Any:
    angles = jnp.arange(5.0)[:, None] / 10_000 ** (jnp.arange(0, 8, 2) / 8)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def gru(cell: Any, x: Any, h: Any) -> Any:
    reset_i, update_i, new_i = jnp.split(cell.weight_ih @ x + cell.bias, 3)
    reset_h, update_h, new_h = jnp.split(cell.weight_hh @ h, 3)
    update = jax.nn.sigmoid(update_i + update_h)
    new = jnp.tanh(new_i + jax.nn.sigmoid(reset_i + reset_h) * (new_h + cell.bias_n))
    return new + update * (h - new)


# For each layer: what makes it, its arguments, and the function in plain JAX of both.
LAYERS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...], Callable[..., Any]]] = {
    "Linear": (
        lambda nn: nn.Linear(8, 8, key=KEY),
        (VECTOR,),
        lambda layer, x: layer.weight @ x + layer.bias,
    ),
    "Embedding": (
        lambda nn: nn.Embedding(10, 8, key=KEY),
        (jnp.array(3),),
        lambda layer, x: layer.weight[x],
    ),
    "Dropout": (lambda nn: nn.Dropout(0.5), (VECTOR,), dropped),
    "PReLU": (
        lambda nn: nn.PReLU(),
        (VECTOR,),
        lambda layer, x: jnp.where(x >= 0, x, layer.negative_slope * x),
    ),
    "LayerNorm": (lambda nn: nn.LayerNorm(8), (VECTOR,), normalised),
    "GroupNorm": (lambda nn: nn.GroupNorm(2, 4), (IMAGE,), grouped),
    "Conv2d": (lambda nn: nn.Conv2d(4, 4, 3, key=KEY), (IMAGE,), convolved),
    "GRUCell": (lambda nn: nn.GRUCell(8, 8, key=KEY), (VECTOR, VECTOR), gru),
    "RotaryPositionalEmbedding": (
        lambda nn: nn.RotaryPositionalEmbedding(8),
        (ROWS,),
        rotated,
    ),
}


def run(rounds: int) -> None:
    rows = []
    for size in (4, 40, 400):
        tree, batch = nested_dict(size), nested_dict(size, (5, 3))
        gradients: dict[str, Any] = {"jax": partial(jax.grad(loss), tree)}
        maps: dict[str, Any] = {"jax": partial(jax.vmap(add_one), batch)}
        for key, library in LIBRARIES.items():
            gradients[key] = partial(library.filter_grad(loss), tree)
            maps[key] = partial(library.filter_vmap(add_one), batch)
        some = max(3, rounds // 4)
        rows.append(compare(f"grad, {size} leaves", gradients, rounds=some))
        rows.append(compare(f"vmap, {size} leaves", maps, rounds=some))
    show("Eager transformations", rows)

    rows = []
    for name, (make, args, plain) in LAYERS.items():
        layers = {key: make(library.nn) for key, library in LIBRARIES.items()}
        named = {"key": KEY} if name == "Dropout" else {}
        calls = {key: partial(layer, *args, **named) for key, layer in layers.items()}
        expected = plain(layers["ours"], *args)
        for run in calls.values():
            assert np.allclose(run(), expected, atol=1e-5)
        runs = {"jax.numpy": partial(plain, layers["ours"], *args)} | calls
        rows.append(compare(name, runs, rounds=rounds, goal="<= 1.2x Equinox"))
    show("Calls of layers outside of jit", rows)
