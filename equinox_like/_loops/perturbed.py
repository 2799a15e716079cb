"""Which arrays of a loop have tangents, and which have cotangents.

The step is traced under JAX's own differentiation, with symbolic zeros. Identities with
custom rules record which values have a tangent or a cotangent that is not zero.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._transforms.tangents import watch

Mask = list[bool]


def spread_forward(
    step: Any, consts: Any, state: Any, of_consts: Mask, of_state: Mask
) -> Mask:
    """The mask of the state that may have a tangent after some number of steps.

    `of_consts` and `of_state` are the masks of those that have one before.
    """
    can_be = [_is_inexact(x) for x in state]
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


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _tangents_of_step(
    step: Any, consts: Any, state: Any, of_consts: Mask, of_state: Mask
) -> Mask:
    found = [False] * len(state)

    def see(i, has_tangent):
        found[i] = has_tangent

    def run(consts, state):
        def marked(*perturbed):
            out = step(*_put(consts, state, of_consts, of_state, perturbed))
            return watch(out, see)

        given = _take(consts, state, of_consts, of_state)
        return jax.jvp(marked, given, given)

    jax.eval_shape(run, consts, state)
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

    def run(consts, state):
        def marked(*perturbed):
            perturbed = [recording(i, x) for i, x in enumerate(perturbed)]
            out = step(*_put(consts, state, of_consts, of_state, perturbed))
            return [x for x, is_wanted in zip(out, wanted, strict=True) if is_wanted]

        out, pull = jax.vjp(marked, *_take(consts, state, of_consts, of_state))
        return pull(out)

    jax.eval_shape(run, consts, state)
    numbers = iter(range(len(of_consts) + len(of_state)))
    masks = [
        [is_perturbed and next(numbers) in hit for is_perturbed in mask]
        for mask in (of_consts, of_state)
    ]
    return masks[0], masks[1]


def take(values: Sequence[Any], mask: Mask) -> list[Any]:
    """The values where the mask is `True`."""
    return [x for x, chosen in zip(values, mask, strict=True) if chosen]


def put(values: Sequence[Any], mask: Mask, new: Sequence[Any]) -> list[Any]:
    """The values, with new ones where the mask is `True`."""
    remaining = iter(new)
    return [
        next(remaining) if chosen else x for x, chosen in zip(values, mask, strict=True)
    ]


def _take(consts: Any, state: Any, of_consts: Mask, of_state: Mask) -> tuple[Any, ...]:
    return (*take(consts, of_consts), *take(state, of_state))


def _put(
    consts: Any, state: Any, of_consts: Mask, of_state: Mask, perturbed: Any
) -> Any:
    count = sum(of_consts)
    return (
        put(consts, of_consts, perturbed[:count]),
        put(state, of_state, perturbed[count:]),
    )
