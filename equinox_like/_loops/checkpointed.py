"""The checkpointed loop, and its schedule: reverse mode for any number of steps.

The forward pass saves some of the states. The backward pass differentiates one step at a
time, from the last to the first. The state before a step is either saved, or recomputed
from the last saved state before it.

Buffers are not saved. Each element is written at most once, so the final contents serve
for every step, and recomputing a step writes the values that are already there.

The saved steps are in a linked list, from the last to the first, so that a step is dropped
by changing one link. Before the backward pass, the list is written to a stack, once. XLA
copies arrays in a `lax.cond`, so nothing is written in one: a state that is not saved
writes back the old one. A step is in the program of a gradient three times: forward,
recomputed, and differentiated. If every step is saved, which `max_steps` shows, it is not
recomputed.

A `jax.custom_vjp` would give a tangent to each output. So the loop is a `jax.custom_jvp`
with symbolic zeros, whose tangents are those of a linear primitive that is never
evaluated: its transpose is the backward pass.

The schedule (`Online`) says which states are saved, and which of them overwritten. The
number of steps is not known in the forward pass. With `c` checkpoints, and up to
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

The states themselves are in stacks of `c` slots. Each step of a loop takes the same time
for any `c`: it reads and writes single elements of arrays. XLA copies an array that is
written at one index after it was read at another. So each array is written at one index,
and what the next step needs is read after that.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._compat.primitives import Zero
from .._runtime.primitives import create_vprim
from .._transforms.jvp_vjp import watch
from .._tree.arrays import reusable
from .staging import Loop, Mask, goes_on, one_way, put, run_plain, take

# The schedule, which deals with step numbers only

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


# The loop


def run_checkpointed(loop: Loop, max_steps: int | None, checkpoints: int) -> list[Any]:
    """Runs the loop, and returns the last state."""
    # JAX caches the functions below, so they must not refer to the loop's arrays.
    step, is_buffer = loop.step, loop.is_buffer

    @jax.custom_jvp
    def run(consts, state):
        return run_plain(step, consts, state, max_steps)

    def rule(primals, tangents):
        consts, state = primals
        of_consts, of_state = (
            [type(t) is not SymbolicZero for t in ts] for ts in tangents
        )
        perturbed = _Flow(step, consts, state, of_consts).forward(of_state)
        none = [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in state]
        if not any(perturbed):
            return run(consts, state), none
        types = [zero.aval for zero in take(none, perturbed)]
        options = step, is_buffer, max_steps, checkpoints
        derivative = _Derivative(*options, types, (of_consts, of_state), perturbed)
        out, saved = derivative.forward(consts, state)
        leaves, treedef = jtu.tree_flatten(saved)
        din = [*take(tangents[0], of_consts), *take(tangents[1], of_state)]
        dout = reverse_p.bind(*leaves, *din, derivative=derivative, saved=treedef)
        return out, put(none, perturbed, dout)

    run.defjvp(rule, symbolic_zeros=True)
    return run(loop.consts, loop.state)


class _Residuals(NamedTuple):
    """What the backward pass needs from the forward pass."""

    consts: list[Any]
    stacks: list[Any]
    kept: SavedSteps
    count: Any  # of steps
    buffers: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _Derivative:
    """The derivative of a loop. `given` are masks of the consts and the first state
    that have a tangent; `perturbed` is the mask of the last state that has one."""

    step: Any
    is_buffer: Mask
    max_steps: int | None
    checkpoints: int
    types_of_tangents: list[Any]
    given: tuple[Mask, Mask]
    perturbed: Mask

    @property
    def _is_saved(self) -> Mask:
        return [not is_buffer for is_buffer in self.is_buffer]

    def forward(self, consts: Any, state: Any) -> tuple[list[Any], _Residuals]:
        online = Online(self.checkpoints, self.max_steps)

        def cond(carry):
            is_on, limit = goes_on(carry[-1]), self.max_steps
            return is_on if limit is None else (carry[0] < limit) & is_on

        def body(carry):
            count, progress, stacks, state = carry
            progress, slot, is_saved = online.save(progress, count)
            stacks = self._put_if(is_saved, stacks, slot, state)
            return count + 1, progress, stacks, self.step(consts, state)

        stacks = [
            jnp.broadcast_to(x, (self.checkpoints, *jnp.shape(x)))
            for x in take(state, self._is_saved)
        ]
        carry = np.int32(0), online.start(), stacks, state
        count, progress, stacks, state = lax.while_loop(cond, body, carry)
        kept = online.saved_steps(progress, count)
        buffers = take(state, self.is_buffer)
        return state, _Residuals(consts, stacks, kept, count, buffers)

    def backward(self, saved: _Residuals, cotangents: Sequence[Any]) -> list[Any]:
        """From the cotangents of the last state to those of the consts and first state.

        `cotangents` are of the arrays in `perturbed`; the result is for those in `given`,
        with `None` for zero.
        """
        cotangents = put([None] * len(self.perturbed), self.perturbed, cotangents)
        wanted = [ct is not None and type(ct) is not Zero for ct in cotangents]
        consts_given, state_given = self.given
        if not any(wanted):
            return [None] * (sum(consts_given) + sum(state_given))
        state = self._state([value_at(x, 0) for x in saved.stacks], saved.buffers)
        flow = _Flow(self.step, saved.consts, state, consts_given)
        masks = flow.backward(self.perturbed, wanted)
        of_consts, wanted = masks
        ct_consts = list(map(jnp.zeros_like, take(saved.consts, of_consts)))
        ct_state = [
            jnp.zeros_like(x) if type(ct) is Zero else ct
            for x, ct in zip(take(state, wanted), take(cotangents, wanted), strict=True)
        ]
        found = self._sweep(saved, masks, ct_consts, ct_state)
        ct_consts = put([None] * len(of_consts), of_consts, found[0])
        ct_state = put([None] * len(wanted), wanted, found[1])
        return [*take(ct_consts, consts_given), *take(ct_state, state_given)]

    def _sweep(
        self, saved: _Residuals, masks: tuple[Mask, Mask], ct_consts: Any, ct_state: Any
    ) -> tuple[list[Any], list[Any]]:
        """Differentiates the steps from the last to the first."""

        def body(carry):
            target, kept, stacks, buffers, ct_consts, ct_state = carry
            kept, stacks, state = self._replay(
                saved.consts, target, kept, stacks, buffers
            )
            buffers, more, ct_state = self._pull_back(
                saved.consts, state, masks, ct_state
            )
            ct_consts = [a + b for a, b in zip(ct_consts, more, strict=True)]
            step, _ = kept.last()
            kept = kept.pop_if(step == target)
            return target - 1, kept, stacks, buffers, ct_consts, ct_state

        start = saved.count - 1, saved.kept, saved.stacks, saved.buffers
        carry = *start, ct_consts, ct_state
        return lax.while_loop(lambda carry: carry[0] >= 0, body, carry)[-2:]

    def _replay(
        self, consts: Any, target: Any, kept: SavedSteps, stacks: Any, buffers: Any
    ) -> tuple[SavedSteps, list[Any], list[Any]]:
        """The state before step `target`, recomputed from the last saved state.

        Saves states on the way, if there are free slots.
        """

        def body(carry):
            step, stop, kept, stacks, state = carry
            step, state = step + 1, self.step(consts, state)
            is_saved = (step == stop) & (stop < target)
            stacks = self._put_if(is_saved, stacks, kept.free_slot(), state)
            kept = kept.push_if(is_saved, step)
            stop = jnp.where(is_saved, kept.next_stop(step, target), stop)
            return step, stop, kept, stacks, state

        step, slot = kept.last()
        state = self._state([value_at(x, slot) for x in stacks], buffers)
        if kept.steps is None:
            return kept, stacks, state  # nothing to recompute
        carry = step, kept.next_stop(step, target), kept, stacks, state
        return lax.while_loop(lambda carry: carry[0] < target, body, carry)[2:]

    def _put_if(self, pred: Any, stacks: Any, slot: Any, state: Any) -> list[Any]:
        saved = zip(stacks, take(state, self._is_saved), strict=True)
        return [put_if(pred, stack, slot, x) for stack, x in saved]

    def _state(self, saved: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
        state = put([None] * len(self._is_saved), self._is_saved, saved)
        return put(state, self.is_buffer, buffers)

    def _pull_back(
        self, consts: Any, state: Any, masks: tuple[Mask, Mask], cotangents: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The buffers after a step, and the cotangents of its consts and its input."""
        of_consts, of_state = masks

        def step(moving_consts, moving_state):
            out = self.step(
                put(consts, of_consts, moving_consts),
                put(state, of_state, moving_state),
            )
            return take(out, of_state), take(out, self.is_buffer)

        given = take(consts, of_consts), take(state, of_state)
        _, pull, buffers = jax.vjp(step, *given, has_aux=True)
        return buffers, *pull(cotangents)


