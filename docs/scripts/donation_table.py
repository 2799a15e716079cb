"""Prints the table of docs/donation.md: what really becomes of each kind of argument.

`python docs/scripts/donation_table.py`. A test compares what it prints with the page.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np

import equinox_like as eqx

MODES: list[Any] = ["none", "arrays", "all-except-first", "warn", "strict", ("x",)]


class Moments(NamedTuple):
    """The state of an optimiser."""

    count: jax.Array
    mean: jax.Array
    square: jax.Array


def grow(x: Any) -> Any:
    return jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, x)


def next_key(x: Any) -> Any:
    return jax.random.split(x)[0]


def sharded(*axes: str) -> jax.Array:
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=axis_types)
    return jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P(*axes)))


def linear() -> eqx.nn.Linear:
    return eqx.nn.Linear(3, 2, key=jax.random.key(0))


def tied() -> list[jax.Array]:
    return [jnp.ones(3)] * 2


def moments() -> Moments:
    return Moments(jnp.array(0), jnp.ones(3), jnp.ones((2, 2)))


def directly(f: Callable[..., Any], x: Any) -> Any:
    return f(x)


def ahead_of_time(f: Any, x: Any) -> Any:
    return f.lower(x).compile()(x)


def under_grad(f: Callable[..., Any], x: Any) -> Any:
    return jax.grad(lambda x: f(x).sum())(x)


def under_scan(f: Callable[..., Any], x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0]


# Name, how to make the argument, the function, and how it is called.
KINDS: list[tuple[str, Callable[[], Any], Callable[..., Any], Callable[..., Any]]] = [
    ("a Module", linear, grow, directly),
    ("the state of an optimiser", moments, grow, directly),
    ("a typed key", lambda: jax.random.key(0), next_key, directly),
    ("an array of NumPy", lambda: np.ones(3, np.float32), grow, directly),
    ("the same array twice", tied, grow, directly),
    ("sharded over 4 devices", lambda: sharded("d"), grow, directly),
    ("replicated on 4 devices", sharded, grow, directly),
    ("a NumPy view of it is held", lambda: jnp.ones(3), grow, directly),
    ("not used", lambda: jnp.ones(3), lambda x: 0, directly),
    (
        "becomes `int32`",
        lambda: jnp.ones(3),
        lambda x: x.astype(int),
        directly,
    ),
    ("becomes a sum", lambda: jnp.ones(3), lambda x: x.sum(), directly),
    ("under `jax.jit`", lambda: jnp.ones(3), grow, lambda f, x: jax.jit(f)(x)),
    ("under `jax.grad`", lambda: jnp.ones(3), grow, under_grad),
    ("under `jax.vmap`", lambda: jnp.ones(3), grow, lambda f, x: jax.vmap(f)(x)),
    ("in `jax.lax.scan`", lambda: jnp.ones(3), grow, under_scan),
]


def pointers(tree: Any) -> list[list[int]]:
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays]
    plain = [
        jax.random.key_data(x) if k else x for x, k in zip(arrays, is_key, strict=True)
    ]
    return [
        [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in plain
    ]


def what_happens(mode: Any, make: Any, fun: Any, call: Any, holds_view: bool) -> str:
    jitted = eqx.filter_jit(fun, donate=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Calls that are known are made in another way than the first.
        calls = [call] * 4
        if call is directly:
            calls.append(ahead_of_time)
        fates = [fate(jitted, make(), how, holds_view) for how in calls]
    warned = any(issubclass(w.category, eqx.DonationWarning) for w in caught)
    return ", then ".join(dict.fromkeys(fates)) + (", warned" if warned else "")


def fate(jitted: Any, x: Any, call: Any, holds_view: bool) -> str:
    view = np.asarray(x) if holds_view else None
    before = pointers(x)
    try:
        out = call(jitted, x)
    except eqx.DonationError:
        out = None
    jax.block_until_ready(out)
    assert view is None or (view == 1).all()
    leaves = [a for a in jax.tree.leaves(x) if isinstance(a, jax.Array)]
    gone = {a.is_deleted() for a in leaves} or {False}
    if len(gone) == 2:
        return "mixed"
    if out is None:
        return "error, deleted" if gone == {True} else "error"
    if gone == {False}:
        return "alive"
    return "aliased" if pointers(out) == before else "deleted"


def table() -> str:
    heads = ["the argument `x`", *(f"`{mode!r}`".replace("'", '"') for mode in MODES)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, make, fun, call in KINDS:
        cells = [what_happens(mode, make, fun, call, "view" in name) for mode in MODES]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
