"""Helpers shared by `custom_jvp.py`, `custom_vjp.py` and `custom_vmap.py`.

All arrays are passed to JAX as inputs and never closed over, because JAX may run a rule
long after the call. The differentiable arrays come first. All other arrays are *held*:
they are inputs too, but it is an error if they have a tangent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._compat.tracing import Tracer
from .._core.difference import ARRAY_TYPE, STATIC_VALUE, tree_differences
from .._core.flat_call import unpack
from .._tree.arrays import describe_type
from .._tree.filters import is_array_or_struct, is_inexact_array, is_number
from .tangents import shape_and_dtype, watch


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

    def __deepcopy__(self, memo: Any) -> "Rules":
        return self  # as for the functions themselves, so that the treedefs are equal


def hold(values: Sequence[Any], error: Callable[[int], Exception]) -> list[Any]:
    """Returns `values`, and raises `error(index)` for the first one with a tangent."""

    def see(i, has_tangent):
        if has_tangent:
            raise error(i)

    return watch(values, see) if any(map(is_inexact_array, values)) else list(values)


def batched_in_front(out: Any) -> Any:
    """`out`, with the axis of any `vmap` in front.

    JAX differentiates a compiled `vmap`, as in `grad(jit(vmap(f)))` or in a scan, as if
    a function and its rule always put that axis in the same place (until jax 0.12, where
    the flags `JAX_CUSTOM_JVP3` and `JAX_CUSTOM_VJP3` repair it). The gradient is wrong if
    they do not. Adding an axis moves that of the `vmap` to the front.
    """

    def in_front(x):
        if not isinstance(x, Tracer):
            return x
        return jax.lax.squeeze(jax.lax.expand_dims(x, [0]), [0])

    return jax.tree.map(in_front, out)


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