# A `jax.custom_vjp` would give every output of the loop a tangent. Instead, a linear
# primitive stands for the tangents of the last state. It cannot be evaluated; only its
# transpose is used, which is the backward pass.


def _forward_mode(*_, derivative, saved):
    raise TypeError(
        "can't apply forward-mode autodiff (jvp) to a checkpointed loop, which is a "
        "custom_vjp function: use `kind='lax'` or `kind='bounded'`, or "
        "`checkpoint=True` for `filter_scan`."
    )


def _way_back(cotangents, *inputs, derivative, saved):
    count = saved.num_leaves
    # JAX passes scalar constants as Python numbers.
    leaves = list(map(jnp.asarray, inputs[:count]))
    found = derivative.backward(saved.unflatten(leaves), cotangents)
    found = [x if x is None else one_way(x, _REVERSE_TWICE) for x in found]
    return [*([None] * count), *found]


_REVERSE_TWICE = (
    "Reverse-mode differentiation does not work for the lax.while_loop that computes the "
    "gradient of a checkpointed loop. For a gradient of the gradient use "
    "`kind='bounded'`, or `checkpoint=True` for `filter_scan`; or take the second "
    "derivative in forward mode, as `jax.hessian` does."
)


reverse_p: Any = create_vprim(
    "checkpointed_loop",
    _forward_mode,
    lambda *_, derivative, saved: derivative.types_of_tangents,
    _forward_mode,
    _way_back,
)
"""From the saved leaves of a checkpointed loop, and the tangents of its consts and
first state, to the tangents of its last state."""


