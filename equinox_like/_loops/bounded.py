"""The bounded loop: nested scans, which JAX can differentiate in both modes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from .staging import Loop, goes_on


def run_bounded(loop: Loop, max_steps: int, base: int) -> list[Any]:
    """Runs the loop, and returns the last state.

    It is a scan of `base` steps, or of `base` such scans, and so on until `max_steps`
    are reached. For an inner scan only its input is saved. Steps and scans that come
    after the loop has ended are skipped.
    """

    def is_on(counted):
        count, state = counted
        return (count < max_steps) & goes_on(state)

    def step(counted):
        count, state = counted
        return count + 1, loop.step(loop.consts, state)

    run, size = _repeated(step, is_on, base), base
    while size < max_steps:
        run = _repeated(jax.checkpoint(run, prevent_cse=False), is_on, base)
        size *= base
    return run((np.int32(0), loop.state))[1]


def _repeated(
    inner: Callable[[Any], Any], is_on: Callable[[Any], Any], base: int
) -> Callable[[Any], Any]:
    def one(counted, _):
        return lax.cond(is_on(counted), inner, lambda same: same, counted), None

    return lambda counted: lax.scan(one, counted, length=base)[0]
