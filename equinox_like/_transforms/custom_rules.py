"""Helpers shared by `custom_jvp.py`, `custom_vjp.py` and `custom_vmap.py`.

All arrays are passed to JAX as inputs and never closed over, because JAX may run a rule
long after the call. The differentiable arrays come first. All other arrays are *held*:
they are inputs too, but it is an error if they have a tangent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._compat.identity import identity
from .._core.difference import ARRAY_TYPE, STATIC_VALUE, tree_differences
from .._core.pack import unpack
from .._core.parts import is_array_or_struct, is_number
from .._tree.arrays import describe_type
from .._tree.filters import is_inexact_array
from .tangents import is_zero, shape_and_dtype


class Rules:
    """The rules of one function, attached after wrapping it. Compared by identity."""

    jvp: Callable[..., Any] | None = None
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    # Whether zero cotangents are passed as arrays, as the old `defvjp` does.
    materialises: bool = False
    # Whether `fwd` may return a different output than the function, and so is checked.
    may_change_output: bool = True


def hold(values: Sequence[Any], error: Callable[[int], Exception]) -> list[Any]:
    """Returns `values`, and raises `error(index)` for the first one with a tangent."""

    @jax.custom_jvp
    def held(values):
        return values

    def rule(primals, tangents):
        for i, tangent in enumerate(tangents[0]):
            if not is_zero(tangent):
                raise error(i)
        return primals[0], tangents[0]

    held.defjvp(rule, symbolic_zeros=True)
    return held(list(values)) if any(map(is_inexact_array, values)) else list(values)


def reverse_only(values: Sequence[Any], message: str) -> list[Any]:
    """Returns `values`; forward-mode autodiff raises `TypeError(message)`.

    It raises where a tangent is evaluated, batched or compiled. Reverse mode does none of
    these: it transposes what computes the tangents. The rules of a `jax.custom_vjp` raise
    in the same places, but later, and do not name the function.
    """
    return _reverse_only_p.bind(*values, message=message) if values else []


def _refuse_forward_mode(stage: str, message: str) -> Any:
    if stage != "abstract":
        raise TypeError(message)


_reverse_only_p = identity(
    "reverse_only",
    # An outer transformation may use forward mode: it differentiates the rules.
    jvp=lambda primals, tangents, **params: (
        primals,
        {i: _tangent_p.bind(t, **params)[0] for i, t in tangents.items()},
    ),
    transpose=lambda cotangents, **_: cotangents,
    batch=lambda arrays, axes, **params: (
        _reverse_only_p.bind(*arrays, **params),
        axes,
    ),
)
_tangent_p = identity(
    "tangent_of_reverse_only",
    jvp=lambda primals, tangents, **params: (
        _tangent_p.bind(*primals, **params),
        {i: _tangent_p.bind(t, **params)[0] for i, t in tangents.items()},
    ),
    transpose=lambda cotangents, **_: cotangents,
    batch=lambda arrays, axes, message: _refuse_forward_mode("batch", message),
    on_stage=_refuse_forward_mode,
)


def check_output(
    out: Any,
    flat: Callable[..., Any],
    args: tuple[Any, ...],
    rule: str,
    type_of: Callable[[Any], str],
) -> None:
    """Raises if a rule's output differs from the function's in more than array values.

    JAX uses one or the other, depending on whether the function is differentiated.
    """
    try:
        # JAX caches the trace, and what the function captures, as long as the function
        # lives. So it gets a new function: `flat` itself lives on in other traces.
        own = unpack(jax.eval_shape(lambda *args: flat(*args), *args))
    except Exception:
        return  # a function that does not run without values
    for found in tree_differences("output", own, out, _is_number_or_struct, type_of):
        if found.kind != STATIC_VALUE:  # for example a new function object
            error = TypeError if found.kind == ARRAY_TYPE else ValueError
            raise error(
                f"{rule} must return the same output as the function, except for the "
                f"values of arrays: `{found.path}` is {found.before} from the "
                f"function, but {found.after} from the rule."
            )


def _is_number_or_struct(x: Any) -> bool:
    return is_array_or_struct(x) or is_number(x)


def type_of(x: Any) -> str:
    shape, dtype = shape_and_dtype(x)
    return f"an array {describe_type(dtype, shape)}"
