"""Loops with reverse mode: `while_loop` and `scan`; ours, by hand and by Equinox."""

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import equinox_like as eqx
from equinox_like import internal as eqxi

from ._measure import Contenders, compare, show
from ._models import peer

STEPS = 1024
SIZES = 2_000, 50_000


def step(carry: Any) -> Any:
    i, x = carry
    return i + 1, x + 0.01 * jnp.sin(x)


def goes_on(carry: Any) -> Any:
    return carry[0] < STEPS


def lax_loop(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(goes_on, step, (0, x))[1].sum()


def checkpointed(while_loop: Any, x: jax.Array) -> jax.Array:
    options = {"kind": "checkpointed", "max_steps": STEPS}
    return while_loop(goes_on, step, (0, x), **options)[1].sum()


def public(x: jax.Array) -> jax.Array:
    options = {"kind": "checkpointed", "max_steps": STEPS}
    init = (jnp.asarray(0), x)
    return eqx.filter_while_loop(goes_on, step, init, **options)[1].sum()


def scan_by_hand(x: jax.Array) -> jax.Array:
    """32 checkpointed scans of 32 steps; the backward pass runs each of them again."""
    once = lambda x, _: (step((0, x))[1], None)  # noqa: E731
    many = jax.checkpoint(
        lambda x, _: jax.lax.scan(once, x, length=32), prevent_cse=False
    )
    return jax.lax.scan(many, x, length=STEPS // 32)[0].sum()


def internal_scan(scan: Any, x: jax.Array) -> jax.Array:
    once = lambda x, _: (step((0, x))[1], None)  # noqa: E731
    return scan(once, x, None, STEPS, kind="checkpointed")[0].sum()


def run(rounds: int) -> None:
    theirs = importlib.import_module("equinox.internal") if peer else None
    forward, backward, memory = [], [], []
    for size in SIZES:
        x = jnp.linspace(0.1, 1.0, size)
        loops = {
            "lax.while_loop": lax_loop,
            "equinox_like": partial(checkpointed, eqxi.while_loop),
            "filter_while_loop": public,
        }
        gradients = {
            "scan by hand": scan_by_hand,
            "equinox_like": partial(checkpointed, eqxi.while_loop),
            "equinox_like, scan": partial(internal_scan, eqxi.scan),
        }
        if theirs is not None:
            loops["Equinox"] = partial(checkpointed, theirs.while_loop)
            gradients["Equinox"] = loops["Equinox"]
            gradients["Equinox, scan"] = partial(internal_scan, theirs.scan)
        name = f"{STEPS} steps, {size} floats"
        some = max(3, rounds // 4)
        forward.append(compare(name, _calls(loops, x)[0], rounds=some, repeats=1))
        calls, bytes_ = _calls({k: jax.grad(f) for k, f in gradients.items()}, x)
        backward.append(compare(name, calls, rounds=some, repeats=1))
        memory.append((name, bytes_))
    show("Loops: forward alone", forward)
    show("Loops: forward and backward", backward)
    print("\nLoops: temporary memory of forward and backward, by XLA's count")
    for name, bytes_ in memory:
        told = ", ".join(f"{key} {count / 1e6:.2f} MB" for key, count in bytes_.items())
        print(f"{name}: {told}")


def _finished(f: Any, x: jax.Array) -> jax.Array:
    return jax.block_until_ready(f(x))


def _calls(
    functions: dict[str, Any], x: jax.Array
) -> tuple[Contenders, dict[str, int]]:
    """A call of each compiled function, and its temporary memory in bytes."""
    compiled = {key: jax.jit(f).lower(x).compile() for key, f in functions.items()}
    return (
        {key: partial(_finished, f, x) for key, f in compiled.items()},
        {key: f.memory_analysis().temp_size_in_bytes for key, f in compiled.items()},
    )
