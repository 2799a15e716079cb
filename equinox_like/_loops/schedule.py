"""The checkpoint schedule: which states are saved, and which of them overwritten.

The number of steps is not known in the forward pass. With `c` checkpoints, and up to
`(c + 1)(c + 2) / 2 - 1` steps, each step is run at most twice, by Algorithm 1 of

    Stumm and Walther, New Algorithms for Optimal Online Checkpointing, SIAM Journal on
    Scientific Computing 32, 2010.

The algorithm works in rounds. Each round begins at a step called the anchor, and saves
one state after the other in place of those of the previous round. Only the anchor of
that round is kept for good. After the last round, each saved state has a level, as in

    Wang, Moin and Iaccarino, Minimal Repetition Dynamic Checkpointing Algorithm for
    Unsteady Adjoint Calculation, SIAM Journal on Scientific Computing 31, 2009.

This file deals with step numbers only. The states themselves are in stacks of `c`
slots.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


def default_checkpoints(max_steps: int) -> int:
    """The fewest checkpoints with which no step is run more than twice."""
    c = 1
    while (c + 1) * (c + 2) <= 2 * max_steps:
        c += 1
    return c


def number_of_checkpoints(max_steps: int, checkpoints: int | None) -> int:
    """The wanted number, or the default for `None`, limited to 1 to `max_steps`."""
    wanted = default_checkpoints(max_steps) if checkpoints is None else checkpoints
    return max(1, min(wanted, max_steps))


def check_checkpoints(
    loop: str, checkpoints: Any, name: str = "checkpoints"
) -> int | None:
    """The number as an `int`; raises a `ValueError` that names loop and parameter."""
    if checkpoints is None:
        return None
    if not isinstance(checkpoints, int | np.integer) or checkpoints < 1:
        raise ValueError(
            f"`{loop}`: `{name}` must be an integer, at least 1; got {checkpoints!r}."
        )
    return int(checkpoints)


class Marks(NamedTuple):
    """The saved steps and their slots, in the order of time.

    `slots` is a permutation of all slots. Those after the first `count` are free.
    """

    steps: Any
    slots: Any
    count: Any

    def last(self) -> tuple[Any, Any]:
        """The last saved step, and its slot."""
        return self.steps[self.count - 1], self.slots[self.count - 1]

    def pop_if(self, pred: Any) -> "Marks":
        return self._replace(count=self.count - jnp.where(pred, 1, 0))

    def next_stop(self, step: Any, target: Any) -> tuple[Any, Any]:
        """The next step on the way from `step` to `target`, and whether to save it.
        Every step is saved if there are enough free slots, else the one midway."""
        free = len(self.steps) - self.count
        between = target - step - 1
        is_saved = (free > 0) & (between > 0)
        stop = jnp.where(between <= free, step + 1, (step + target + 1) // 2)
        return jnp.where(is_saved, stop, target), is_saved

    def free_slot(self) -> Any:
        """A free slot, if there is one."""
        return self.slots[jnp.minimum(self.count, len(self.slots) - 1)]

    def push_if(self, pred: Any, step: Any) -> "Marks":
        here = (_numbers(len(self.steps)) == self.count) & pred
        steps = jnp.where(here, step, self.steps)
        return Marks(steps, self.slots, self.count + jnp.where(pred, 1, 0))


class Online:
    """Decides in the forward pass which steps to save. Its state is a `Progress`."""

    def __init__(self, checkpoints: int, max_steps: int | None):
        self._c = checkpoints
        # The first step that is placed by levels instead of rounds.
        self._rounds_end = (checkpoints + 1) * (checkpoints + 2) // 2 - 1
        self._has_levels = max_steps is None or max_steps > self._rounds_end

    def start(self) -> "Progress":
        c = self._c
        numbers = _numbers(c)
        levels = jnp.zeros(c, np.int32) if self._has_levels else None
        return Progress(
            jnp.zeros(c, np.int32), numbers, levels, np.int32(0), np.int32(c + 1)
        )

    def save(self, progress: "Progress", step: Any) -> tuple["Progress", Any, Any]:
        """The new progress, the slot for this step, and whether the step is saved."""
        c = self._c
        is_anchor = step == progress.anchor
        rounds = progress.round + jnp.where(is_anchor, 1, 0)
        anchor = jnp.where(is_anchor, step + c - rounds + 1, progress.anchor)
        position = jnp.where(is_anchor, c - 1, progress.round)
        is_saved = step != progress.anchor - 1
        level = np.int32(0)
        if self._has_levels:
            late = step >= self._rounds_end
            by_level, level = _by_level(progress.levels)
            position = jnp.where(late, by_level, position)
            is_saved |= late
            level = jnp.where(late, level, 0)
        # Position 0 holds the first step, which is never overwritten.
        is_saved &= (position > 0) | (step < c)
        early = step < c
        steps, slots = progress.steps, progress.slots
        slot = jnp.where(early, step, slots[position])

        def put(values, value):
            at_end = _moved_up(values, position).at[c - 1].set(value)
            placed = jnp.where(_numbers(c) == step, value, values)
            return jnp.where(is_saved, jnp.where(early, placed, at_end), values)

        levels = put(progress.levels, level) if self._has_levels else None
        progress = Progress(put(steps, step), put(slots, slot), levels, rounds, anchor)
        return progress, slot, is_saved

    def marks(self, progress: "Progress", steps: Any) -> Marks:
        """The marks after this number of steps."""
        return Marks(progress.steps, progress.slots, jnp.minimum(steps, self._c))


class Progress(NamedTuple):
    """The steps saved so far, in the order of time, and the state of the rounds."""

    steps: Any
    slots: Any
    levels: Any  # `None` if they are never needed
    round: Any
    anchor: Any  # the step at which the next round begins


def _by_level(levels: Any) -> tuple[Any, Any]:
    """The position in time of the step to drop, and the level of the step to save.

    The latest step whose level is at least two below that of a later step is dropped,
    and the new level is 0. If there is none, the last step is dropped, and the new
    level is one above the dropped one.
    """
    later = lax.cummax(levels, reverse=True)  # including a step's own level is harmless
    numbers = _numbers(len(levels))
    makes_way = (levels + 2 <= later) & (numbers > 0)
    position = jnp.max(jnp.where(makes_way, numbers, 0))
    is_any = position > 0
    return (
        jnp.where(is_any, position, len(levels) - 1).astype(np.int32),
        jnp.where(is_any, 0, levels[-1] + 1),
    )


def _moved_up(values: Any, position: Any) -> Any:
    """Removes the value at this position, and moves those after it up by one."""
    return jnp.where(_numbers(len(values)) >= position, jnp.roll(values, -1), values)


def _numbers(count: int) -> Any:
    return np.arange(count, dtype=np.int32)
