"""The cost of a call of filter_jit, compared with jax.jit on the same arguments.

`jax.jit` also accepts Modules if all their leaves are arrays, so it gets the same
Modules without their activation function. Another column has the time of `jax.jit` for
the same arrays in nested dicts, which are flattened and unflattened in C++.
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


def fit(tree: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
    x, y = batch
    by = x.sum() + y.sum()
    return jax.tree.map(lambda w: w + by if eqx.is_array(w) else w, tree)


class Loop:
    """A train loop: each call replaces the state by the function's output."""

    def __init__(self, fun: Any, state: Any, *args: Any):
        self.fun = fun
        self.state = state
        self.args = args

    def __call__(self) -> Any:
        self.state = self.fun(self.state, *self.args)
        return self.state


KINDS = ("dicts", "Modules")
JAX = "jax.jit"


def arguments(kind: str, size: int) -> dict[str, Any]:
    """The argument of each contender."""
    tree = nested_dict(size)
    if kind == "dicts":
        return {JAX: tree} | dict.fromkeys(LIBRARIES, tree)
    modules = {JAX: bare(net("ours", tree)), f"{JAX}, dicts": tree}
    return modules | {key: net(key, tree) for key in LIBRARIES}


def jit(name: str, fun: Any, donate: bool = False) -> Any:
    """`fun`, compiled by the contender of this name."""
    if name in LIBRARIES:
        donated = "all" if donate else "none"
        return LIBRARIES[name].filter_jit(fun, donate=donated)
    return jax.jit(fun, donate_argnums=0 if donate else ())


def goal(size: int) -> str:
    return "1.5x" if size == SIZES[0] else "1.3x"


def run(rounds: int) -> None:
    for kind in KINDS:
        rows: list[Row] = []
        for size in SIZES:
            states = arguments(kind, size)
            for name, fun in (("read", read), ("step", step)):
                contenders = {k: partial(jit(k, fun), x) for k, x in states.items()}
                title = f"{name}, {size} leaves"
                rows.append(compare(title, contenders, goal=goal(size), rounds=rounds))
            # One function each: a donating function takes a single kind of argument.
            loops = {
                k: Loop(jit(k, lambda tree: step(tree), donate=True), fresh(x))
                for k, x in states.items()
            }
            title = f"step with donation, {size} leaves"
            rows.append(compare(title, loops, goal=goal(size), rounds=rounds))
        show(f"Dispatch, {kind}: time of a call, until it returns", rows)


def run_modes(rounds: int) -> None:
    """All modes of donation, compared with `jax.jit` that donates the same arrays.

    In the rows with a batch, `"arrays"` also donates the batch. No output can reuse it,
    so it is not deleted.
    """
    batch = jnp.ones(3), jnp.ones(5)
    for kind in KINDS:
        rows: list[Row] = []
        for size in SIZES:
            states = arguments(kind, size)
            contenders = {JAX: Loop(jit(JAX, step, donate=True), fresh(states[JAX]))}
            for mode in ("arrays", "warn", "strict", ("tree",)):
                jitted = eqx.filter_jit(lambda tree: step(tree), donate=mode)
                contenders[str(mode)] = Loop(jitted, fresh(states["ours"]))
            title = f"{size} leaves"
            rows.append(compare(title, contenders, goal=goal(size), rounds=rounds))
            jitted = jax.jit(fit, donate_argnums=0)
            contenders = {JAX: Loop(jitted, fresh(states[JAX]), batch)}
            for mode in ("arrays", ("tree",)):
                jitted = eqx.filter_jit(
                    lambda tree, batch: fit(tree, batch), donate=mode
                )
                contenders[str(mode)] = Loop(jitted, fresh(states["ours"]), batch)
            title = f"{size} leaves and a batch"
            rows.append(compare(title, contenders, goal=goal(size), rounds=rounds))
        show(f"Modes of donation, {kind}: time of a call, until it returns", rows)


