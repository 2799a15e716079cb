"""What a call of filter_jit costs beside jax.jit on the same arrays in nested dicts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import equinox_like as eqx

from ._measure import Row, compare, show
from ._models import LIBRARIES, SIZES, fresh, nested_dict, net


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
            for key, library in LIBRARIES.items():
                jitted = library.filter_jit(fun)
                contenders[f"{key}, dicts"] = partial(jitted, tree)
                contenders[f"{key}, Modules"] = partial(jitted, net(key, tree))
            rows.append(
                compare(
                    f"{name}, {size} leaves", contenders, goal="1.6x", rounds=rounds
                )
            )
        contenders = {"jax.jit": Loop(jax.jit(step, donate_argnums=0), fresh(tree))}
        for key, library in LIBRARIES.items():
            # One function each: a donating function takes a single kind of argument.
            for kind, state in (("dicts", tree), ("Modules", net(key, tree))):
                jitted = library.filter_jit(lambda t: step(t), donate="all")
                contenders[f"{key}, {kind}"] = Loop(jitted, fresh(state))
        rows.append(
            compare(
                f"step with donation, {size} leaves",
                contenders,
                goal="1.6x",
                rounds=rounds,
            )
        )
    show("Dispatch: time of a call, until it returns", rows)


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
