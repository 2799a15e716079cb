"""The cost of a call of filter_jit with networks of the library's own layers.

The networks are like those of users: Modules in Modules, lists, activation functions
and rates as leaves, static sizes, BatchNorm's State, and the state of an optimiser.
Their arrays are tiny, and the compiled functions do almost nothing: "reading" sums one
array, and a "step" adds 1 to each array. So the time is that of the call. The networks
themselves are never called.

`jax.jit` gets the same arrays in nested dicts, which C++ flattens and builds: one dict for
each Module, with its fields as keys.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import equinox_like as eqx

from ._measure import Row, compare, show
from ._models import LIBRARIES, fresh

KEY = jax.random.key(0)
WIDTH = 4
JAX, JAX_LIST = "jax.jit", "jax.jit, a list"


def make_mlp(library: Any) -> tuple[Any, ...]:
    return (library.nn.MLP(WIDTH, WIDTH, WIDTH, 1, key=KEY),)


def make_lstm(library: Any) -> tuple[Any, ...]:
    class LSTM(library.Module):
        cell: Any
        head: Any

        def __init__(self, key: Any):
            keys = jax.random.split(key)
            self.cell = library.nn.LSTMCell(WIDTH, WIDTH, key=keys[0])
            self.head = library.nn.Linear(WIDTH, WIDTH, key=keys[1])

    return (LSTM(KEY),)


def make_transformer(
    library: Any, depth: int, container: Callable[..., Any] = list
) -> tuple[Any, ...]:
    nn = library.nn

    class Feedforward(library.Module):
        up: Any
        down: Any
        activation: Callable[..., Any]

        def __init__(self, key: Any):
            keys = jax.random.split(key)
            self.up = nn.Linear(WIDTH, 2 * WIDTH, key=keys[0])
            self.down = nn.Linear(2 * WIDTH, WIDTH, key=keys[1])
            self.activation = jax.nn.gelu

    class Block(library.Module):
        attention: Any
        attention_norm: Any
        feedforward: Any
        feedforward_norm: Any
        dropout: Any

        def __init__(self, key: Any):
            keys = jax.random.split(key)
            self.attention = nn.MultiheadAttention(2, WIDTH, key=keys[0])
            self.attention_norm = nn.LayerNorm(WIDTH)
            self.feedforward = Feedforward(keys[1])
            self.feedforward_norm = nn.LayerNorm(WIDTH)
            self.dropout = nn.Dropout(0.1)

    class Transformer(library.Module):
        blocks: Any

        def __init__(self, key: Any):
            self.blocks = container(Block(k) for k in jax.random.split(key, depth))

    return (Transformer(KEY),)


def make_resnet(library: Any, depth: int) -> tuple[Any, ...]:
    nn = library.nn

    class Block(library.Module):
        convs: list
        norms: list

        def __init__(self, key: Any):
            self.convs = [make_conv(k) for k in jax.random.split(key)]
            self.norms = [make_norm(library), make_norm(library)]

    class ResNet(library.Module):
        stem: Any
        norm: Any
        blocks: list
        head: Any
        activation: Callable[..., Any]

        def __init__(self, key: Any):
            stem_key, head_key, *keys = jax.random.split(key, depth + 2)
            self.stem = make_conv(stem_key)
            self.norm = make_norm(library)
            self.blocks = [Block(k) for k in keys]
            self.head = nn.Linear(WIDTH, WIDTH, key=head_key)
            self.activation = jax.nn.relu

    def make_conv(key: Any) -> Any:
        return nn.Conv2d(WIDTH, WIDTH, 1, use_bias=False, key=key)

    return nn.make_with_state(ResNet)(KEY)


def make_norms(library: Any, count: int) -> tuple[Any, ...]:
    class Norms(library.Module):
        norms: list

        def __init__(self):
            self.norms = [make_norm(library) for _ in range(count)]

    return library.nn.make_with_state(Norms)()


def make_norm(library: Any) -> Any:
    return library.nn.BatchNorm(WIDTH, "batch", mode="batch")


def read(*trees: Any) -> Any:
    return next(x for x in jax.tree.leaves(trees) if eqx.is_array(x)).sum()


def step(*trees: Any) -> Any:
    stepped = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, trees)
    return *stepped, read(trees)  # the last output represents the loss


def step_on_batch(parts: Any, x: Any, labels: Any, key: Any) -> Any:
    *stepped, loss = step(*parts)
    return tuple(stepped), loss + x.sum() + labels.sum() + jax.random.uniform(key)


def arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def as_dicts(tree: Any) -> dict[str, Any]:
    """The arrays of `tree`, without other leaves, with a dict for each node."""
    top: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if eqx.is_array(leaf):
            *names, last = (jax.tree_util.keystr((k,), simple=True) for k in path)
            node = top
            for name in names:
                node = node.setdefault(name, {})
            node[last] = leaf
    assert len(arrays(top)) == len(arrays(tree)), "two paths have the same names"
    return top


def jit(name: str, fun: Any, donate: bool = False) -> Any:
    """`fun`, compiled by the contender of this name, which may donate all arguments."""
    if name in LIBRARIES:
        donated = "all" if donate else "none"
        return LIBRARIES[name].filter_jit(fun, donate=donated)
    return jax.jit(fun, donate_argnums=tuple(range(3)) if donate else ())


class Loop:
    """A train loop: each call replaces all arguments by the function's outputs.

    Like most users' loops, it reads the loss, but no attribute of the model.
    """

    def __init__(self, fun: Any, parts: Sequence[Any]):
        self.fun = fun
        self.parts = parts

    def __call__(self) -> Any:
        *self.parts, loss = self.fun(*self.parts)
        return loss


class BatchLoop:
    """A train loop with `step_on_batch`. Batches come from NumPy, as from most loaders."""

    def __init__(self, fun: Any, parts: tuple[Any, ...]):
        self.fun = fun
        self.parts = parts
        self.batch = np.ones((8, WIDTH), np.float32), np.ones(8, np.int32), KEY

    def __call__(self) -> Any:
        self.parts, loss = self.fun(self.parts, *self.batch)
        return loss


@dataclass
class Case:
    """A network in the form that each contender takes.

    The parts are the arguments of a step: the model, its State if it has one, and the
    optimiser's state.
    """

    name: str
    parts: dict[str, tuple[Any, ...]]
    optimiser: str

    def __post_init__(self):
        # Shared by all tables, so that each step is compiled once.
        self.steps = {key: jit(key, step) for key in self.parts}

    def without_optimiser(self) -> dict[str, tuple[Any, ...]]:
        return {key: parts[:-1] for key, parts in self.parts.items()}

    def models(self) -> dict[str, Any]:
        return {key: parts[0] for key, parts in self.parts.items()}

    def title(self, trees: dict[str, Any]) -> str:
        """The name of the row for these arguments."""
        name = f"{self.name}, {self.optimiser}" if trees is self.parts else self.name
        return f"{name}, {len(arrays(trees['ours']))} arrays"


def make_case(
    name: str,
    make: Callable[[Any], tuple[Any, ...]],
    optimiser: str = "Adam",
) -> Case:
    parts: dict[str, Any] = {}
    for key, library in LIBRARIES.items():
        made = make(library)
        trainable = library.filter(made[0], library.is_inexact_array)
        chosen = optax.adam(1e-3) if optimiser == "Adam" else optax.sgd(1e-3)
        parts[key] = *made, chosen.init(trainable)
    ours = parts["ours"]
    plain = {JAX: tuple(map(as_dicts, ours))}
    if len(ours) == 3:
        # A State has many small nodes, so dicts are slower than a list.
        plain[JAX_LIST] = tuple(map(arrays, ours))
    return Case(name, plain | parts, optimiser)


def make_cases() -> list[Case]:
    def blocks(depth: int, container: Callable[..., Any] = list) -> Any:
        return partial(make_transformer, depth=depth, container=container)

    return [
        make_case("MLP", make_mlp),
        make_case("LSTM", make_lstm),
        make_case("1 block", blocks(1)),
        make_case("3 blocks", blocks(3)),
        make_case("12 blocks", blocks(12)),
        make_case("12 blocks, tuple", blocks(12, tuple)),
        make_case("48 blocks", blocks(48)),
        make_case("ResNet", partial(make_resnet, depth=8)),
    ]


def goal(trees: Any, some: str, many: str = "") -> str:
    """The goal for a tree: `some` for 12 arrays or more, and `many` for 200 or more."""
    count = len(arrays(trees))
    if count < 12:
        return "1.6x"
    return many if many and count >= 200 else some


def run(rounds: int) -> None:
    cases = make_cases()
    # SGD has no state arrays, so it is only used for steps.
    stepping = [make_case("MLP", make_mlp, "SGD"), *cases]
    show("Networks: reading what the user built", run_reading(cases, False, rounds))
    title = "Networks: `jax.tree.map`, and reading what it returned"
    show(title, run_updated(cases, rounds))
    show("Networks: carried step", run_carried(stepping, False, rounds))
    show("Networks: carried step with donation", run_carried(stepping, True, rounds))
    title = "Networks: carried step with donation, on a batch from NumPy with a key"
    show(title, run_batches(stepping, rounds))
    show(
        "Networks: reading what a compiled step returned",
        run_reading(cases, True, rounds),
    )
    show("Networks: a compiled method that reads", run_method(cases, rounds))
    show("Networks: a compiled model, called", run_callable(cases, rounds))
    show("Networks: ahead of time, reading", run_compiled_reading(cases, rounds))
    show("Networks: ahead of time, carried step", run_compiled_step(stepping, rounds))
    show("Networks: reading BatchNorms and their State", run_norms(rounds))


def run_reading(cases: list[Case], returned: bool, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        for trees in (case.without_optimiser(), case.parts):
            if returned:
                stepped = {k: case.steps[k](*x) for k, x in case.parts.items()}
                args = {k: stepped[k][: len(x)] for k, x in trees.items()}
            else:
                args = trees
            contenders = {k: partial(jit(k, read), *x) for k, x in args.items()}
            aim = goal(trees["ours"], "1.1x" if returned else "1.5x")
            rows.append(compare(case.title(trees), contenders, goal=aim, rounds=rounds))
    return rows


def run_updated(cases: list[Case], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        models = case.models()
        contenders = {
            k: partial(_update_and_read, jit(k, read), m) for k, m in models.items()
        }
        rows.append(compare(case.title(models), contenders, rounds=rounds))
    return rows


def _update_and_read(fun: Any, model: Any) -> Any:
    """An eager update gives a tree of new nodes, which no call has seen before."""
    return fun(jax.tree.map(lambda x: x, model))


def run_carried(cases: list[Case], donate: bool, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        if donate:
            # Copies, since each contender donates its arrays.
            contenders = {
                k: Loop(jit(k, step, donate=True), fresh(x))
                for k, x in case.parts.items()
            }
        else:
            contenders = {k: Loop(case.steps[k], x) for k, x in case.parts.items()}
        aim = goal(case.parts["ours"], "1.1x", "1.0x")
        rows.append(
            compare(case.title(case.parts), contenders, goal=aim, rounds=rounds)
        )
    return rows


def run_batches(cases: list[Case], rounds: int) -> list[Row]:
    """The libraries donate all arguments, as most users write it; JAX, the first one."""
    rows: list[Row] = []
    for case in cases:
        contenders = {}
        for k, parts in case.parts.items():
            if k in LIBRARIES:
                fun = jit(k, step_on_batch, donate=True)
            else:
                fun = jax.jit(step_on_batch, donate_argnums=0)
            contenders[k] = BatchLoop(fun, tuple(fresh(parts)))
        with warnings.catch_warnings():
            # Equinox has JAX warn that no output can take the key.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            rows.append(compare(case.title(case.parts), contenders, rounds=rounds))
    return rows


def run_method(cases: list[Case], rounds: int) -> list[Row]:
    classes = {key: make_probe(library) for key, library in LIBRARIES.items()}
    rows: list[Row] = []
    for case in cases:
        models = case.models()
        contenders = {
            key: partial(methodcaller("probe"), classes[key](model))
            if key in classes
            else partial(jit(key, read), model)
            for key, model in models.items()
        }
        rows.append(compare(case.title(models), contenders, rounds=rounds))
    return rows


def run_callable(cases: list[Case], rounds: int) -> list[Row]:
    classes = {key: make_probe(library) for key, library in LIBRARIES.items()}
    x = jnp.ones(())
    rows: list[Row] = []
    for case in cases:
        models = case.models()
        contenders = {
            key: partial(jit(key, classes[key](model)), x)
            if key in classes
            else partial(jit(key, lambda model, x: read(model) + x), model, x)
            for key, model in models.items()
        }
        rows.append(compare(case.title(models), contenders, rounds=rounds))
    return rows


def make_probe(library: Any) -> type:
    """A Module around a network, whose method and call do almost nothing."""

    class Probe(library.Module):
        model: Any

        @library.filter_jit
        def probe(self) -> jax.Array:
            return read(self.model)

        def __call__(self, x: jax.Array) -> jax.Array:
            return read(self.model) + x

    return Probe


def run_compiled_reading(cases: list[Case], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        trees = case.without_optimiser()
        contenders = {
            k: partial(jit(k, read).lower(*x).compile(), *x) for k, x in trees.items()
        }
        rows.append(compare(case.title(trees), contenders, rounds=rounds))
    return rows


def run_compiled_step(cases: list[Case], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        contenders = {
            k: Loop(case.steps[k].lower(*x).compile(), x) for k, x in case.parts.items()
        }
        rows.append(compare(case.title(case.parts), contenders, rounds=rounds))
    return rows


def run_norms(rounds: int) -> list[Row]:
    """The baseline is `jax.jit` on flat lists of the arrays, instead of dicts."""
    made = {key: make_norms(library, 24) for key, library in LIBRARIES.items()}
    plain = {
        JAX_LIST: tuple(map(arrays, made["ours"])),
        "jax.jit, dicts": tuple(map(as_dicts, made["ours"])),
    }
    contenders = {k: partial(jit(k, read), *x) for k, x in (plain | made).items()}
    title = f"24 BatchNorms, {len(arrays(made['ours']))} arrays"
    return [compare(title, contenders, goal="2x", rounds=rounds)]
