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

The latest state whose level is at least two below that of a later state is overwritten,
and the new level is 0. If there is none, the last state is overwritten, and the new
level is one above its level.

This file deals with step numbers only. The states themselves are in stacks of `c`
slots. Each step of a loop takes the same time for any `c`: it reads and writes single
elements of arrays. XLA copies an array that is written at one index after it was read at
another. So each array is written at one index, and what the next step needs is read
after that.
"""

from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._tree.arrays import reusable

MOST_STEPS: Final = int(jnp.iinfo(jnp.int32).max)  # steps are counted by an `int32`


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


def value_at(stack: Any, slot: Any) -> Any:
    return reusable(lax.dynamic_index_in_dim(stack, slot, keepdims=False))


def put_if(pred: Any, stack: Any, slot: Any, x: Any) -> Any:
    """The stack, with `x` in this slot if `pred`. XLA writes it in place."""
    x = reusable(jnp.where(pred, reusable(x), value_at(stack, slot)))
    return lax.dynamic_update_index_in_dim(stack, x, slot, 0)


class Marks(NamedTuple):
    """The saved steps and their slots, in the order of time.

    `slots` is a permutation of all slots. Those after the first `count` are free. If every
    step is saved in the slot of its number, both arrays are `None`.
    """

    steps: Any
    slots: Any
    count: Any

    def last(self) -> tuple[Any, Any]:
        """The last saved step, and its slot."""
        i = self.count - 1
        if self.steps is None:
            return i, i
        return value_at(self.steps, i), value_at(self.slots, i)

    def pop_if(self, pred: Any) -> "Marks":
        return self._replace(count=self.count - jnp.where(pred, 1, 0))

    def next_stop(self, step: Any, target: Any) -> Any:
        """The next step to save on the way from `step` to `target`; else `target`.
        Every step is saved if there are enough free slots, else the one midway."""
        free = len(self.steps) - self.count
        stop = jnp.where(target - step <= free + 1, step + 1, (step + target + 1) // 2)
        return jnp.where(free > 0, stop, target)

    def free_slot(self) -> Any:
        """A free slot, if there is one."""
        return value_at(self.slots, self.count)

    def push_if(self, pred: Any, step: Any) -> "Marks":
        steps = put_if(pred, self.steps, self.count, step)
        return Marks(steps, self.slots, self.count + jnp.where(pred, 1, 0))


class _Saved(NamedTuple):
    """A saved step: its slot, the slot of the saved step before it, and its level."""

    slot: Any = np.int32(0)
    before: Any = np.int32(0)
    level: Any = np.int32(0)


class Progress(NamedTuple):
    """The steps saved so far, as a list that leads from each to the one before it, and
    the state of the rounds and the levels.

    In a round, `top` is the first saved step of the previous round, and makes way for
    the next one. After the rounds, `top` is the last that was given a level above 0, and
    the one before it makes way: all others are less than two levels below a later one.
    """

    # By slot; `before` is out of date for `top`.
    steps: Any
    before: Any
    levels: Any
    length: Any  # of the round
    anchor: Any  # the step at which the next round begins
    last: _Saved = _Saved()
    top: _Saved = _Saved()
    below_top: _Saved = _Saved()


class Online:
    """Decides in the forward pass which steps to save. Its state is a `Progress`."""

    def __init__(self, checkpoints: int, max_steps: int | None):
        self._c = checkpoints
        # The first step that is placed by levels instead of rounds.
        self._rounds_end = (checkpoints + 1) * (checkpoints + 2) // 2 - 1
        most = MOST_STEPS if max_steps is None else max_steps
        self._saves_all = most <= checkpoints
        self._has_levels = most > self._rounds_end

    def start(self) -> Progress | None:
        if self._saves_all:
            return None
        zeros = jnp.zeros(self._c, np.int32)
        before = jnp.arange(-1, self._c - 1, dtype=np.int32)
        length = np.int32(self._c + 1)
        return Progress(zeros, before, zeros, length, anchor=length)

    def save(self, progress: Any, step: Any) -> tuple[Progress | None, Any, Any]:
        """The new progress, the slot for this step, and whether the step is saved.

        For example, the steps in the slots with three checkpoints:

        - 0, 1 and 2 fill the free slots: `0 1 2`. Step 3 ends the round, and is not saved.
        - 4 is the anchor of the next round. It takes the slot of the last saved step, 2:
            `0 1 4`. The `top` is now step 1, the first that the previous round saved.
        - 5 takes the slot of the `top`: `0 5 4`. Step 6 ends the round.
        - 7 is an anchor, and takes the slot of 5: `0 7 4`. Step 8 ends the last round.
        - 9 is placed by levels, all of which are 0. No step is two levels below a later
            one, so it takes the slot of the last, 7, and its level is 1: `0 9 4`. So does
            10, and its level is 2: `0 10 4`.
        - 11 takes the slot of 4, whose level of 0 is two below that of 10. The level of 11
            is 0: `0 10 11`.
        """
        if progress is None:
            return None, step, True
        steps, before, levels, length, anchor, last, top, below = progress
        is_early = step < self._c  # there are free slots
        # If it is known to be false, XLA removes what the levels need.
        is_late = (step >= self._rounds_end) if self._has_levels else np.bool_(False)
        is_anchor = step == anchor
        is_dispensable = (below.slot > 0) & (below.level + 2 <= top.level)
        makes_way = jnp.where(is_late, is_dispensable, ~is_anchor)
        dropped = jnp.where(is_late, below.slot, top.slot)
        slot = jnp.where(is_early, step, jnp.where(makes_way, dropped, last.slot))
        # Slot 0 holds the first step, which is never overwritten.
        is_saved = is_early | (slot > 0) & (is_late | (step != anchor - 1))
        is_moved = makes_way & is_saved & ~is_early  # to the end of the list
        is_raised = is_late & ~makes_way

        level = jnp.where(is_raised, last.level + 1, 0)
        at = jnp.where(is_moved, slot, top.slot)
        before = put_if(True, before, at, jnp.where(is_moved, last.slot, top.before))
        levels = put_if(is_saved, levels, slot, level)
        before_last = jnp.where(is_early | is_moved, last.slot, last.before)
        last = _Saved(jnp.where(is_saved, slot, last.slot), before_last, level)
        by_level = _where(is_raised, last, top._replace(before=below.before))
        in_round = top._replace(slot=top.slot + jnp.where(is_moved, 1, 0))
        in_round = _where(is_anchor, _Saved(np.int32(1), top.slot), in_round)
        top = _where(is_late, by_level, in_round)
        of_below = value_at(before, top.before), value_at(levels, top.before)
        below = _Saved(top.before, *of_below)
        steps = put_if(is_saved, steps, slot, step)
        length = length - jnp.where(is_anchor, 1, 0)
        anchor = anchor + jnp.where(is_anchor, length, 0)
        progress = Progress(steps, before, levels, length, anchor, last, top, below)
        return progress, slot, is_saved

    def marks(self, progress: Progress | None, steps: Any) -> Marks:
        """The marks after this number of steps."""
        if progress is None:
            return Marks(None, None, steps)
        before = put_if(True, progress.before, progress.top.slot, progress.top.before)

        def body(carry):
            i, slot, steps, slots = carry
            i = i - 1
            steps = put_if(True, steps, i, value_at(progress.steps, slot))
            return i, value_at(before, slot), steps, put_if(True, slots, i, slot)

        count = jnp.minimum(steps, self._c)
        slots = jnp.arange(self._c, dtype=np.int32)
        carry = count, progress.last.slot, slots, slots
        _, _, steps, slots = lax.while_loop(lambda carry: carry[0] > 0, body, carry)
        return Marks(steps, slots, count)


def _where(pred: Any, saved: _Saved, other: _Saved) -> _Saved:
    return _Saved(*(jnp.where(pred, x, y) for x, y in zip(saved, other, strict=True)))
