"""Defining, constructing and reading Modules, compared with plain Python classes."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ._measure import Row, compare, show
from ._models import LIBRARIES

_set = object.__setattr__


@dataclasses.dataclass(frozen=True)
class Generated:
    a: Any
    b: Any
    c: Any = 3
    d: Any = 4


@dataclasses.dataclass(frozen=True)
class Own:
    a: Any
    b: Any
    c: Any
    d: Any

    def __init__(self, a, b, c=3, d=4):
        _set(self, "a", a)
        _set(self, "b", b)
        _set(self, "c", c)
        _set(self, "d", d)


class Plain:
    def __init__(self, a):
        self.a = a

    def method(self, x):
        return x


def make_classes(library: Any) -> dict[str, type]:
    class GeneratedModule(library.Module):
        a: Any
        b: Any
        c: Any = 3
        d: Any = 4

    class StaticModule(library.Module):
        a: Any
        b: Any
        c: Any = library.field(static=True, default=3)
        d: Any = library.field(static=True, default=4)

    class OwnModule(library.Module):
        a: Any
        b: Any
        c: Any
        d: Any

        def __init__(self, a, b, c=3, d=4):
            self.a = a
            self.b = b
            self.c = c
            self.d = d

        def method(self, x):
            return x

    return {"generated": GeneratedModule, "static": StaticModule, "own": OwnModule}


def define_dataclass() -> type:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Layer:
        a: Any
        b: Any
        c: Any = 3
        d: Any = dataclasses.field(default=4, metadata={"static": True})

        def __call__(self, x):
            return x

        def method(self, x):
            return x

    return Layer


def define_module(library: Any) -> type:
    class Layer(library.Module):
        a: Any
        b: Any
        c: Any = 3
        d: Any = library.field(static=True, default=4)

        def __call__(self, x):
            return x

        def method(self, x):
            return x

    return Layer


def run(rounds: int) -> None:
    show(
        "Modules: defining a class, beside a frozen dataclass registered with JAX",
        [
            compare(
                "four fields, two methods",
                {"dataclass": define_dataclass}
                | {key: partial(define_module, lib) for key, lib in LIBRARIES.items()},
                goal="1x",
                rounds=rounds,
                repeats=1,
            )
        ],
    )
    classes = {key: make_classes(library) for key, library in LIBRARIES.items()}
    instances = {key: made["own"](1, 2) for key, made in classes.items()}
    plain = Plain(1)

    def read(instance: Any) -> Any:
        # Ten reads, so that the overhead of the call matters little.
        def run() -> None:
            instance.a, instance.a, instance.a, instance.a, instance.a  # noqa: B018
            instance.a, instance.a, instance.a, instance.a, instance.a  # noqa: B018

        return run

    show(
        "Modules: reading, beside a plain class",
        [
            compare(
                "attribute, ten times",
                {"plain class": read(plain)}
                | {key: read(x) for key, x in instances.items()},
                goal="1x",
                rounds=rounds,
            ),
        ],
    )
    methods = {"plain class": plain} | instances
    show(
        "Modules: a bound method, beside a plain class",
        [
            compare(
                "reading and calling it",
                {key: lambda x=x: x.method(1) for key, x in methods.items()},
                rounds=rounds,
            ),
        ],
    )
    show(
        "Modules: reading a bound method, in absolute time",
        [
            compare(key, {"time": lambda x=x: x.method}, goal=goal, rounds=rounds)
            for key, x in methods.items()
            for goal in ["0.5 us" if key == "ours" else ""]
        ],
    )


def run_construction(rounds: int) -> None:
    """Construction with different kinds of values.

    Layers are instances of the contender's own class.
    """
    classes = {"dataclass": {"generated": Generated, "own": Own}}
    classes |= {key: make_classes(library) for key, library in LIBRARIES.items()}
    w, b = jnp.ones((4, 4)), jnp.ones(4)
    layers = {
        key: [made["generated"](w, b) for _ in range(8)]
        for key, made in classes.items()
    }
    arguments = {
        "two numbers": lambda layers: (1, 2),
        "four arrays": lambda layers: (w, b, w, b),
        "four layers": lambda layers: tuple(layers[:4]),
        "two lists of four layers": lambda layers: (layers[:4], layers[4:]),
        "array, layer, list of layers": lambda layers: (w, layers[0], layers[1:]),
    }

    def row(
        kind: str, values: str, goal: str, baseline: str = "", name: str = ""
    ) -> Row:
        contenders = {}
        for key, made in classes.items():
            chosen = made[baseline or kind if key == "dataclass" else kind]
            contenders[key] = partial(chosen, *arguments[values](layers[key]))
        return compare(name or values, contenders, goal=goal, rounds=rounds)

    rows = [row("generated", values, "3x") for values in arguments]
    name = "two numbers, two static fields"
    rows.append(row("static", "two numbers", "3x", "generated", name))
    show("Construction: generated __init__, beside a frozen dataclass", rows)

    rows = [row("own", values, "5x") for values in arguments]
    name = "two numbers, beside a generated"
    rows.append(row("own", "two numbers", "5x", "generated", name))
    title = "Construction: user-written __init__, beside a frozen dataclass with one"
    show(title, rows)
