"""The plain loop: `jax.lax.while_loop`, which has no reverse mode."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from .staging import goes_on


def run_plain(
    step: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    consts: Sequence[Any],
    state: Sequence[Any],
    max_steps: int | None,
) -> list[Any]:
    """Runs the loop, and returns the last state."""
    if max_steps is None:
        return lax.while_loop(goes_on, lambda state: step(consts, state), list(state))

    def cond(counted):
        count, state = counted
        return (count < max_steps) & goes_on(state)

    def body(counted):
        count, state = counted
        return count + 1, step(consts, state)

    return lax.while_loop(cond, body, (np.int32(0), list(state)))[1]
