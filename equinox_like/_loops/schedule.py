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


class SavedSteps(NamedTuple):
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

    def pop_if(self, pred: Any) -> "SavedSteps":
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

    def push_if(self, pred: Any, step: Any) -> "SavedSteps":
        steps = put_if(pred, self.steps, self.count, step)
        return SavedSteps(steps, self.slots, self.count + jnp.where(pred, 1, 0))


class _SavedStep(NamedTuple):
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
    last: _SavedStep = _SavedStep()
    top: _SavedStep = _SavedStep()
    below_top: _SavedStep = _SavedStep()


class _Placed(NamedTuple):
    """The slot of a new step, and how the list of saved steps changes. All are traced."""

    slot: Any
    is_saved: Any
    is_early: Any  # it takes a free slot
    is_late: Any  # it is placed by levels, not in a round
    is_anchor: Any  # it begins a round
    is_moved: Any  # its slot was not the last in the list, and moves to the end
    is_raised: Any  # its level is one above that of the last step, whose slot it takes


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

        For example with three checkpoints, and so three slots:

        | step | what happens | slots |
        | --- | --- | --- |
        | 0, 1, 2 | They take the free slots. | `0 1 2` |
        | 3 | It ends the round, and is not saved. | `0 1 2` |
        | 4 | An anchor takes the slot of the last saved step, 2. Now `top` is step 1, the
            first that the previous round saved and may lose. | `0 1 4` |
        | 5 | It takes the slot of `top`. | `0 5 4` |
        | 6 | It ends the round. | `0 5 4` |
        | 7 | An anchor takes the slot of the last, 5. | `0 7 4` |
        | 8 | It ends the last round. All levels are 0. | `0 7 4` |
        | 9 | No step is two levels below a later one, so it takes the slot of the last, 7,
            and its level is 1. | `0 9 4` |
        | 10 | Likewise, with the level 2. | `0 10 4` |
        | 11 | It takes the slot of 4, whose level of 0 is two below that of 10. Its own
            level is 0. | `0 10 11` |
        """
        if progress is None:
            return None, step, True
        placed = self._place(progress, step)
        before, levels, last = _append(progress, placed)
        top = _next_top(progress, placed, last)
        below = value_at(before, top.before), value_at(levels, top.before)
        steps = put_if(placed.is_saved, progress.steps, placed.slot, step)
        length = progress.length - jnp.where(placed.is_anchor, 1, 0)
        anchor = progress.anchor + jnp.where(placed.is_anchor, length, 0)
        progress = Progress(
            steps,
            before,
            levels,
            length,
            anchor,
            last,
            top,
            _SavedStep(top.before, *below),
        )
        return progress, placed.slot, placed.is_saved

    def _place(self, progress: Progress, step: Any) -> _Placed:
        """The slot for this step: a free one, that of the step that makes way, or that of
        the last saved step."""
        last, top, below = progress.last, progress.top, progress.below_top
        is_early = step < self._c
        # If it is known to be false, XLA removes what the levels need.
        is_late = (step >= self._rounds_end) if self._has_levels else np.bool_(False)
        is_anchor = step == progress.anchor
        is_dispensable = (below.slot > 0) & (below.level + 2 <= top.level)
        makes_way = jnp.where(is_late, is_dispensable, ~is_anchor)
        dropped = jnp.where(is_late, below.slot, top.slot)
        slot = jnp.where(is_early, step, jnp.where(makes_way, dropped, last.slot))
        # Slot 0 holds the first step, which is never overwritten.
        is_saved = is_early | (slot > 0) & (is_late | (step != progress.anchor - 1))
        is_moved = makes_way & is_saved & ~is_early
        is_raised = is_late & ~makes_way
        return _Placed(
            slot, is_saved, is_early, is_late, is_anchor, is_moved, is_raised
        )

    def saved_steps(self, progress: Progress | None, steps: Any) -> SavedSteps:
        """What is saved after this number of steps."""
        if progress is None:
            return SavedSteps(None, None, steps)
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
        return SavedSteps(steps, slots, count)


def _append(progress: Progress, placed: _Placed) -> tuple[Any, Any, _SavedStep]:
    """The links `before`, the levels and the last step, with the new step in its slot."""
    slot, is_moved, last, top = (
        placed.slot,
        placed.is_moved,
        progress.last,
        progress.top,
    )
    level = jnp.where(placed.is_raised, last.level + 1, 0)
    # One link changes: that of the moved slot, or the one of `top` that is out of date.
    at = jnp.where(is_moved, slot, top.slot)
    link = jnp.where(is_moved, last.slot, top.before)
    before = put_if(True, progress.before, at, link)
    levels = put_if(placed.is_saved, progress.levels, slot, level)
    before_last = jnp.where(placed.is_early | is_moved, last.slot, last.before)
    slot = jnp.where(placed.is_saved, slot, last.slot)
    return before, levels, _SavedStep(slot, before_last, level)


def _next_top(progress: Progress, placed: _Placed, last: _SavedStep) -> _SavedStep:
    """The `top` for the next step; `last` is the new step if that is saved."""
    top, below = progress.top, progress.below_top
    by_level = _where(placed.is_raised, last, top._replace(before=below.before))
    in_round = top._replace(slot=top.slot + jnp.where(placed.is_moved, 1, 0))
    of_new_round = _SavedStep(np.int32(1), top.slot)
    in_round = _where(placed.is_anchor, of_new_round, in_round)
    return _where(placed.is_late, by_level, in_round)


def _where(pred: Any, step: _SavedStep, other: _SavedStep) -> _SavedStep:
    return _SavedStep(
        *(jnp.where(pred, x, y) for x, y in zip(step, other, strict=True))
    )
