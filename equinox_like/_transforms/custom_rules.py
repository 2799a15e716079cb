"""What `custom_jvp.py`, `custom_vjp.py` and `custom_vmap.py` share.

JAX gets the arrays as inputs, never by closure, since it may run a rule long after the
call. What the user may perturb comes first; all other arrays are *held*: passed to JAX
too, and it is an error if they are perturbed anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._core.difference import ARRAY_TYPE, STATIC_VALUE, tree_differences
from .._core.pack import unpack
from .._core.parts import is_array_or_struct, is_number
from .._tree.arrays import describe_type
from .._tree.filters import is_inexact_array
from .._tree.nodes import describe_node
from .tangents import is_zero, shape_and_dtype


class Rules:
    """The rules of one function; attached after it was wrapped. Equal to itself alone."""

    jvp: Callable[..., Any] | None = None
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    # The old form of the backward rule knows no symbolic zeros.
    materialises: bool = False
    # Whether `fwd` may return something else than the function, and is checked.
    may_change_output: bool = True


def hold(values: Sequence[Any], error: Callable[[int], Exception]) -> list[Any]:
    """`values`, none of which may have a tangent.

    If one has, `error(index)` of the first of these is raised.
    """

    @jax.custom_jvp
    def identity(values):
        return values

    def rule(primals, tangents):
        for i, tangent in enumerate(tangents[0]):
            if not is_zero(tangent):
                raise error(i)
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    return (
        identity(list(values)) if any(map(is_inexact_array, values)) else list(values)
    )


def pair_of(returned: Any, rule: str, pair: str) -> tuple[Any, Any]:
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return returned[0], returned[1]
    raise TypeError(
        f"{rule} must return a pair `{pair}`; it returned {describe_node(returned)}."
    )


def check_output(
    out: Any,
    flat: Callable[..., Any],
    args: tuple[Any, ...],
    rule: str,
    type_of: Callable[[Any], str],
) -> None:
    """Raises if the output of a rule is not of the form of the function's own output.

    JAX takes the one or the other, depending on whether the function is differentiated.
    """
    try:
        # JAX remembers the trace, with what the function captures, until the function that
        # it was given dies: not `flat`, which lives on in traces.
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
