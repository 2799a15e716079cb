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

    def __call__(self) -> None:
        self.state = self.fun(self.state)


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


def run_asynchrony(rounds: int) -> None:
    @jax.jit
    def long(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y) * 1e-3, x)

    x = jnp.ones((600, 600))
    contenders: dict[str, Any] = {
        "until it is done": lambda: long(x).block_until_ready(),
        "jax.jit": lambda: long(x),
    }
    contenders |= {
        key: partial(library.filter_jit(long), x) for key, library in LIBRARIES.items()
    }
    waits = {}
    for key, call in contenders.items():
        waits[key] = _time_to_return(call, min(rounds, 5))
    done = waits["until it is done"]
    rows = [
        Row(
            "a long computation",
            "done after",
            done,
            {
                f"{key} returns": (wait / done,) * 3
                for key, wait in waits.items()
                if key != "until it is done"
            },
            "as jit",
        )
    ]
    show("Asynchrony: time until a call returns, as a part of the computation", rows)


def _time_to_return(call: Any, rounds: int) -> float:
    import time

    times = []
    jax.block_until_ready(call())
    for _ in range(rounds):
        start = time.perf_counter()
        out = call()
        times.append(time.perf_counter() - start)
        jax.block_until_ready(out)
    return sorted(times)[len(times) // 2]