@dataclasses.dataclass(frozen=True)
class _Flow:
    """Which arrays of a loop have a tangent after some steps, or a cotangent before them.

    `of_consts` is the mask of the consts that have a tangent.
    """

    step: Any
    consts: Any
    state: Any
    of_consts: Mask

    def forward(self, of_state: Mask) -> Mask:
        """The mask of the state that may have a tangent after some number of steps, if
        `of_state` has one before."""
        can_be = [jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) for x in self.state]
        perturbed = list(of_state)
        while perturbed != can_be:
            after = self._tangents(perturbed)
            merged = [a or b for a, b in zip(perturbed, after, strict=True)]
            if merged == perturbed:
                break
            perturbed = merged
        return perturbed

    def backward(self, of_state: Mask, wanted: Mask) -> tuple[Mask, Mask]:
        """The masks of the consts and the state that may have a cotangent before a step.

        `of_state` has a tangent, and `wanted` a cotangent after the last step.
        """
        while True:
            consts_hit, state_hit = self._cotangents(of_state, wanted)
            merged = [a or b for a, b in zip(wanted, state_hit, strict=True)]
            if merged == wanted:
                return consts_hit, wanted
            wanted = merged

    def _tangents(self, of_state: Mask) -> Mask:
        """The mask of the state that has a tangent after one step."""
        found = [False] * len(self.state)

        def see(i, has_tangent):
            found[i] = has_tangent

        def run(moving):
            return jax.jvp(lambda *moving: watch(step_of(moving), see), moving, moving)

        moving, step_of = self._moving(of_state)
        jax.eval_shape(run, moving)
        return found

    def _cotangents(self, of_state: Mask, wanted: Mask) -> tuple[Mask, Mask]:
        """The masks of the consts and the state that have a cotangent before one step."""
        hit: set[int] = set()

        def recording(i, x):
            @jax.custom_vjp
            def identity(x):
                return x

            def backward(_, ct):
                if type(ct) is not SymbolicZero:
                    hit.add(i)
                return (ct,)

            identity.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
            return identity(x)

        def marked(*moving):
            out = step_of([recording(i, x) for i, x in enumerate(moving)])
            return take(out, wanted)

        def run(moving):
            out, pull = jax.vjp(marked, *moving)
            return pull(out)

        moving, step_of = self._moving(of_state)
        jax.eval_shape(run, moving)
        numbers = itertools.count()
        is_hit = [x and next(numbers) in hit for x in (*self.of_consts, *of_state)]
        return is_hit[: len(self.consts)], is_hit[len(self.consts) :]

    def _moving(self, of_state: Mask) -> tuple[list[Any], Callable[..., list[Any]]]:
        """The arrays of the consts and the state that have tangents, and the step as a
        function of these."""
        inputs, mask = [*self.consts, *self.state], [*self.of_consts, *of_state]
        count = len(self.consts)

        def step_of(moving):
            values = put(inputs, mask, moving)
            return self.step(values[:count], values[count:])

        return take(inputs, mask), step_of
