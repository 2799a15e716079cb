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
# Floats, steps, and numbers of checkpoints, of which large states need much memory.
CHECKPOINTS = [(4, 4096, [16, 1024, 8192, 50_000]), (50_000, 256, [16, 256])]
BATCH = 4


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


def sines(while_loop: Any, steps: int, checkpoints: int, x: jax.Array) -> jax.Array:
    body = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))  # noqa: E731
    options = {"kind": "checkpointed", "checkpoints": checkpoints}
    return while_loop(lambda carry: carry[0] < steps, body, (0, x), **options)[1]


def written(while_loop: Any, steps: int, checkpoints: int, x: jax.Array) -> jax.Array:
    """The values of all steps, written to a buffer."""

    def body(carry: Any) -> Any:
        i, x, xs = carry
        return i + 1, jnp.sin(x), xs.at[i].set(x)

    options = {"kind": "checkpointed", "checkpoints": checkpoints}
    init = 0, x, jnp.zeros((steps, *x.shape))
    buffers = lambda carry: carry[2]  # noqa: E731
    goes_on = lambda carry: carry[0] < steps  # noqa: E731
    return while_loop(goes_on, body, init, buffers=buffers, **options)[2]


def scanned(_: Any, steps: int, checkpoints: None, x: jax.Array) -> jax.Array:
    once = lambda x, _: (jnp.sin(x), None)  # noqa: E731
    return jax.lax.scan(once, x, length=steps)[0]


def scanned_and_written(_: Any, steps: int, checkpoints: None, x: Any) -> jax.Array:
    return jax.lax.scan(lambda x, _: (jnp.sin(x), x), x, length=steps)[1]


def gradient(f: Any, x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: f(x).sum())(x)


def gradient_of_batch(f: Any, x: jax.Array) -> jax.Array:
    return gradient(lambda x: jax.vmap(f)(jnp.outer(jnp.arange(BATCH), x)), x)


def linearised(f: Any, x: jax.Array) -> jax.Array:
    out, linear = jax.linearize(f, x)
    return jax.linear_transpose(linear, x)(out)[0]


FORMS = {
    "gradient": (gradient, sines, scanned),
    "buffer": (gradient, written, scanned_and_written),
    "vmap": (gradient_of_batch, sines, scanned),
    "linearize": (linearised, sines, scanned),
}


def run_checkpoints(rounds: int) -> None:
    theirs = importlib.import_module("equinox.internal") if peer else None
    for form, (derivative, loop, scan) in FORMS.items():
        rows = []
        for size, steps, counts in CHECKPOINTS:
            x = jnp.linspace(0.1, 1.0, size)
            for count in counts:
                loops = {
                    "lax.scan": partial(scan, None, steps, None),
                    "equinox_like": partial(loop, eqxi.while_loop, steps, count),
                }
                if theirs is not None:
                    loops["Equinox"] = partial(loop, theirs.while_loop, steps, count)
                calls, _ = _calls(
                    {k: partial(derivative, f) for k, f in loops.items()}, x
                )
                name = f"{steps} steps, {size} floats, {count}"
                rows.append(
                    compare(name, calls, rounds=rounds if size < 100 else 3, repeats=1)
                )
        show(f"Loops: {form}, by the number of checkpoints", rows)


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
    run_checkpoints(rounds)


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
