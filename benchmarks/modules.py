"""Making Modules and reading from them, beside plain Python classes."""

import dataclasses
from functools import partial
from typing import Any

import jax

from ._measure import compare, show
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

    def modules(kind: str) -> dict[str, Any]:
        return {key: partial(made[kind], 1, 2) for key, made in classes.items()}

    instances = {key: made["own"](1, 2) for key, made in classes.items()}
    plain = Plain(1)

    def read(instance: Any) -> Any:
        # Ten reads, so that the call around them weighs little.
        def run() -> None:
            instance.a, instance.a, instance.a, instance.a, instance.a  # noqa: B018
            instance.a, instance.a, instance.a, instance.a, instance.a  # noqa: B018

        return run

    show(
        "Modules: construction beside a frozen dataclass with the same fields",
        [
            compare(
                "generated __init__",
                {"dataclass": partial(Generated, 1, 2)} | modules("generated"),
                goal="1.5x",
                rounds=rounds,
            ),
            compare(
                "generated, two static fields",
                {"dataclass": partial(Generated, 1, 2)} | modules("static"),
                goal="1.5x",
                rounds=rounds,
            ),
            compare(
                "own __init__",
                {"dataclass": partial(Generated, 1, 2)} | modules("own"),
                goal="3x",
                rounds=rounds,
            ),
            compare(
                "own __init__, beside one by hand",
                {"dataclass": partial(Own, 1, 2)} | modules("own"),
                goal="3x",
                rounds=rounds,
            ),
        ],
    )
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
