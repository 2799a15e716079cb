"""Which steps of a loop have their carry saved, and which of these make way for others.

In the forward pass the number of steps is not known. Up to `(c + 1)(c + 2) / 2 - 1` of
them, for `c` checkpoints, no step is done more than twice, by Algorithm 1 of

    Stumm and Walther, New Algorithms for Optimal Online Checkpointing, SIAM Journal on
    Scientific Computing 32, 2010.

It goes in rounds. Each begins at an anchor, and saves one step after the other in place of
those of the round before, whose anchor stays for good. After the last round, levels decide
as in

    Wang, Moin and Iaccarino, Minimal Repetition Dynamic Checkpointing Algorithm for
    Unsteady Adjoint Calculation, SIAM Journal on Scientific Computing 31, 2009.

Everything here is about numbers of steps. What is saved lies in stacks of `c` slots.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


def default_checkpoints(max_steps: int) -> int:
    """The fewest checkpoints with which no step is done more than twice."""
    c = 1
    while (c + 1) * (c + 2) <= 2 * max_steps:
        c += 1
    return c


def number_of_checkpoints(max_steps: int, checkpoints: int | None) -> int:
    """How many there are, of as many as are wanted: `None` for the default."""
    wanted = default_checkpoints(max_steps) if checkpoints is None else checkpoints
    return max(1, min(wanted, max_steps))


def check_checkpoints(loop: str, checkpoints: Any) -> int | None:
    """Raises `ValueError`, naming the `loop`, if this is not a number of checkpoints."""
    if checkpoints is None:
        return None
    if not isinstance(checkpoints, int | np.integer) or checkpoints < 1:
        raise ValueError(
            f"`{loop}`: `checkpoints` must be an integer, at least 1; got {checkpoints!r}."
        )
    return int(checkpoints)


class Marks(NamedTuple):
    """Which step is saved in which slot, in the order of time.

    `slots` is a permutation, so those after the first `count` are free.
    """

    steps: Any
    slots: Any
    count: Any

    def last(self) -> tuple[Any, Any]:
        """The number of the last step that is saved, and its slot."""
        return self.steps[self.count - 1], self.slots[self.count - 1]

    def pop_if(self, pred: Any) -> "Marks":
        return self._replace(count=self.count - jnp.where(pred, 1, 0))

    def next_stop(self, step: Any, target: Any) -> tuple[Any, Any]:
        """Where to go from `step`, which is saved, on the way to `target`, and whether to
        save that: each step if there is room for all, or else the one midway."""
        free = len(self.steps) - self.count
        between = target - step - 1
        is_saved = (free > 0) & (between > 0)
        stop = jnp.where(between <= free, step + 1, (step + target + 1) // 2)
        return jnp.where(is_saved, stop, target), is_saved

    def free_slot(self) -> Any:
        """One that is free, if any is."""
        return self.slots[jnp.minimum(self.count, len(self.slots) - 1)]

    def push_if(self, pred: Any, step: Any) -> "Marks":
        here = (_numbers(len(self.steps)) == self.count) & pred
        steps = jnp.where(here, step, self.steps)
        return Marks(steps, self.slots, self.count + jnp.where(pred, 1, 0))


class Online:
    """Where to save on the way forward, with `c` checkpoints.

    Its state is a `Progress`, one for each step.
    """

    def __init__(self, checkpoints: int, max_steps: int | None):
        self._c = checkpoints
        # The step from which on levels decide.
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
        """The progress with this step, which slot it goes to, and whether it is saved."""
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
        # The first step stays, and only then is there a place for it.
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
        """What is saved after so many steps."""
        return Marks(progress.steps, progress.slots, jnp.minimum(steps, self._c))


class Progress(NamedTuple):
    """What is saved so far, in the order of time, and where the rounds are."""

    steps: Any
    slots: Any
    levels: Any  # `None` if they never decide
    round: Any
    anchor: Any  # the step at which the next round begins


def _by_level(levels: Any) -> tuple[Any, Any]:
    """Which one makes way, by its position in time, and the level of what comes instead.

    That is the latest one that is two levels below a later one; or the last, whose
    successor is one level higher.
    """
    later = lax.cummax(levels, reverse=True)  # includes the position itself: no matter
    numbers = _numbers(len(levels))
    makes_way = (levels + 2 <= later) & (numbers > 0)
    position = jnp.max(jnp.where(makes_way, numbers, 0))
    is_any = position > 0
    return (
        jnp.where(is_any, position, len(levels) - 1).astype(np.int32),
        jnp.where(is_any, 0, levels[-1] + 1),
    )


def _moved_up(values: Any, position: Any) -> Any:
    """Without the value at this position, and with room for one at the end."""
    return jnp.where(_numbers(len(values)) >= position, jnp.roll(values, -1), values)


def _numbers(count: int) -> Any:
    return np.arange(count, dtype=np.int32)
