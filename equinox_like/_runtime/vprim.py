"""`create_vprim`: a primitive whose batching rule is derived from its other rules.

Batching yields a second primitive, whose parameters hold the axes of each `jax.vmap`,
outermost first. Its rules apply these `jax.vmap`s to the rules of the first primitive.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from .._compat.primitives import (
    UndefinedPrimal,
    Zero,
    batch_size,
    finalisations,
    is_undefined_primal,
    jvp_rules,
    lower_as,
    new_primitive,
    register_batching,
    transposition_rules,
    zero_like,
)


class _Batch(NamedTuple):
    """One `jax.vmap`: the batch axis of each input, or `None`, its size and its name."""

    axes: tuple[int | None, ...]
    size: int
    name: Any


def create_vprim(
    name: str,
    impl: Callable[..., Sequence[Any]],
    abstract_eval: Callable[..., Sequence[Any]],
    jvp: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
    transpose: Callable[..., Sequence[Any]],
) -> Any:
    """Makes a primitive of JAX from four rules; its batching rule is derived from them.

    **Arguments:**

    - `name`: the name of the primitive in jaxprs.
    - `impl`: `impl(*arrays, **params) -> list of arrays`. JAX must be able to trace it,
        because JAX compiles the traced function.
    - `abstract_eval`: the same function of `jax.core.ShapedArray`s.
    - `jvp`: `jvp(primals, tangents, **params) -> (out, out_tangents)`, lists, with JAX's
        symbolic zeros.
    - `transpose`: `transpose(cotangents, *inputs, **params) -> list of cotangents`, with
        JAX's `UndefinedPrimal` for the inputs whose cotangent is wanted.

    The rules never see a batch axis.

    **Returns:**

    A primitive with `multiple_results = True`; call its `bind(*arrays, **params)`.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from equinox_like import internal as eqxi

        def total(x):
            return [x.sum()]

        def total_jvp(primals, tangents):
            return total_p.bind(*primals), total_p.bind(*tangents)

        def total_transpose(cotangents, x):
            return [jnp.broadcast_to(cotangents[0], x.aval.shape)]

        def total_type(x):
            return [jax.core.ShapedArray((), x.dtype)]

        total_p = eqxi.create_vprim("total", total, total_type, total_jvp, total_transpose)
        (out,) = jax.vmap(lambda x: total_p.bind(x))(jnp.ones((3, 4)))
        assert out.tolist() == [4, 4, 4]
        ```
    """
    single, batched = new_primitive(name), new_primitive(f"{name}_batched")

    def run(*args, batches, **params):
        return _mapped(partial(impl, **params), batches)(*args)

    def type_of_results(*avals, batches, **params):
        def one(*args):
            types = abstract_eval(*map(jax.typeof, args), **params)
            return _arrays_p.bind(types=tuple(types))

        # JAX adds the batch axes, which may be split over the explicit axes of a mesh.
        return jax.make_jaxpr(_mapped(one, batches))(*avals).out_avals

    def push_forward(primals, tangents, /, *, batches, **params):
        return _map_jvp(partial(jvp, **params), batches, primals, tangents)

    def pull_back(cotangents, /, *inputs, batches, **params):
        rule = partial(transpose, **params)
        return _map_transpose(rule, batches, cotangents, inputs)

    def batch(name, args, axes, /, *, batches=(), **params):
        batches = (_Batch(tuple(axes), batch_size(args, axes), name), *batches)
        out = batched.bind(*args, batches=batches, **params)
        return out, [0] * len(out)

    single.def_impl(impl)
    single.def_abstract_eval(abstract_eval)
    jvp_rules[single] = jvp
    transposition_rules[single] = transpose
    lower_as(single, impl)
    batched.def_impl(run)
    batched.def_abstract_eval(type_of_results)
    jvp_rules[batched] = push_forward
    transposition_rules[batched] = pull_back
    lower_as(batched, run)
    finalisations[batched] = run
    register_batching(single, batch)
    register_batching(batched, batch)
    return single


_arrays_p: Any = new_primitive("arrays")
_arrays_p.def_abstract_eval(lambda *, types: types)
"""Stands for arrays of these types. It is only traced."""


def _mapped(function: Callable[..., Any], batches: Sequence[_Batch]) -> Any:
    """`function` under these `jax.vmap`s."""
    for batch in reversed(batches):
        function = jax.vmap(
            function, in_axes=batch.axes, axis_size=batch.size, axis_name=batch.name
        )
    return function


def _types_within(avals: Sequence[Any], batches: Sequence[_Batch]) -> list[Any]:
    """The types of the inputs without their batch axes."""
    found: list[Any] = []

    def one(*args):
        found[:] = map(jax.typeof, args)
        return ()

    jax.make_jaxpr(_mapped(one, batches))(*avals)
    return found


def _map_jvp(
    rule: Callable[..., Any],
    batches: Sequence[_Batch],
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    def one(*args):
        xs, given = args[: len(primals)], args[len(primals) :]
        ts = [zero_like(x) if t is None else t for x, t in zip(xs, given, strict=True)]
        out, out_tangents = rule(list(xs), ts)
        return list(out), _without_absent(out_tangents)

    wide = [batch._replace(axes=2 * batch.axes) for batch in batches]
    out, found = _mapped(one, wide)(*primals, *_without_absent(tangents))
    pairs = zip(out, found, strict=True)
    return out, [zero_like(x) if t is None else t for x, t in pairs]


def _map_transpose(
    rule: Callable[..., Any],
    batches: Sequence[_Batch],
    cotangents: Sequence[Any],
    inputs: Sequence[Any],
) -> list[Any]:
    """The cotangents of the inputs, each with the batch axes of its input."""
    count, values = len(inputs), (*inputs, *cotangents)
    # The batch axes of cotangents come first, as those of the outputs do.
    front = (0,) * len(cotangents)
    wide = [batch._replace(axes=(*batch.axes, *front)) for batch in batches]
    types = _types_within([*map(_type_of, values)], wide)

    def of_one_element(*args):
        xs = map(_wanted_if_absent, args[:count], types[:count])
        cts = map(_zero_if_absent, args[count:], types[count:])
        return _cotangents_of_wanted(rule, [*cts], [*xs])

    found = _mapped(of_one_element, wide)(*_without_absent(values))
    return [
        None if ct is None else _unbatched_like(ct, i, batches)
        for i, ct in enumerate(found)
    ]


def _cotangents_of_wanted(rule: Any, cotangents: Any, inputs: Any) -> list[Any]:
    """What the rule returns, with `None` for inputs that have no cotangent."""
    found = _without_absent(rule(cotangents, *inputs))
    pairs = zip(inputs, found, strict=True)
    return [ct if is_undefined_primal(x) else None for x, ct in pairs]


# `jax.vmap` passes `None` on. It stands for symbolic zeros, and for inputs whose
# cotangent is wanted.


def _without_absent(values: Sequence[Any]) -> list[Any]:
    return [None if type(x) is Zero or is_undefined_primal(x) else x for x in values]


def _wanted_if_absent(x: Any, kind: Any) -> Any:
    return UndefinedPrimal(kind) if x is None else x


def _zero_if_absent(x: Any, kind: Any) -> Any:
    return Zero(kind) if x is None else x


def _type_of(x: Any) -> Any:
    is_absent = type(x) is Zero or is_undefined_primal(x)
    return x.aval if is_absent else jax.typeof(x)


def _unbatched_like(cotangent: Any, i: int, batches: Sequence[_Batch]) -> Any:
    """A cotangent of the input `i`, whose batch axes come first, with its own axes."""
    for depth in reversed(range(len(batches))):
        axis = batches[depth].axes[i]
        if axis is None:  # all elements share this input
            cotangent = cotangent.sum(depth)
        else:
            cotangent = jax.numpy.moveaxis(cotangent, depth, depth + axis)
    return cotangent
