"""The checkpointed loop: reverse mode when the number of steps is not known in advance.

The forward pass saves some of the states (`schedule.py`). The backward pass
differentiates one step at a time, from the last to the first. The state before a step
is either saved, or recomputed from the last saved state before it.

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
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._compat.primitives import Zero
from .._runtime.vprim import create_vprim
from .._transforms.jvp_vjp import watch
from .schedule import Marks, Online, put_if, value_at
from .staging import Loop, Mask, goes_on, one_way, put, run_plain, take


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
        perturbed = spread_forward(step, consts, state, of_consts, of_state)
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


class _Saved(NamedTuple):
    """What the backward pass needs from the forward pass."""

    consts: list[Any]
    stacks: list[Any]
    marks: Marks
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

    def forward(self, consts: Any, state: Any) -> tuple[list[Any], _Saved]:
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
        marks = online.marks(progress, count)
        buffers = take(state, self.is_buffer)
        return state, _Saved(consts, stacks, marks, count, buffers)

    def backward(self, saved: _Saved, cotangents: Sequence[Any]) -> list[Any]:
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
        masks = spread_backward(
            self.step, saved.consts, state, consts_given, self.perturbed, wanted
        )
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
        self, saved: _Saved, masks: tuple[Mask, Mask], ct_consts: Any, ct_state: Any
    ) -> tuple[list[Any], list[Any]]:
        """Differentiates the steps from the last to the first."""

        def body(carry):
            target, marks, stacks, buffers, ct_consts, ct_state = carry
            marks, stacks, state = self._replay(
                saved.consts, target, marks, stacks, buffers
            )
            buffers, more, ct_state = self._pull_back(
                saved.consts, state, masks, ct_state
            )
            ct_consts = [a + b for a, b in zip(ct_consts, more, strict=True)]
            step, _ = marks.last()
            marks = marks.pop_if(step == target)
            return target - 1, marks, stacks, buffers, ct_consts, ct_state

        start = saved.count - 1, saved.marks, saved.stacks, saved.buffers
        carry = *start, ct_consts, ct_state
        return lax.while_loop(lambda carry: carry[0] >= 0, body, carry)[-2:]

    def _replay(
        self, consts: Any, target: Any, marks: Marks, stacks: Any, buffers: Any
    ) -> tuple[Marks, list[Any], list[Any]]:
        """The state before step `target`, recomputed from the last saved state.

        Saves states on the way, if there are free slots.
        """

        def body(carry):
            step, stop, marks, stacks, state = carry
            step, state = step + 1, self.step(consts, state)
            is_saved = (step == stop) & (stop < target)
            stacks = self._put_if(is_saved, stacks, marks.free_slot(), state)
            marks = marks.push_if(is_saved, step)
            stop = jnp.where(is_saved, marks.next_stop(step, target), stop)
            return step, stop, marks, stacks, state

        step, slot = marks.last()
        state = self._state([value_at(x, slot) for x in stacks], buffers)
        if marks.steps is None:
            return marks, stacks, state  # nothing to recompute
        carry = step, marks.next_stop(step, target), marks, stacks, state
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


def spread_forward(
    step: Any, consts: Any, state: Any, of_consts: Mask, of_state: Mask
) -> Mask:
    """The mask of the state that may have a tangent after some number of steps.

    `of_consts` and `of_state` are the masks of those that have one before.
    """
    can_be = [jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) for x in state]
    perturbed = list(of_state)
    while perturbed != can_be:
        after = _tangents_of_step(step, consts, state, of_consts, perturbed)
        merged = [a or b for a, b in zip(perturbed, after, strict=True)]
        if merged == perturbed:
            break
        perturbed = merged
    return perturbed


def spread_backward(
    step: Any, consts: Any, state: Any, of_consts: Mask, of_state: Mask, wanted: Mask
) -> tuple[Mask, Mask]:
    """The masks of the consts and the state that may have a cotangent before a step.

    **Arguments:**

    - `of_consts`, `of_state`: the masks of those that have a tangent.
    - `wanted`: the mask of the state that has a cotangent after the last step.
    """
    while True:
        consts_hit, state_hit = _cotangents_of_step(
            step, consts, state, of_consts, of_state, wanted
        )
        merged = [a or b for a, b in zip(wanted, state_hit, strict=True)]
        if merged == wanted:
            return consts_hit, wanted
        wanted = merged


def _tangents_of_step(
    step: Any, consts: Any, state: Any, of_consts: Mask, of_state: Mask
) -> Mask:
    found = [False] * len(state)

    def see(i, has_tangent):
        found[i] = has_tangent

    def run(moving):
        return jax.jvp(lambda *moving: watch(step_of(moving), see), moving, moving)

    moving, step_of = _moving(step, consts, state, of_consts, of_state)
    jax.eval_shape(run, moving)
    return found


def _cotangents_of_step(
    step: Any, consts: Any, state: Any, of_consts: Mask, of_state: Mask, wanted: Mask
) -> tuple[Mask, Mask]:
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

    def run(moving):
        def marked(*moving):
            return take(
                step_of([recording(i, x) for i, x in enumerate(moving)]), wanted
            )

        out, pull = jax.vjp(marked, *moving)
        return pull(out)

    moving, step_of = _moving(step, consts, state, of_consts, of_state)
    jax.eval_shape(run, moving)
    numbers = itertools.count()
    is_hit = [x and next(numbers) in hit for x in (*of_consts, *of_state)]
    return is_hit[: len(consts)], is_hit[len(consts) :]


def _moving(
    step: Any, consts: Any, state: Any, of_consts: Mask, of_state: Mask
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The arrays of the consts and the state that have tangents, and the step as a
    function of these."""
    inputs, mask = [*consts, *state], [*of_consts, *of_state]

    def step_of(moving):
        values = put(inputs, mask, moving)
        return step(values[: len(consts)], values[len(consts) :])

    return take(inputs, mask), step_of
