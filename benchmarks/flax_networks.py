"""The cost of a call of Flax NNX's `jit`, with the networks of `networks.py`.

NNX changes models in place, so a step returns only its loss. `jax.jit` gets the arrays
of the same model and optimiser in nested dicts, and returns new ones. By default NNX
uses its "graph" mode. With `graph=False` it treats models as trees, which is faster.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from ._measure import Row, compare, show
from .generation import flax_nnx
from .networks import JAX, WIDTH, Loop, jit, read, step


def make_networks(nnx: Any) -> dict[str, Callable[[], Any]]:
    rngs = nnx.Rngs(0)

    def linear(in_size: int, out_size: int) -> Any:
        return nnx.Linear(in_size, out_size, rngs=rngs)

    def conv() -> Any:
        return nnx.Conv(WIDTH, WIDTH, (1, 1), use_bias=False, rngs=rngs)

    def norm() -> Any:
        return nnx.BatchNorm(WIDTH, rngs=rngs)

    class MLP(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)])
            self.activation = jax.nn.relu

    class Feedforward(nnx.Module):
        def __init__(self):
            self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)
            self.activation = jax.nn.gelu

    class Block(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(
                2, WIDTH, use_bias=False, decode=False, rngs=rngs
            )
            self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.feedforward = Feedforward()
            self.feedforward_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1)

    class Transformer(nnx.Module):
        def __init__(self, depth: int):
            self.blocks = nnx.List([Block() for _ in range(depth)])

    class ResidualBlock(nnx.Module):
        def __init__(self):
            self.convs = nnx.List([conv(), conv()])
            self.norms = nnx.List([norm(), norm()])

    class ResNet(nnx.Module):
        def __init__(self, depth: int):
            self.stem, self.norm = conv(), norm()
            self.blocks = nnx.List([ResidualBlock() for _ in range(depth)])
            self.head = linear(WIDTH, WIDTH)
            self.activation = jax.nn.relu

    return {
        "MLP": MLP,
        "1 block": partial(Transformer, 1),
        "12 blocks": partial(Transformer, 12),
        "ResNet": partial(ResNet, 8),
    }


def contenders(nnx: Any, make: Callable[[], Any], kind: str) -> dict[str, Any]:
    """The contenders, each with its own model, since NNX changes models in place."""

    def parts() -> tuple[Any, ...]:
        model = make()
        if kind == "read":
            return (model,)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def nnx_read(model: Any) -> Any:
        return read(nnx.to_pure_dict(nnx.state(model)))

    def nnx_step(model: Any, optimiser: Any) -> Any:
        for part in (model, optimiser):
            state = nnx.state(part)
            nnx.update(part, jax.tree.map(lambda x: x + 1, state))
        return nnx_read(model)

    dicts = tuple(nnx.to_pure_dict(nnx.state(part)) for part in parts())
    fun, plain = (nnx_read, read) if kind == "read" else (nnx_step, step)
    donate = kind == "step with donation"
    donated = {"donate_argnums": (0, 1) if donate else ()}
    jitted = jit(JAX, plain, donate)
    return {
        JAX: partial(jitted, *dicts) if kind == "read" else Loop(jitted, dicts),
        "Flax NNX": partial(nnx.jit(fun, **donated), *parts()),
        "graph=False": partial(nnx.jit(fun, graph=False, **donated), *parts()),
    }


def run(rounds: int) -> None:
    nnx = flax_nnx()
    if nnx is None:
        print("\nNetworks of Flax NNX: it is not installed")
        return
    for kind in ("read", "step", "step with donation"):
        rows: list[Row] = []
        for name, make in make_networks(nnx).items():
            rows.append(compare(name, contenders(nnx, make, kind), rounds=rounds))
        show(f"Networks of Flax NNX: {kind}", rows)