def run_stages(rounds: int) -> None:
    """Calls of ahead-of-time compiled functions, by filter_jit and by jax.jit."""
    for kind in KINDS:
        rows: list[Row] = []
        for size in SIZES:
            states = arguments(kind, size)
            contenders = {
                k: partial(jit(k, step).lower(x).compile(), x)
                for k, x in states.items()
            }
            title = f"step, {size} leaves"
            rows.append(compare(title, contenders, goal=goal(size), rounds=rounds))
            loops = {
                k: Loop(jit(k, step, donate=True).lower(x).compile(), fresh(x))
                for k, x in states.items()
            }
            title = f"step with donation, {size} leaves"
            rows.append(compare(title, loops, goal=goal(size), rounds=rounds))
        show(f"Ahead of time, {kind}: a call, until it returns", rows)


def run_layout(rounds: int) -> None:
    """Calls of `Layout.jit`, by `filter_jit` on the same arrays."""
    layout = eqx.Layout("data=-1")
    rows: list[Row] = []
    for size in SIZES:
        model = layout.init(partial(net, "ours", nested_dict(size)))
        ours = {"filter_jit": eqx.filter_jit, "Layout.jit": layout.jit}
        contenders = {k: partial(jitted(step), model) for k, jitted in ours.items()}
        title = f"step, {size} leaves"
        rows.append(compare(title, contenders, goal="1.05x", rounds=rounds))
        loops = {
            k: Loop(jitted(step, donate="all"), fresh(model))
            for k, jitted in ours.items()
        }
        title = f"step with donation, {size} leaves"
        rows.append(compare(title, loops, goal="1.05x", rounds=rounds))
    show("Layout.jit: time of a call, until it returns", rows)


def run_methods(rounds: int) -> None:
    """Compiled methods, which are read from the instance at each call."""
    x = jnp.ones(())
    for kind in KINDS:
        rows: list[Row] = []
        for size in SIZES:
            states = arguments(kind, size)
            plain = with_method(eqx, states[JAX])
            jitted = jax.jit(lambda model, x: model.plain(x))
            contenders: dict[str, Any] = {JAX: partial(jitted, plain, x)}
            for key, library in LIBRARIES.items():
                model = with_method(library, states[key])
                contenders[f"{key}, method"] = partial(call_method, model, x)
                bound = library.filter_jit(model.plain)
                contenders[f"{key}, bound"] = partial(bound, x)
            title = f"read, {size} leaves"
            rows.append(compare(title, contenders, goal=goal(size), rounds=rounds))
            jitted = jax.jit(lambda model: model.stepped(), donate_argnums=0)
            loops: dict[str, Any] = {JAX: Loop(jitted, fresh(plain))}
            for key, library in LIBRARIES.items():
                model = fresh(with_method(library, states[key]))
                loops[f"{key}, method"] = Loop(call_update, model)
            title = f"step with donation, {size} leaves"
            rows.append(compare(title, loops, goal=goal(size), rounds=rounds))
        show(f"Methods, {kind} in it: time of a call, until it returns", rows)


def call_method(model: Any, x: jax.Array) -> jax.Array:
    return model.method(x)


def call_update(model: Any) -> Any:
    return model.update()


def with_method(library: Any, net: Any) -> Any:
    class Reader(library.Module):
        net: Any

        @library.filter_jit
        def method(self, x: jax.Array) -> jax.Array:
            return read(self.net) * x

        def plain(self, x: jax.Array) -> jax.Array:
            return read(self.net) * x

        def stepped(self) -> Any:
            return step(self)

        @partial(library.filter_jit, donate="all")
        def update(self) -> Any:
            return self.stepped()

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
    # One call in each turn, since a second one might wait for the end of the first.
    row = compare(
        "a long computation",
        contenders,
        goal="as jit",
        rounds=min(rounds, 7),
        repeats=1,
    )
    show("Asynchrony: time until a call returns, as a part of the computation", [row])
