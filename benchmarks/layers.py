"""Networks of the library's layers, compared with plain jax.numpy and with Equinox.

All of them compute the same numbers, which is checked first. The time is that of the
compiled program. Compiling is timed for 24 transformer blocks, for dropout, and for the
first construction of each network, which compiles its initial values.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import equinox_like as eqx

from ._measure import Row, compare, show, spread
from ._models import LIBRARIES

KEY = jax.random.key(0)
WIDTH, HEADS, LENGTH = 64, 4, 64


def linear(p: Any, x: jax.Array) -> jax.Array:
    return p.weight @ x + p.bias


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean()
    return centred * jax.lax.rsqrt(jnp.mean(centred**2) + 1e-5) * p.weight + p.bias


def plain_mlp(m: Any, x: jax.Array) -> jax.Array:
    for layer in m.layers[:-1]:
        x = jax.nn.relu(linear(layer, x))
    return linear(m.layers[-1], x)


def make_cnn(library: Any) -> Any:
    nn = library.nn

    class CNN(library.Module):
        first: Any
        second: Any
        last: Any

        def __init__(self, key: Any):
            keys = jax.random.split(key, 3)
            self.first = nn.Conv2d(3, 16, 3, padding=1, key=keys[0])
            self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1])
            self.last = nn.Linear(32, 10, key=keys[2])

        def __call__(self, x: jax.Array) -> jax.Array:
            x = jax.nn.relu(self.first(x))
            x = jax.nn.relu(self.second(x))
            return self.last(x.mean((1, 2)))

    return CNN(KEY)


def plain_cnn(m: Any, x: jax.Array) -> jax.Array:
    for conv, stride in ((m.first, 1), (m.second, 2)):
        padding = [(1, 1), (1, 1)]
        y = jax.lax.conv_general_dilated(x[None], conv.weight, (stride,) * 2, padding)
        x = jax.nn.relu(y[0] + conv.bias)
    return linear(m.last, x.mean((1, 2)))


def make_block_class(library: Any, width: int = WIDTH, heads: int = HEADS) -> Any:
    nn = library.nn

    class Block(library.Module):
        norms: Any
        attention: Any
        mlp: Any

        def __init__(self, key: Any):
            keys = jax.random.split(key)
            self.norms = [nn.LayerNorm(width), nn.LayerNorm(width)]
            self.attention = nn.MultiheadAttention(heads, width, key=keys[0])
            self.mlp = nn.MLP(
                width, width, 4 * width, 1, activation=jax.nn.gelu, key=keys[1]
            )

        def __call__(self, x: jax.Array, mask: Any = None) -> jax.Array:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y, mask)
            return x + jax.vmap(lambda r: self.mlp(self.norms[1](r)))(x)

    return Block


def plain_block(m: Any, x: jax.Array) -> jax.Array:
    y = jax.vmap(partial(layer_norm, m.norms[0]))(x)
    a = m.attention
    q, k, v = (
        (y @ p.weight.T).reshape(LENGTH, HEADS, -1)
        for p in (a.query_proj, a.key_proj, a.value_proj)
    )
    logits = jnp.einsum("shd,Shd->hsS", q / np.sqrt(q.shape[-1]), k)
    mixed = jnp.einsum("hsS,Shd->shd", jax.nn.softmax(logits), v)
    x = x + mixed.reshape(LENGTH, -1) @ a.output_proj.weight.T
    y = jax.vmap(partial(layer_norm, m.norms[1]))(x)
    first, second = m.mlp.layers
    y = jax.nn.gelu(y @ first.weight.T + first.bias)
    return x + y @ second.weight.T + second.bias


def mapped_block(m: Any, x: jax.Array) -> jax.Array:
    """The same block, by `jax.vmap` of functions of one row and one head, as in nn."""
    y = jax.vmap(partial(layer_norm, m.norms[0]))(x)
    a = m.attention
    q, k, v = (
        jax.vmap(partial(jnp.inner, p.weight))(y).reshape(LENGTH, HEADS, -1)
        for p in (a.query_proj, a.key_proj, a.value_proj)
    )

    def head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        logits = jnp.einsum("sd,Sd->sS", q / np.sqrt(q.shape[-1]), k)
        return jnp.einsum("sS,Sd->sd", jax.nn.softmax(logits), v)

    mixed = jax.vmap(head, in_axes=1, out_axes=1)(q, k, v).reshape(LENGTH, -1)
    x = x + jax.vmap(partial(jnp.inner, a.output_proj.weight))(mixed)
    first, second = m.mlp.layers

    def mlp(row: jax.Array) -> jax.Array:
        row = layer_norm(m.norms[1], row)
        hidden = jax.nn.gelu(jnp.inner(first.weight, row) + first.bias)
        return jnp.inner(second.weight, hidden) + second.bias

    return x + jax.vmap(mlp)(x)


def run_cell(cell: Any, xs: jax.Array) -> jax.Array:
    def step(h: jax.Array, x: jax.Array):
        return cell(x, h), None

    return jax.lax.scan(step, jnp.zeros(WIDTH), xs)[0]


def plain_cell(m: Any, x: jax.Array, h: jax.Array) -> jax.Array:
    i = jnp.split(m.weight_ih @ x + m.bias, 3)
    j = jnp.split(m.weight_hh @ h, 3)
    reset, inp = jax.nn.sigmoid(i[0] + j[0]), jax.nn.sigmoid(i[1] + j[1])
    new = jnp.tanh(i[2] + reset * (j[2] + m.bias_n))
    return new + inp * (h - new)


def networks() -> dict[str, tuple[Any, Any, Any, jax.Array]]:
    """By name: its constructor, how it is called, its plain form, and its input."""
    call = lambda m, x: m(x)  # noqa: E731
    return {
        "MLP": (
            lambda lib: lib.nn.MLP(WIDTH, 10, 256, 3, key=KEY),
            call,
            plain_mlp,
            jax.random.normal(KEY, (128, WIDTH)),
        ),
        "CNN": (make_cnn, call, plain_cnn, jax.random.normal(KEY, (16, 3, 32, 32))),
        "transformer block": (
            lambda lib: make_block_class(lib)(KEY),
            call,
            plain_block,
            jax.random.normal(KEY, (8, LENGTH, WIDTH)),
        ),
        "GRU, 256 steps": (
            lambda lib: lib.nn.GRUCell(WIDTH, WIDTH, key=KEY),
            run_cell,
            lambda m, xs: run_cell(partial(plain_cell, m), xs),
            jax.random.normal(KEY, (16, 256, WIDTH)),
        ),
    }


def run(rounds: int) -> None:
    rows = []
    for name, (make, call, plain, x) in networks().items():
        models = {"jax.numpy": (make(eqx), plain)}
        models |= {key: (make(lib), call) for key, lib in LIBRARIES.items()}
        forward, gradient = {}, {}
        for key, (model, function) in models.items():
            forward[key], gradient[key] = _compiled(model, function, x)
        _require_equal({key: f() for key, f in forward.items()})
        some = max(5, rounds // 2)
        for kind, contenders in (("forward", forward), ("gradient", gradient)):
            row = f"{name}, {kind}"
            rows.append(compare(row, contenders, goal="1x", rounds=some))
    show("Layers: time of the compiled program", rows)
    run_first_construction(rounds)
    run_dropout(rounds)
    run_depth(rounds)


def _compiled(model: Any, function: Any, x: jax.Array) -> list[Callable[[], Any]]:
    """The compiled forward pass, and value and gradient, with their arguments bound."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def forward(arrays: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(partial(function, eqx.combine(arrays, static)))(x)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        return (forward(arrays, x) ** 2).sum()

    return [
        lambda f=f: jax.block_until_ready(f(arrays, x))
        for f in map(jax.jit, (forward, jax.value_and_grad(loss)))
    ]


