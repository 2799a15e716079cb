"""Primitives of our own, and the tables of their rules.

JAX has no public way to define a primitive, nor to see a whole batch under `jax.vmap`.
Serves jax 0.10 to 0.12: `Primitive` of `jax._src.core`, or of `jax.extend.core` (slow
to import) if that no longer exists; the tables in `jax.interpreters`, of which
`fancy_primitive_batchers` has rules that get the name of the axis of a `jax.vmap`; and the
class `ShapedArray` of `jax.core`. There is no fallback for the others: without them this
file cannot be imported, nor what uses it: `nn`, `debug`, `internal` and the names in
`_late.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from . import find

Primitive: Any = find("Primitive", "jax._src.core", "jax.extend.core")

# For each of our primitives, a function of JAX's primitives alone: see `finalise.py`.
finalisations: dict[Any, Callable[..., Any]] = {}


def for_whole_batch(
    name: str,
    function: Callable[..., Any],
    like: Callable[..., Any],
    eager: Callable[..., Any] | None = None,
) -> Any:
    """A primitive that computes `function` once for a whole batch under `jax.vmap`.

    `function` gets arrays with the batch axes first, outermost first, and its result is
    for the whole batch. The derivative of a bool or an integer is zero; other results
    have none. `like` is a simpler function with a result of the same type. `eager` is
    called instead of `function` with arrays whose values are known. `function` and `eager`
    may have static parameters.
    """
    primitive = Primitive(name)

    def batch(args: Any, axes: Any, **params: Any) -> tuple[Any, None]:
        size = batch_size(args, axes)
        whole = [
            _repeated(x, size) if i is None else jnp.moveaxis(x, i, 0)
            for x, i in zip(args, axes, strict=True)
        ]
        return primitive.bind(*whole, **params), None

    def type_of_result(*args: Any, **_: Any) -> Any:
        # JAX derives the shardings and manual axes of the result.
        (result,) = jax.make_jaxpr(like)(*args).out_avals
        return result

    def differentiate(primals: Any, _: Any, **params: Any) -> tuple[Any, Any]:
        result = primitive.bind(*primals, **params)
        if jnp.issubdtype(result.dtype, jnp.inexact):
            raise NotImplementedError(f"{name!r} has no derivative.")
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())

    primitive.def_impl(eager or function)
    primitive.def_abstract_eval(type_of_result)
    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    lower = mlir.lower_fun(function, multiple_results=False)
    mlir.register_lowering(primitive, lower, cacheable=False)
    finalisations[primitive] = function
    return primitive


def batch_size(args: Sequence[Any], axes: Sequence[int | None]) -> int:
    """The size of the batch axis, from the arguments of a batching rule."""
    return next(x.shape[i] for x, i in zip(args, axes, strict=True) if i is not None)


def _repeated(x: Any, size: int) -> jax.Array:
    x = jnp.asarray(x, jax.typeof(x).dtype)  # JAX's literals are not arrays
    return jnp.broadcast_to(x, (size, *x.shape))


Zero: Any = ad.Zero
"""The class of symbolic zeros, which rules get and return: `Zero(aval)`."""
UndefinedPrimal: Any = ad.UndefinedPrimal
"""A transposition rule gets one for each input whose cotangent it must return."""
is_undefined_primal: Callable[[Any], bool] = ad.is_undefined_primal
ShapedArray: Any = jax.core.ShapedArray

jvp_rules: dict[Any, Any] = ad.primitive_jvps
transposition_rules: dict[Any, Any] = ad.primitive_transposes
batching_rules: Any = batching.primitive_batchers


def new_primitive(name: str) -> Any:
    """A primitive that takes and returns lists of arrays, without any rule."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


def register_batching(primitive: Any, rule: Callable[..., Any]) -> None:
    """Batches the primitive by `rule(name, args, axes, **params)`.

    `name` is that of the axis of the `jax.vmap`, for collectives within the primitive.
    """

    def with_axis(axis, args, axes, /, **params):
        if any(i is not None for i in axes):
            return rule(axis.name, args, axes, **params)
        out = primitive.bind(*args, **params)
        return out, [None] * len(out)

    batching.fancy_primitive_batchers[primitive] = with_axis


