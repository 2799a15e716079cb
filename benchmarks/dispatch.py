"""What a call of filter_jit costs beside jax.jit on the same arrays in nested dicts.

`jax.jit` takes Modules, too, if all their leaves are arrays. What it then takes longer is
what flattening and building them in Python costs, which no function of ours can be without.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import equinox_like as eqx

from ._measure import Row, compare, show
from ._models import LIBRARIES, SIZES, bare, fresh, nested_dict, net


def read(tree: Any) -> Any:
    return next(x for x in jax.tree.leaves(tree) if eqx.is_array(x)).sum()


def step(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, tree)


class Loop:
    """A train loop: each call replaces the state by the function's output."""

    def __init__(self, fun: Any, state: Any):
        self.fun = fun
        self.state = state

    def __call__(self) -> Any:
        self.state = self.fun(self.state)
        return self.state


def run(rounds: int) -> None:
    rows: list[Row] = []
    for size in SIZES:
        tree = nested_dict(size)
        for name, fun in (("read", read), ("step", step)):
            contenders: dict[str, Any] = {"jax.jit": partial(jax.jit(fun), tree)}
            modules = bare(net("ours", tree))
            contenders["jax.jit, Modules"] = partial(jax.jit(fun), modules)
            for key, library in LIBRARIES.items():
                jitted = library.filter_jit(fun)
                contenders[f"{key}, dicts"] = partial(jitted, tree)
                contenders[f"{key}, Modules"] = partial(jitted, net(key, tree))
            rows.append(
                compare(
                    f"{name}, {size} leaves",
                    contenders,
                    goal="1.5x" if size == SIZES[0] else "1.3x",
                    rounds=rounds,
                )
            )
        contenders = {"jax.jit": Loop(jax.jit(step, donate_argnums=0), fresh(tree))}
        modules = fresh(bare(net("ours", tree)))
        contenders["jax.jit, Modules"] = Loop(jax.jit(step, donate_argnums=0), modules)
        for key, library in LIBRARIES.items():
            # One function each: a donating function takes a single kind of argument.
            for kind, state in (("dicts", tree), ("Modules", net(key, tree))):
                jitted = library.filter_jit(lambda t: step(t), donate="all")
                contenders[f"{key}, {kind}"] = Loop(jitted, fresh(state))
        rows.append(
            compare(
                f"step with donation, {size} leaves",
                contenders,
                goal="1.5x" if size == SIZES[0] else "1.3x",
                rounds=rounds,
            )
        )
    show("Dispatch: time of a call, until it returns", rows)


def run_modes(rounds: int) -> None:
    """All ways to donate, beside `jax.jit` which donates the same arrays."""
    rows: list[Row] = []
    for size in SIZES:
        for kind, state in (
            ("dicts", nested_dict(size)),
            ("Modules", net("ours", nested_dict(size))),
        ):
            plain = jax.jit(step, donate_argnums=0)
            contenders = {"jax.jit": Loop(plain, fresh(nested_dict(size)))}
            for mode in ("arrays", "warn", "strict", ("tree",)):
                jitted = eqx.filter_jit(lambda tree: step(tree), donate=mode)
                contenders[str(mode)] = Loop(jitted, fresh(state))
            goal = "1.5x" if size == SIZES[0] else "1.3x"
            name = f"{kind}, {size} leaves"
            rows.append(compare(name, contenders, goal=goal, rounds=rounds))
    show("Modes of donation: time of a call, until it returns", rows)


def run_stages(rounds: int) -> None:
    """What was compiled ahead of time, beside what JAX compiled ahead of time."""
    rows: list[Row] = []
    for size in SIZES:
        tree = nested_dict(size)
        contenders: dict[str, Any] = {
            "jax, compiled": partial(jax.jit(step).lower(tree).compile(), tree)
        }
        for key, library in LIBRARIES.items():
            jitted = library.filter_jit(step)
            for kind, state in (("dicts", tree), ("Modules", net(key, tree))):
                compiled = jitted.lower(state).compile()
                contenders[f"{key}, {kind}"] = partial(compiled, state)
        goal = "1.5x" if size == SIZES[0] else "1.3x"
        name = f"step, {size} leaves"
        rows.append(compare(name, contenders, goal=goal, rounds=rounds))
    show("Ahead of time: a call of a compiled function, until it returns", rows)


def run_methods(rounds: int) -> None:
    """Methods that are compiled, read from the instance at each call."""
    rows: list[Row] = []
    x = jnp.ones(())
    for size in SIZES:
        tree = nested_dict(size)
        jitted = jax.jit(lambda tree, x: read(tree) * x)
        contenders: dict[str, Any] = {"jax.jit": partial(jitted, tree, x)}
        for key, library in LIBRARIES.items():
            model = with_method(library, net(key, tree))
            contenders[f"{key}, method"] = partial(call_method, model, x)
            contenders[f"{key}, bound"] = partial(library.filter_jit(model.plain), x)
        name = f"read, {size} leaves"
        rows.append(compare(name, contenders, goal="2x", rounds=rounds))
    show("Methods: time of a call, until it returns", rows)


def call_method(model: Any, x: jax.Array) -> jax.Array:
    return model.method(x)


def with_method(library: Any, net: Any) -> Any:
    class Reader(library.Module):
        net: Any

        @library.filter_jit
        def method(self, x: jax.Array) -> jax.Array:
            return read(self.net) * x

        def plain(self, x: jax.Array) -> jax.Array:
            return read(self.net) * x

    return Reader(net)


def long(x: jax.Array) -> jax.Array:
    """Takes some 300 ms."""
    return jax.lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y) * 1e-3, x)


def run_asynchrony(rounds: int) -> None:
    x = jnp.ones((600, 600))
    jitted = jax.jit(long)
    contenders: dict[str, Any] = {
        "done after": lambda: jax.block_until_ready(jitted(x)),
        "jax.jit returns": partial(jitted, x),
    }
    contenders |= {
        f"{key} returns": partial(library.filter_jit(long), x)
        for key, library in LIBRARIES.items()
    }
    # One call in a turn: a second one could wait for the first to be done.
    row = compare(
        "a long computation",
        contenders,
        goal="as jit",
        rounds=min(rounds, 7),
        repeats=1,
    )
    show("Asynchrony: time until a call returns, as a part of the computation", [row])
