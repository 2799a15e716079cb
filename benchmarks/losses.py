"""The loss of a large vocabulary and its gradient, with all logits and without them.

On a GPU in bfloat16, and for as many tokens as it is used for there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import equinox_like as eqx

from ._measure import compare, show

WORDS = 65_536


def by_logits(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.einsum("nd,vd->nv", x, weight, preferred_element_type=jnp.float32)
    right = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - right


def run(rounds: int) -> None:
    on_gpu = jax.default_backend() == "gpu"
    number, size = (8192, 2048) if on_gpu else (2048, 256)
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (number, size), dtype)
    weight = jax.random.normal(keys[1], (WORDS, size), dtype) / np.sqrt(size).astype(
        dtype
    )
    labels = jax.random.randint(keys[2], (number,), 0, WORDS)
    losses: dict[str, Callable[..., jax.Array]] = {"all logits": by_logits}
    for block in (1024, 2048, 8192):
        losses[f"block={block}"] = partial(eqx.nn.linear_cross_entropy, block=block)
    calls: dict[str, Callable[[], Any]] = {}
    for name, loss in losses.items():

        def mean(x: jax.Array, weight: jax.Array, loss: Any = loss) -> jax.Array:
            return loss(x, weight, labels).mean()

        program = jax.jit(jax.value_and_grad(mean, (0, 1))).lower(x, weight).compile()
        temporary = program.memory_analysis().temp_size_in_bytes / 1e6
        calls[name] = lambda program=program: jax.block_until_ready(program(x, weight))
        print(
            f"{name:20}{temporary:10.1f} MB of temporary memory, loss {calls[name]()[0]}"
        )
    row = f"{number} tokens of width {size}"
    few = rounds if on_gpu else max(3, rounds // 8)
    rows = [compare(row, calls, goal="1.1x", rounds=few, repeats=1)]
    show(f"Loss of {WORDS} words and its gradient, {dtype.__name__}", rows)