def lower_as(primitive: Any, function: Callable[..., Sequence[Any]]) -> None:
    """Lowers the primitive by tracing `function`."""
    lower = mlir.lower_fun(function, multiple_results=True)
    mlir.register_lowering(primitive, lower)


def zero_like(x: Any) -> Any:
    """The symbolic zero for a tangent or cotangent of `x`, an array or its type."""
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return Zero(aval.to_tangent_aval())


def instantiate(zero: Any) -> Any:
    """A symbolic zero as an array; anything else as it is."""
    return ad.instantiate_zeros(zero)


def as_aval(x: Any) -> Any:
    """The abstract value of an array, or of an object with its shape and dtype."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return ShapedArray(x.shape, x.dtype, weak_type=bool(x.weak_type))
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def as_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """The reverse of `as_aval`, without the sharding."""
    # A typed key has no weak type.
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


# From the index of an array to its tangent or cotangent; a missing index is a zero.
Tangents = dict[int, Any]


def identity(
    name: str,
    *,
    jvp: Callable[..., tuple[Sequence[Any], Tangents]] | None = None,
    transpose: Callable[..., Tangents] = lambda cotangents, **params: cotangents,
    batch: Callable[..., tuple[Sequence[Any], Sequence[Any]]] | None = None,
    on_stage: Callable[..., None] = lambda stage, **params: None,
) -> Any:
    """A primitive that takes any number of arrays and returns them.

    All of these get the static parameters of the primitive as keyword arguments.

    - `jvp(primals, tangents)` returns the outputs and their tangents. It is called only if
        some tangent is not a symbolic zero. By default tangents pass unchanged.
    - `transpose(cotangents)` returns the cotangents of the inputs, by default the same. It
        is called only if some cotangent is not a symbolic zero.
    - `batch(arrays, axes)` returns the outputs and their axes, with `None` for an array
        that has no batch axis; by default the axes stay where they are.
    - `on_stage(stage)` is called when the primitive is evaluated (`"impl"`), abstractly
        evaluated (`"abstract"`) or lowered (`"mlir"`).
    """
    primitive = new_primitive(name)

    def evaluate(*arrays: Any, **params: Any) -> list[Any]:
        on_stage("impl", **params)
        # A literal of a jaxpr may be a number.
        return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]

    def evaluate_abstractly(*avals: Any, **params: Any) -> list[Any]:
        on_stage("abstract", **params)
        return list(avals)

    def lower(_: Any, *values: Any, **params: Any) -> list[Any]:
        on_stage("mlir", **params)
        return list(values)

    def differentiate(primals: Any, tangents: Any, **params: Any) -> Any:
        if jvp is None:
            return primitive.bind(*primals, **params), tangents
        out, out_tangents = jvp(primals, _nonzero(tangents), **params)
        return out, _with_zeros(out_tangents, tangents)

    def go_back(cotangents: Any, *inputs: Any, **params: Any) -> list[Any]:
        nonzero = _nonzero(cotangents)
        found = transpose(nonzero, **params) if nonzero else nonzero
        return [
            x if is_undefined_primal(i) else None
            for x, i in zip(_with_zeros(found, cotangents), inputs, strict=True)
        ]

    def batch_unchanged(arrays: Any, axes: Any, **params: Any) -> Any:
        return primitive.bind(*arrays, **params), axes

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(evaluate_abstractly)
    jvp_rules[primitive] = differentiate
    transposition_rules[primitive] = go_back
    batching_rules[primitive] = batch or batch_unchanged
    mlir.register_lowering(primitive, lower, cacheable=False)
    finalisations[primitive] = lambda *arrays, **_: list(arrays)
    return primitive


def _nonzero(tangents: Sequence[Any]) -> Tangents:
    return {i: t for i, t in enumerate(tangents) if not isinstance(t, Zero)}


def _with_zeros(tangents: Tangents, given: Sequence[Any]) -> list[Any]:
    """A tangent for each array; a missing one is the symbolic zero in `given`."""
    return [tangents.get(i, t) for i, t in enumerate(given)]