def _require_equal(outs: dict[str, Any]) -> None:
    first, *others = outs.values()
    for other in others:
        assert np.allclose(first, other, rtol=1e-3, atol=1e-4)


def run_first_construction(rounds: int) -> None:
    """Construction without anything in JAX's caches, beside drawing the same shapes."""
    rows = []
    for name, (make, *_) in networks().items():
        shapes = [x.shape for x in jax.tree.leaves(make(eqx)) if eqx.is_array(x)]

        def draw(shapes: Any = shapes) -> Any:
            return [jax.random.uniform(KEY, shape) for shape in shapes]

        contenders = {"jax.random": partial(_uncached, draw)}
        for key, library in LIBRARIES.items():
            contenders[key] = partial(_uncached, partial(make, library))
        few = max(3, rounds // 8)
        rows.append(compare(name, contenders, rounds=few, repeats=1))
    show("Layers: first construction", rows)


def _uncached(make: Callable[[], Any]) -> Any:
    jax.clear_caches()
    return [x for x in jax.tree.leaves(make()) if eqx.is_array(x)]


def run_dropout(rounds: int) -> None:
    """Lowering and compiling the gradient of a perceptron with dropout."""
    x, keys = jax.random.normal(KEY, (LENGTH, WIDTH)), jax.random.split(KEY, 4)
    linears = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]

    def by_hand(x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    drops: dict[str, Callable[..., Any]] = {
        "jax.random": by_hand,
        "no dropout": lambda x, key: x,
    }
    for name, library in LIBRARIES.items():
        dropout = library.nn.Dropout(0.1)
        drops[name] = lambda x, key, dropout=dropout: dropout(x, key=key)

    def compiled(drop: Callable[..., Any]) -> Any:
        def loss(linears: Any, x: jax.Array, keys: Any) -> jax.Array:
            for layer, key in zip(linears, keys, strict=True):
                x = drop(jax.nn.relu(x @ layer.weight.T + layer.bias), key)
            return (x**2).sum()

        return jax.jit(jax.grad(loss)).lower(linears, x, keys).compile()

    contenders = {name: partial(compiled, drop) for name, drop in drops.items()}
    few = max(3, rounds // 8)
    row = compare("perceptron of 4 layers", contenders, rounds=few, repeats=1)
    show("Layers: lowering and compiling a gradient with dropout", [row])


def run_depth(rounds: int) -> None:
    """24 layers, in a Python loop and as one `Stacked`.

    Lowering and compiling are measured in CPU time, which other processes affect less.
    Both together are measured in wall time, which is how long a user waits.
    """
    x = jax.random.normal(KEY, (LENGTH, WIDTH))
    keys = jax.random.split(KEY, 24)
    programs: dict[str, Any] = {}
    for key, library in LIBRARIES.items():
        blocks = [make_block_class(library)(k) for k in keys]
        programs[key] = _program(blocks, lambda m, x: m(x), library), x
        if key == "ours":
            programs["jax.numpy"] = _program(blocks, plain_block, library), x
            programs["with vmap"] = _program(blocks, mapped_block, library), x
    for name, checkpoint in (("Stacked", None), ("Stacked, remat", True)):
        make = make_block_class(eqx)
        stacked = eqx.nn.Stacked(make, depth=24, key=KEY, checkpoint=checkpoint)
        programs[name] = _program([stacked], lambda m, x: m(x), eqx), x
    programs["lax.scan"] = _program([stacked], _plain_scan, eqx), x
    order = sorted(programs, key=lambda key: key != "jax.numpy")
    lowering: dict[str, list[float]] = {key: [] for key in order}
    compiling: dict[str, list[float]] = {key: [] for key in order}
    waiting: dict[str, list[float]] = {key: [] for key in order}
    for _ in range(max(3, rounds // 8)):
        for key in order:
            (arrays, f), x = programs[key]
            begin = time.perf_counter()
            start = time.process_time()
            # A new function each time, which is not in JAX's caches.
            lowered = jax.jit(lambda a, x, f=f: f(a, x)).lower(arrays, x)
            middle = time.process_time()
            lowered.compile()
            lowering[key].append(middle - start)
            compiling[key].append(time.process_time() - middle)
            waiting[key].append(time.perf_counter() - begin)
    show(
        "Layers: gradient of a transformer of 24 blocks",
        [
            Row(
                name,
                "jax.numpy",
                spread(times["jax.numpy"]),
                {
                    key: spread(np.divide(times[key], times["jax.numpy"]))
                    for key in order[1:]
                },
                goal,
            )
            for name, times, goal in (
                ("lowering", lowering, "1.02x"),
                ("compiling", compiling, ""),
                ("both, wall time", waiting, "0.35x"),
            )
        ],
    )


def _plain_scan(stacked: Any, x: jax.Array) -> jax.Array:
    arrays, rest = eqx.partition(stacked.layers, eqx.is_array)
    step = lambda x, arrays: (plain_block(eqx.combine(arrays, rest), x), None)  # noqa: E731
    return jax.lax.scan(step, x, arrays)[0]


def _program(blocks: Any, function: Any, library: Any) -> tuple[Any, Any]:
    arrays, static = library.partition(blocks, library.is_array)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        for block in library.combine(arrays, static):
            x = function(block, x)
        return (x**2).sum()

    return arrays, jax.grad(loss)
