"""Primitives that return their inputs, with rules of their own under transformations.

JAX has no public way to define a primitive. Serves jax 0.10 to 0.12 by `rules.py`, and
`register_lowering` of `jax.interpreters.mlir`. There is no fallback: if they no longer
exist, this file cannot be imported.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.interpreters import mlir

from .primitive import finalisations
from .rules import (
    Zero,
    batching_rules,
    is_undefined_primal,
    jvp_rules,
    new_primitive,
    transposition_rules,
)

# From the index of an array to its tangent or cotangent; a missing index is a zero.
Tangents = dict[int, Any]


def identity(
    name: str,
    *,
    jvp: Callable[..., tuple[Sequence[Any], Tangents]],
    transpose: Callable[..., Tangents],
    batch: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
    on_stage: Callable[..., None] = lambda stage, **params: None,
) -> Any:
    """A primitive that takes any number of arrays and returns them.

    All of these get the static parameters of the primitive as keyword arguments.

    - `jvp(primals, tangents)` returns the outputs and their tangents. It is called only if
        some tangent is not a symbolic zero.
    - `transpose(cotangents)` returns the cotangents of the inputs. It is called only if
        some cotangent is not a symbolic zero.
    - `batch(arrays, axes)` returns the outputs and their axes, with `None` for an array
        that has no batch axis.
    - `on_stage(stage)` is called when the primitive is evaluated (`"impl"`), abstractly
        evaluated (`"abstract"`) or lowered (`"mlir"`).
    """
    primitive = new_primitive(name)

    def evaluate(*arrays: Any, **params: Any) -> list[Any]:
        on_stage("impl", **params)
        return list(arrays)

    def evaluate_abstractly(*avals: Any, **params: Any) -> list[Any]:
        on_stage("abstract", **params)
        return list(avals)

    def lower(_: Any, *values: Any, **params: Any) -> list[Any]:
        on_stage("mlir", **params)
        return list(values)

    def differentiate(primals: Any, tangents: Any, **params: Any) -> Any:
        out, out_tangents = jvp(primals, _nonzero(tangents), **params)
        return out, _with_zeros(out_tangents, tangents)

    def go_back(cotangents: Any, *inputs: Any, **params: Any) -> list[Any]:
        nonzero = _nonzero(cotangents)
        found = transpose(nonzero, **params) if nonzero else nonzero
        return [
            x if is_undefined_primal(i) else None
            for x, i in zip(_with_zeros(found, cotangents), inputs, strict=True)
        ]

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(evaluate_abstractly)
    jvp_rules[primitive] = differentiate
    transposition_rules[primitive] = go_back
    batching_rules[primitive] = batch
    mlir.register_lowering(primitive, lower, cacheable=False)
    finalisations[primitive] = lambda *arrays, **_: list(arrays)
    return primitive


def _nonzero(tangents: Sequence[Any]) -> Tangents:
    return {i: t for i, t in enumerate(tangents) if not isinstance(t, Zero)}


def _with_zeros(tangents: Tangents, given: Sequence[Any]) -> list[Any]:
    """A tangent for each array; a missing one is the symbolic zero in `given`."""
    return [tangents.get(i, t) for i, t in enumerate(given)]
