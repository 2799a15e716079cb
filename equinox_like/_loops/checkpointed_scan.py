"""A scan as a checkpointed loop, with the `xs` and `ys` as buffers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._compat.arrays import weakly_typed
from .buffer_rules import read, write
from .checkpointed import run_checkpointed
from .place import Place
from .schedule import number_of_checkpoints
from .staging import as_after_a_step, stage

Step = Callable[[Any, Any, Any], tuple[Sequence[Any], Sequence[Any]]]


def output_types(f: Step, carry: Sequence[Any], xs: Sequence[Any]) -> Sequence[Any]:
    """The shapes and dtypes of the `y` of one step; see `checkpointed_scan`."""

    @functools.wraps(f)
    def types(carry, xs):
        return f(jnp.asarray(True), carry, [x[0] for x in xs])

    carry, xs = list(map(jnp.asarray, carry)), list(map(jnp.asarray, xs))
    while True:
        after, y = jax.eval_shape(types, carry, xs)
        changed = as_after_a_step(carry, after, keeps_weak=True)  # as in a plain scan
        if changed is None:
            return y
        carry = changed


def checkpointed_scan(
    f: Step,
    carry: Sequence[Any],
    is_buffer: Sequence[bool],
    xs: Sequence[Any],
    types: Sequence[Any],
    length: int,
    checkpoints: int | None,
    reverse: bool = False,
) -> tuple[list[Any], list[Any]]:
    """The last carry, and the outputs of each step along axis 0.

    **Arguments:**

    - `f(pred, carry, x)`: returns the arrays of the next carry and of a `y`, given
        those of a carry and an `x`; `pred` is as in `stage`.
    - `is_buffer`: for each array of the carry, whether it is a buffer.
    - `types`: the `output_types`.
    - `length`: the number of steps, at least 1.
    - `checkpoints`: as for `while_loop`.
    """
    xs = list(map(jnp.asarray, xs))
    ys = [_zeros(length, y) for y in types]
    first_x, first_y = 1 + len(carry), 1 + len(carry) + len(xs)

    def body(pred, state):
        i, *carry = state[:first_x]
        place, index = Place.of((length - 1 - i) if reverse else i, {})
        pairs = [read(x, place, index) for x in state[first_x:first_y]]
        carry, y = f(pred, carry, [row for row, _ in pairs])
        written = [
            write(pred, whole, row, place, index)
            for whole, row in zip(state[first_y:], y, strict=True)
        ]
        return [i + 1, *carry, *(x for _, x in pairs), *written]

    flags = [False, *is_buffer, *([True] * (len(xs) + len(ys)))]
    loop = stage(lambda state: True, body, [np.int32(0), *carry, *xs, *ys], flags)
    out = loop.complete(
        run_checkpointed(loop, length, number_of_checkpoints(length, checkpoints))
    )
    return out[1:first_x], out[first_y:]


def _zeros(length: int, y: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros for the outputs of all steps, split over the explicit axes that one is, and
    of a weak dtype if that of one is weak."""
    sharding = y.sharding
    if isinstance(sharding, NamedSharding):
        is_explicit = AxisType.Explicit in sharding.mesh.axis_types
        parts = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, parts) if is_explicit else None
    zeros = jnp.zeros((length, *y.shape), y.dtype, device=sharding)
    return weakly_typed(zeros) if y.weak_type else zeros
