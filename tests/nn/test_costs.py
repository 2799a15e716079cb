"""Layers cost no more than the same in plain `jax.numpy`, as XLA counts it."""

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like import nn

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def networks():
    """Those of the benchmark, which is no part of what is installed."""
    spec = importlib.util.spec_from_file_location(
        "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    yield importlib.import_module("benchmarks.layers").networks()
    for name in [name for name in sys.modules if name.startswith("benchmarks")]:
        del sys.modules[name]


def split_heads(p, x):
    return jnp.einsum("...d,dhk->...hk", x, p.weight) + p.bias


def instance_norm(p, x):
    centred = x - x.mean((1, 2), keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred**2, (1, 2), keepdims=True) + 1e-5)
    return centred * scale * p.weight[:, None, None] + p.bias[:, None, None]


def sinusoids(p, x):
    angles = jnp.arange(8.0)[:, None] / 10_000.0 ** (jnp.arange(0, 16, 2) / 16)
    return x + jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(8, 16)


SIZES = {"d": 16, "h": 4, "k": 8}
LAYERS = {
    "Einsum": (
        lambda: nn.Einsum("...d,dhk->...hk", SIZES, key=jax.random.key(0)),
        split_heads,
        (8, 16),
    ),
    "InstanceNorm": (lambda: nn.InstanceNorm(3), instance_norm, (3, 8, 8)),
    "Upsample": (
        lambda: nn.Upsample(2, method="linear"),
        lambda p, x: jax.image.resize(x, (3, 16, 16), "linear"),
        (3, 8, 8),
    ),
    "LearnedPositionalEmbedding": (
        lambda: nn.LearnedPositionalEmbedding(32, 16, key=jax.random.key(0)),
        lambda p, x: x + p.weight[:8],
        (8, 16),
    ),
    "SinusoidalPositionalEmbedding": (
        lambda: nn.SinusoidalPositionalEmbedding(16),
        sinusoids,
        (8, 16),
    ),
}


def costs(function, model, x, kind):
    arrays, static = eqx.partition(model, eqx.is_array)

    def forward(arrays, x):
        return jax.vmap(partial(function, eqx.combine(arrays, static)))(x)

    if kind == "forward":
        program = forward
    else:
        program = jax.value_and_grad(lambda a, x: (forward(a, x) ** 2).sum())
    found = jax.jit(program).lower(arrays, x).compile().cost_analysis()
    return found["flops"], found["bytes accessed"]


@pytest.mark.parametrize("kind", ["forward", "gradient"])
@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer block", "GRU, 256 steps"])
def test_operations_and_bytes_are_those_of_plain_jax(networks, name, kind):
    make, call, plain, x = networks[name]
    model = make(eqx)
    ours, theirs = (costs(f, model, x, kind) for f in (call, plain))
    # 0.1 % for what another version of XLA may merge in another way.
    assert all(a <= 1.001 * b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["forward", "gradient"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_costs_what_its_formula_costs(name, kind):
    make, plain, shape = LAYERS[name]
    model, x = make(), jnp.ones((4, *shape))
    call = lambda model, x: model(x)  # noqa: E731
    ours, theirs = (costs(f, model, x, kind) for f in (call, plain))
    assert all(a <= 1.001 * b for a, b in zip(ours, theirs, strict=True))


def test_an_update_of_an_average_costs_what_its_formula_costs():
    model = nn.Linear(64, 64, key=jax.random.key(0))
    ema = nn.EMA(model, 0.99)
    averages, _ = eqx.partition(ema.average, eqx.is_array)

    def by_hand(averages, weight, steps, model):
        rate = 1 - 0.99
        weight = weight + rate * (1 - weight)
        move = lambda a, p: a + rate / weight * (p - a)  # noqa: E731
        return jax.tree.map(move, averages, model), weight, steps + 1

    programs = (
        (lambda ema, model: ema.update(model), (ema, model)),
        (by_hand, (averages, ema.weight, ema.steps, model)),
    )
    ours, theirs = (
        jax.jit(f).lower(*args).compile().cost_analysis() for f, args in programs
    )
    assert ours["bytes accessed"] <= 1.001 * theirs["bytes accessed"]
