"""A transformer that trains on a GPU: time, memory, and the attention of cuDNN.

`jax.jit` gets the arrays of the same model in a list and builds the model while it traces,
so that all contenders compile the same program. Prints nothing without a GPU; there it
takes some minutes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import equinox_like as eqx

from . import layers, networks
from ._measure import Row, compare, show
from ._models import LIBRARIES, fresh

KEY = jax.random.key(0)
VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH = 512, 512, 8, 8, 256, 16
OPTIMISER = optax.adam(1e-3)
JAX = "jax.jit"


def make_transformer(library: Any) -> Any:
    nn = library.nn
    make_block = layers.make_block_class(library, WIDTH, HEADS)

    class Transformer(library.Module):
        embedding: Any
        blocks: list
        head: Any

        def __init__(self):
            keys = jax.random.split(KEY, DEPTH + 2)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
            self.blocks = [make_block(key) for key in keys[2:]]
            self.head = nn.Linear(WIDTH, VOCABULARY, key=keys[1])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = jax.vmap(self.embedding)(tokens)
            mask = jnp.tri(len(tokens), dtype=bool)
            for block in self.blocks:
                x = block(x, mask)
            return jax.vmap(self.head)(x)

    return Transformer()


def train_step(library: Any, model: Any, opt_state: Any, tokens: jax.Array) -> Any:
    def loss_fn(model: Any) -> jax.Array:
        logits = jax.vmap(model)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        ).mean()

    loss, grads = library.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = OPTIMISER.update(grads, opt_state)
    return library.apply_updates(model, updates), opt_state, loss


def make_step(name: str, donate: bool) -> tuple[Any, list[Any]]:
    """A step of this contender, and its arguments but for the batch."""
    library = LIBRARIES.get(name, eqx)
    model = make_transformer(library)
    opt_state = OPTIMISER.init(library.filter(model, library.is_inexact_array))
    parts = [model, opt_state]
    step = partial(train_step, library)
    if name in LIBRARIES:
        return library.filter_jit(step, donate="all" if donate else "none"), parts
    arrays, static = library.partition(parts, library.is_array)
    leaves, treedef = jax.tree.flatten(arrays)

    def plain(leaves: list[Any], tokens: jax.Array) -> Any:
        parts = library.combine(jax.tree.unflatten(treedef, leaves), static)
        *stepped, loss = step(*parts, tokens)
        return jax.tree.leaves(library.filter(stepped, library.is_array)), loss

    return jax.jit(plain, donate_argnums=0 if donate else ()), [leaves]


class Training:
    def __init__(self, name: str, donate: bool):
        self.step, parts = make_step(name, donate)
        self.parts = fresh(parts)
        self.tokens = jax.random.randint(KEY, (BATCH, LENGTH), 0, VOCABULARY)

    def __call__(self) -> jax.Array:
        # A batch of its own for each call: one that is donated cannot be used again.
        *self.parts, loss = self.step(*self.parts, self.tokens + 0)
        return loss


def run(rounds: int) -> None:
    if jax.default_backend() != "gpu":
        print("\nGPU: there is none")
        return
    print(f"\nGPU: {jax.devices()[0].device_kind}")
    run_memory()
    run_attention(rounds)
    run_training(rounds)
    run_calls(rounds)


def run_calls(rounds: int) -> None:
    """Calls of networks whose arrays are tiny, as on the CPU."""
    blocks = partial(networks.make_transformer, depth=3)
    cases = [
        networks.make_case("MLP", networks.make_mlp),
        networks.make_case("1 block", partial(networks.make_transformer, depth=1)),
        networks.make_case("3 blocks", blocks),
        networks.make_case("ResNet", partial(networks.make_resnet, depth=8)),
    ]
    show("GPU: reading", networks.run_reading(cases, False, rounds))
    show("GPU: carried step", networks.run_carried(cases, False, rounds))
    show("GPU: with donation", networks.run_carried(cases, True, rounds))


def run_training(rounds: int) -> None:
    """Steps per second, each one waited for in turn by the next."""
    rows: list[Row] = []
    for donate in (False, True):
        contenders = {
            name: many(Training(name, donate), 10) for name in (JAX, *LIBRARIES)
        }
        title = "10 train steps" + (", with donation" if donate else "")
        rows.append(compare(title, contenders, rounds=rounds, repeats=1))
    show(f"GPU: a transformer of {DEPTH} blocks, width {WIDTH}, Adam", rows)


def many(call: Callable[[], Any], number: int) -> Callable[[], Any]:
    def calls() -> Any:
        for _ in range(number):
            out = call()
        return jax.block_until_ready(out)

    return calls


def run_memory() -> None:
    """The most memory that the allocator held, each measured in a process of its own."""
    print("\nGPU: peak memory of 4 train steps in MB; XLA's temporary and aliased MB")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = {}
    for donate in (False, True):
        for name in (JAX, *LIBRARIES):
            arguments = ["-m", "benchmarks.gpu", name, str(int(donate))]
            processes[name, donate] = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
    for (name, donate), process in processes.items():
        text, _ = process.communicate()
        peak, temporary, aliased = (
            x / 2**20 for x in json.loads(text.splitlines()[-1])
        )
        title = name + (", donated" if donate else "")
        print(f"{title:22}{peak:10.1f}{temporary:12.1f}{aliased:12.1f}", flush=True)


def report_memory(name: str, donate: bool) -> None:
    training = Training(name, donate)
    for _ in range(4):
        training().block_until_ready()
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    lowered = training.step.lower(*training.parts, training.tokens)
    compiled = lowered.compile()
    compiled = getattr(compiled, "compiled", compiled)  # Equinox's has no such method
    analysis = compiled.memory_analysis()
    sizes = analysis.temp_size_in_bytes, analysis.alias_size_in_bytes
    print(json.dumps([peak, *sizes]))


def run_attention(rounds: int) -> None:
    """Causal attention in bfloat16, and its gradient, by each implementation."""
    rows: list[Row] = []
    for length in (512, 2048, 8192):
        shape = (max(1, 8192 // length), length, 16, 64)
        given = [
            jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(KEY, 3)
        ]

        def loss(name: Any, q: Any, k: Any, v: Any) -> jax.Array:
            attend = partial(
                eqx.nn.dot_product_attention, is_causal=True, implementation=name
            )
            return (jax.vmap(attend)(q, k, v).astype(jnp.float32) ** 2).mean()

        exact = jax.grad(partial(loss, "xla"), (0, 1, 2))
        names = ("xla", None, "cudnn", "auto")
        calls, memory = {}, {}
        for name in names:
            compiled = jax.jit(jax.grad(partial(loss, name), (0, 1, 2)))
            compiled = compiled.lower(*given).compile()
            temporary = compiled.memory_analysis().temp_size_in_bytes
            memory[str(name)] = round(temporary / 2**20)
            calls[str(name)] = many(partial(compiled, *given), 5)
        outs = {name: call() for name, call in calls.items()}
        with jax.default_matmul_precision("highest"):
            inputs = [x.astype(jnp.float32) for x in given]
            expected = jax.jit(exact)(*inputs) if length < 8192 else outs["xla"]
        errors = {
            name: max(relative(a, b) for a, b in zip(out, expected, strict=True))
            for name, out in outs.items()
        }
        print(f"length {length}: temporary MB {memory}, relative error {errors}")
        rows.append(compare(f"length {length}", calls, rounds=rounds, repeats=1))
    show("GPU: gradient of causal attention, 16 heads of 64, bfloat16", rows)


def relative(a: jax.Array, b: jax.Array) -> float:
    x, y = (np.asarray(z.astype(jnp.float32)) for z in (a, b))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


if __name__ == "__main__":
    report_memory(sys.argv[1], bool(int(sys.argv[2])))
