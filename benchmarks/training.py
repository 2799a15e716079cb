"""A train step of a small GPT in each library: a call, and compiling it.

12 blocks of width 32, with dropout and Adam, on 4 sequences of 32 tokens. The model and the
optimiser's state are donated. The first column is `jax.jit` on a list of the arrays of our
model. A call is timed until its loss is there, as in a loop that prints it.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import equinox_like as eqx

from ._measure import Row, compare, show, spread
from ._models import LIBRARIES
from .generation import flax_nnx

DEPTH, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 12, 32, 2, 64, 32, 4
PLAIN = "jax.jit, a list"
KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(BATCH, LENGTH + 1))
OPTIMISER = optax.adam(1e-3)


def cross_entropy(logits: Any, targets: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def make_gpt(library: Any) -> Any:
    nn = library.nn
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    class Block(library.Module):
        attention: Any
        mlp: Any
        norms: list
        dropout: Any

        def __init__(self, key: Any):
            keys = jax.random.split(key)
            self.attention = nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
            self.mlp = nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])
            self.norms = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
            self.dropout = nn.Dropout(0.1)

        def __call__(self, x: Any, key: Any) -> Any:
            keys = jax.random.split(key)
            y = jax.vmap(self.norms[0])(x)
            x = x + self.dropout(self.attention(y, y, y, mask=causal), key=keys[0])
            y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
            return x + self.dropout(y, key=keys[1])

    class GPT(library.Module):
        embedding: Any
        position: jax.Array
        blocks: list
        head: Any

        def __init__(self, key: Any):
            first, last, *keys = jax.random.split(key, DEPTH + 2)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=first)
            self.position = jnp.zeros((LENGTH, WIDTH))
            self.blocks = [Block(k) for k in keys]
            self.head = nn.Linear(WIDTH, VOCABULARY, key=last)

        def __call__(self, tokens: Any, key: Any) -> Any:
            x = jax.vmap(self.embedding)(tokens) + self.position
            for block, k in zip(self.blocks, jax.random.split(key, DEPTH), strict=True):
                x = block(x, k)
            return jax.vmap(self.head)(x)

    return GPT(KEY)


def make_step(library: Any) -> Callable[..., Any]:
    def loss_fn(model: Any, tokens: Any, key: Any) -> Any:
        keys = jax.random.split(key, BATCH)
        logits = jax.vmap(model)(tokens[:, :-1], keys)
        return cross_entropy(logits, tokens[:, 1:])

    def step(model: Any, state: Any, tokens: Any, key: Any) -> Any:
        loss, grads = library.filter_value_and_grad(loss_fn)(model, tokens, key)
        params = library.filter(model, library.is_inexact_array)
        updates, state = OPTIMISER.update(grads, state, params)
        return library.apply_updates(model, updates), state, loss

    return step


class Train:
    """A run of training: each call is a step, and returns when its loss is there."""

    def __init__(self, step: Callable[..., Any], *parts: Any):
        self.step, self.parts = step, parts

    def __call__(self) -> float:
        *self.parts, loss = self.step(*self.parts, TOKENS, KEY)
        return float(loss)


def train(name: str) -> Train:
    library = LIBRARIES[name]
    model = make_gpt(library)
    state = OPTIMISER.init(library.filter(model, library.is_inexact_array))
    # Equinox donates all arguments or none: it copies the tokens and the key in each call.
    donate: Any = ("model", "state") if library is eqx else "all"
    return Train(library.filter_jit(make_step(library), donate=donate), model, state)


def train_list() -> Train:
    """The step of our library, by `jax.jit` on its arrays."""
    run, step = train("ours"), make_step(eqx)
    trees, statics = eqx.partition(tuple(run.parts), eqx.is_array)
    arrays, treedef = jax.tree.flatten(trees)

    def plain(arrays: Any, tokens: Any, key: Any) -> Any:
        model, state = eqx.combine(jax.tree.unflatten(treedef, arrays), statics)
        *parts, loss = step(model, state, tokens, key)
        return jax.tree.leaves(eqx.filter(tuple(parts), eqx.is_array)), loss

    return Train(jax.jit(plain, donate_argnums=0), arrays)


def train_nnx(nnx: Any, graph: bool) -> Callable[[], float]:
    rngs = nnx.Rngs(0)

    class Block(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs
            )
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.dropout = nnx.Dropout(0.1, deterministic=False)

        def __call__(self, x: Any, key: Any) -> Any:
            keys = jax.random.split(key)
            mask = nnx.make_causal_mask(x[..., 0])
            y = self.attention(self.norms[0](x), mask=mask)
            x = x + self.dropout(y, rngs=keys[0])
            y = self.down(jax.nn.gelu(self.up(self.norms[1](x))))
            return x + self.dropout(y, rngs=keys[1])

    class GPT(nnx.Module):
        def __init__(self):
            self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.position = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
            self.blocks = nnx.List([Block() for _ in range(DEPTH)])
            self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

        def __call__(self, tokens: Any, key: Any) -> Any:
            x = self.embedding(tokens) + self.position[...]
            for block, k in zip(self.blocks, jax.random.split(key, DEPTH), strict=True):
                x = block(x, k)
            return self.head(x)

    def loss_fn(model: Any, tokens: Any, key: Any) -> Any:
        return cross_entropy(model(tokens[:, :-1], key), tokens[:, 1:])

    def step(model: Any, optimiser: Any, tokens: Any, key: Any) -> Any:
        grad = nnx.value_and_grad(loss_fn, graph=graph)
        loss, grads = grad(model, tokens, key)
        optimiser.update(model, grads)
        return loss

    model = GPT()
    optimiser = nnx.Optimizer(model, OPTIMISER, wrt=nnx.Param)
    jitted = nnx.jit(step, graph=graph, donate_argnums=(0, 1))
    return lambda: float(jitted(model, optimiser, TOKENS, KEY))


def make_all() -> dict[str, Callable[[], Callable[[], float]]]:
    """What makes the function that trains one step, which compiles when first called."""
    found: dict[str, Any] = {PLAIN: train_list}
    found |= {name: lambda name=name: train(name) for name in LIBRARIES}
    if (nnx := flax_nnx()) is not None:
        found |= {
            "Flax NNX": lambda: train_nnx(nnx, True),
            "graph=False": lambda: train_nnx(nnx, False),
        }
    return found


def run(rounds: int) -> None:
    makers = make_all()
    taken: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(max(3, rounds // 8)):
        for name, make in makers.items():
            jax.clear_caches()
            fun = make()
            start = time.process_time()
            fun()
            taken[name].append(time.process_time() - start)
    base = np.asarray(taken.pop(PLAIN))
    ratios = {name: spread(np.asarray(times) / base) for name, times in taken.items()}
    row = Row("tracing and compiling, CPU time", PLAIN, spread(base), ratios)
    called = compare(
        "a step", {name: make() for name, make in makers.items()}, rounds=rounds
    )
    show("A train step of a GPT of 12 small blocks", [row, called])
