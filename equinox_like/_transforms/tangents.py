"""Tangents and cotangents of any pytrees: trees like the primal, with `None` leaves.

`None` is the tangent of a leaf that is not differentiated. JAX's float0 arrays are
accepted in its place, but never returned. Shared by `jvp.py`, `vjp.py`, `jacobian.py`
and the custom rules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from .._core.flat_call import FlatCall, pack, unpack, value_and_aux
from .._tree.filters import is_array_like, is_inexact_array, is_none
from .._tree.match import pair_leaves
from .._tree.nodes import describe_node, path_str
from .._tree.partitioning import combine, partition


def by_parts(call: FlatCall, has_aux: bool = False) -> Callable[..., Any]:
    """A call as a function for JAX to differentiate with `has_aux=True`.

    It maps the data to the output, with `None` for all leaves that are not inexact arrays.
    These leaves are auxiliary, and `rejoin` puts them back.
    """

    def flat(data):
        out, aux = call.run(data), None
        if has_aux:
            out, aux = value_and_aux(call.fun, out)
        inexact, others = partition(out, is_inexact_array)
        return inexact, pack((others, aux))

    return flat


def rejoin(inexact: Any, packed: Any) -> tuple[Any, Any]:
    """The output and the auxiliary output, from what a `by_parts` function returned."""
    others, aux = unpack(packed)
    return combine(inexact, others), aux


def match_tangents(primals: Any, tangents: Any, name: str = "tangents") -> list[Any]:
    """The tangent of each leaf of `primals`, where `None` counts as a leaf.

    Primals may be `jax.ShapeDtypeStruct`s, as only their shapes and dtypes are used.

    **Raises:**

    `ValueError` if structures or shapes differ; `TypeError` if dtypes differ, or a leaf
    that is not differentiated has a tangent.
    """
    owner = "the output" if name == "cotangent" else "the primals"
    message = (
        f"`{name}` must have the structure of {owner}, with `None` for leaves that are "
        "not differentiated."
    )
    return [
        _match(primal, tangent, path_str(path, name))
        for path, primal, tangent in pair_leaves(
            primals, tangents, message, name, is_none
        )
    ]


def _match(primal: Any, tangent: Any, name: str) -> Any:
    if tangent is None:
        return None
    if not is_array_like(tangent):
        raise TypeError(
            f"`{name}` is {describe_node(tangent)}, which is not a tangent: pass an "
            "array, or `None` for a leaf that is not differentiated. `filter(tree, "
            "is_inexact_array)` has `None` there."
        )
    shape, dtype = shape_and_dtype(primal)
    given_shape, given_dtype = shape_and_dtype(tangent)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        if given_dtype == jax.dtypes.float0:
            return None
        what = "" if dtype is None else f" of dtype {dtype}"
        raise TypeError(
            f"`{name}` belongs to a leaf{what} that is not differentiated, as it is not a "
            "floating-point or complex array: it must be `None`."
        )
    if shape != given_shape:
        raise ValueError(
            f"`{name}` has shape {given_shape}, but belongs to an array of shape "
            f"{shape}."
        )
    if dtype != given_dtype:
        raise TypeError(
            f"`{name}` has dtype {given_dtype}, but belongs to an array of dtype "
            f"{dtype}."
        )
    return tangent


def shape_and_dtype(x: Any) -> tuple[Any, Any]:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype
    if not is_array_like(x):
        return None, None
    return jnp.shape(x), x.dtype if is_float0(x) else jnp.result_type(x)


def is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is symbolically zero, so that its values need not be read."""
    return type(tangent) is SymbolicZero or is_float0(tangent)


def watch(values: Sequence[Any], see: Callable[[int, bool], None]) -> list[Any]:
    """The values. Their derivative calls `see(index, has_tangent)` for each of them.

    `jax.jvp` returns arrays of zeros for zero tangents; a rule with symbolic zeros can
    tell them apart.
    """

    @jax.custom_jvp
    def identity(values):
        return values

    def rule(primals, tangents):
        for i, tangent in enumerate(tangents[0]):
            see(i, not is_zero(tangent))
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    return identity(list(values))


def refuse_non_arrays(
    out: Any,
    name: str,
    transformation: str,
    takes: Callable[[Any], bool] = is_array_like,
) -> None:
    """Raises `TypeError` for the first leaf of an output that JAX cannot take."""
    for path, leaf in jtu.tree_flatten_with_path(out)[0]:
        if not takes(leaf):
            raise TypeError(
                f"`{transformation}` of `{name}`: the output must hold arrays and "
                f"numbers only; `{path_str(path, 'output')}` is {describe_node(leaf)}."
            )
