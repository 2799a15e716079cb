"""`Loop`: a loop over flat arrays, in the form that all kinds of loop run.

Arrays that the condition and the body close over become explicit inputs, so that custom
rules can differentiate them. The first array of the state says whether the loop
continues. Under `jax.vmap` it is batched: elements that have finished keep their state
until all have.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat.axes import vary_over, varying_alike, varying_axes
from .._compat.jaxpr import eval_jaxpr, without_constants
from .._compat.primitives import (
    Zero,
    batching_rules,
    identity,
    instantiate,
    is_undefined_primal,
    jvp_rules,
    lower_as,
    new_primitive,
    transposition_rules,
)
from .._runtime.finalise import register_impl_finalisation
from .._runtime.primitives import unvmap_any_p
from .._tree.arrays import is_weak, reusable
from .._tree.filters import is_array, is_array_like

Mask = list[bool]


@dataclasses.dataclass(frozen=True)
class Loop:
    """One step of a loop, and its initial state.

    Arrays that the step never changes are in `consts`, not in `state`.
    """

    consts: list[Any]
    state: list[Any]
    is_buffer: list[bool]  # for each of `state`
    step: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    """`step(consts, state) -> state`"""
    complete: Callable[[Sequence[Any]], list[Any]]
    """From the last state to the last carry."""


def goes_on(state: Sequence[Any]) -> Any:
    """Whether the loop continues: one bool, true if any element of the batch does."""
    return unvmap_any_p.bind(state[0])


def stage(
    cond: Callable[[Any], Any],
    body: Callable[[Any, Any], Any],
    carry: Sequence[Any],
    is_buffer: Sequence[bool],
) -> Loop:
    """Traces the condition and the body of a loop.

    **Arguments:**

    - `cond`: from the arrays of a carry to a bool.
    - `body(pred, carry)`: from the arrays of a carry to those of the next one. Where
        `pred` is false, the loop has finished: `body` must pass it to `maybe_set_p` for
        each write to a buffer.
    - `carry`: the initial arrays.
    - `is_buffer`: which of them are buffers.
    """
    carry = list(map(jnp.asarray, carry))
    while True:
        goes_on_after = _traced_condition(cond, carry)
        step, kept = _step_of_state(goes_on_after, body, is_buffer)
        pred = goes_on_after(carry)
        jaxpr = jax.make_jaxpr(step)([pred, *carry])
        changed = as_after_a_step(carry, jaxpr.out_avals[1:])
        if changed is None:
            break
        carry = changed
    return _without_invariants(jaxpr, [pred, *carry], [False, *is_buffer], kept)


def _traced_condition(
    cond: Callable[[Any], Any], carry: list[Any]
) -> Callable[[Any], Any]:
    """The traced condition, which stops gradients."""

    @functools.wraps(cond)  # so that JAX's messages name what `cond` is shown as
    def flat(carry):
        return _as_condition(cond(carry))

    jaxpr = jax.make_jaxpr(flat)(carry)
    consts = list(map(lax.stop_gradient, jaxpr.consts))

    def goes_on_after(carry):
        carry = map(lax.stop_gradient, carry)
        (out,) = eval_jaxpr(jaxpr.jaxpr, consts, *carry)
        return out

    return goes_on_after


def is_boolean_scalar(x: Any) -> bool:
    is_scalar = is_array_like(x) and not jnp.shape(x)
    return is_scalar and jnp.issubdtype(jnp.result_type(x), jnp.bool_)


def _as_condition(out: Any) -> Any:
    if not is_boolean_scalar(out):
        shown = jax.typeof(out) if is_array(out) else repr(out)
        raise TypeError(
            f"The condition of a loop must return a bool or a boolean scalar; got {shown}."
        )
    return jnp.asarray(out)


def _step_of_state(
    goes_on_after: Any, body: Any, is_buffer: Sequence[bool]
) -> tuple[Callable[..., list[Any]], list[bool]]:
    """A step of the whole state, and the mask of the arrays that it returns unchanged,
    which is filled by a trace."""
    kept: list[bool] = []

    @functools.wraps(body)  # so that JAX's messages name what `body` is shown as
    def step(state):
        pred, *before = state
        after = body(pred, before)
        kept[:] = False, *(new is old for new, old in zip(after, before, strict=True))
        after = [
            new if buffer or new is old else _select(pred, new, old)
            for new, old, buffer in zip(after, before, is_buffer, strict=True)
        ]
        if list(map(_type, after)) != list(map(_type, before)):
            return [pred, *after]  # `stage` traces the condition for these types
        return [pred & goes_on_after(after), *after]

    return step, kept


def _type(x: Any) -> tuple[Any, ...]:
    return x.dtype, varying_axes(jax.typeof(x))


def _select(pred: Any, new: Any, old: Any) -> Any:
    was, now = jax.typeof(old), jax.typeof(new)
    if (was.shape, was.dtype) != (now.shape, now.dtype):
        may_become = is_weak(old) and jnp.result_type(old, now.dtype) == now.dtype
        if may_become and was.shape == now.shape:
            return new
        raise TypeError(
            "The body of a loop must return arrays of the types that it was given: "
            f"it was given {was}, and returned {now}."
        )
    if now.weak_type and not was.weak_type:
        new = lax.convert_element_type(new, was.dtype)
    # The step may have used a key `old`; nothing has used `new`, nor what is selected.
    return reusable(select_if_vmap(pred, new, reusable(old)))


def as_after_a_step(
    carry: list[Any], types: Sequence[Any], keeps_weak: bool = False
) -> list[Any] | None:
    """The carry, with weakly typed arrays in the dtypes that they have after a step, and
    arrays varying over the axes of a `shard_map` as they do then; `None` if none of
    them change.

    `keeps_weak`: whether an array stays weakly typed if a step changes only that.
    """
    changed = [
        vary_over(
            varying_axes(out),
            lax.convert_element_type(x, out.dtype)
            if is_weak(x)
            and (x.dtype != out.dtype or not (out.weak_type or keeps_weak))
            else x,
        )
        for x, out in zip(carry, types, strict=True)
    ]
    is_same = all(new is x for new, x in zip(changed, carry, strict=True))
    return None if is_same else changed


def _without_invariants(
    jaxpr: Any, state: list[Any], is_buffer: list[bool], kept: list[bool]
) -> Loop:
    varying = [not is_kept for is_kept in kept]
    # The step may outlive the trace that its constants belong to, so it takes them as
    # inputs.
    program, count = without_constants(jaxpr), len(jaxpr.consts)

    def whole(fixed_values, values):
        return put(put([None] * len(kept), kept, fixed_values), varying, values)

    def step(consts, values):
        out = eval_jaxpr(program, consts[:count], *whole(consts[count:], values))
        return take(out, varying)

    fixed_values = take(state, kept)
    axes = varying_axes(jaxpr.out_avals[0])
    return Loop(
        consts=[_same_for(axes, x) for x in (*jaxpr.consts, *fixed_values)],
        state=take(state, varying),
        is_buffer=take(is_buffer, varying),
        step=step,
        complete=lambda values: whole(fixed_values, values)[1:],
    )


def _same_for(axes: frozenset[Any], x: Any) -> Any:
    """`x`, marked if the devices along `axes` share it, which may differ in their steps.

    The backward pass of each step would sum its cotangent over the devices. One that
    takes more steps than another would wait for it for ever.
    """
    if axes <= varying_axes(jax.typeof(x)) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    names = tuple(sorted(axes, key=str))
    return one_way(
        x,
        "Cannot differentiate a loop whose number of steps may differ between the "
        f"devices of a `shard_map` along {', '.join(map(repr, names))}, with respect "
        "to an array that is the same on all of them: {}. Each step of the backward "
        "pass would sum over the devices, and those with fewer steps would never join. "
        f"Before the loop, mark the array: `x = jax.lax.pcast(x, {names!r}, "
        "to='varying')`. Its gradient is then summed once, after the loop.",
    )


def run_plain(
    step: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    consts: Sequence[Any],
    state: Sequence[Any],
    max_steps: int | None,
) -> list[Any]:
    """Runs the loop, and returns the last state."""

    def cond(counted):
        count, state = counted
        return goes_on(state) if count is None else (count < max_steps) & goes_on(state)

    def body(counted):
        count, state = counted
        return count if count is None else count + 1, step(consts, state)

    start = None if max_steps is None else np.int32(0)
    return lax.while_loop(cond, body, (start, list(state)))[1]


select_if_vmap_p: Any = new_primitive("select_if_vmap")
"""`select_if_vmap_p.bind(pred, x, y)` returns `[x]`. The bool `pred` is assumed to be
true. Under a `jax.vmap` that maps `pred`, it returns the elements of `x` where `pred`
is true, and the elements of `y` elsewhere."""


def select_if_vmap(pred: Any, x: Any, y: Any) -> Any:
    # A loop that ends elsewhere on each device ends with another carry on each.
    (out,) = select_if_vmap_p.bind(*varying_alike(pred, x, y))
    return out


# Of arrays, and of their types.
@select_if_vmap_p.def_abstract_eval
@select_if_vmap_p.def_impl
def _run(pred, x, y):
    return [x]


def _push_forward(primals, tangents):
    pred, x, y = primals
    _, dx, dy = tangents
    tangent = select_if_vmap(pred, instantiate(dx), instantiate(dy))
    return [select_if_vmap(pred, x, y)], [tangent]


def _pull_back(cotangents, pred, x, y):
    (ct,) = cotangents
    if type(ct) is Zero:
        return [None, None, None]
    zeros = jnp.zeros_like(ct)
    return [
        None,
        select_if_vmap(pred, ct, zeros) if is_undefined_primal(x) else None,
        select_if_vmap(pred, zeros, ct) if is_undefined_primal(y) else None,
    ]


def _batch(args, axes):
    # By `jax.vmap`, since the batch may be split over the explicit axes of a mesh.
    pred, x, y = args
    if axes[0] is not None:
        return [jax.vmap(jnp.where, axes)(pred, x, y)], [0]
    x, y = jax.vmap(lambda *both: both, axes[1:])(x, y)
    return [select_if_vmap(pred, x, y)], [0]


jvp_rules[select_if_vmap_p] = _push_forward
transposition_rules[select_if_vmap_p] = _pull_back
batching_rules[select_if_vmap_p] = _batch
lower_as(select_if_vmap_p, _run)
register_impl_finalisation(select_if_vmap_p)


def one_way(x: Any, reason: str) -> Any:
    """`x`. Reverse mode raises a `ValueError` with the reason and the type of `x`."""
    (x,) = _one_way_p.bind(x, reason=reason.format(jax.typeof(x)))
    return x


def _push_on(primals, tangents, *, reason):
    (tangent,) = _one_way_p.bind(*tangents.values(), reason=reason)
    return _one_way_p.bind(*primals, reason=reason), {0: tangent}


def _refuse(cotangents, *, reason):
    raise ValueError(reason)


_one_way_p: Any = identity("one_way", jvp=_push_on, transpose=_refuse)


def take(values: Sequence[Any], mask: Mask) -> list[Any]:
    """The values where the mask is `True`."""
    return [x for x, chosen in zip(values, mask, strict=True) if chosen]


def put(values: Sequence[Any], mask: Mask, new: Sequence[Any]) -> list[Any]:
    """The values, with new ones where the mask is `True`."""
    remaining = iter(new)
    return [
        next(remaining) if chosen else x for x, chosen in zip(values, mask, strict=True)
    ]
