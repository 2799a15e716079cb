"""Ways to make primitives of JAX: `create_vprim`, `filter_primitive_def`, `unvmap_all`.

`create_vprim` derives the batching rule from the other rules. Batching yields a second
primitive, whose parameters hold the axes of each `jax.vmap`, outermost first. Its rules
apply these `jax.vmap`s to the rules of the first primitive.

A filtered primitive takes and returns any pytrees. The arrays are the operands of the
primitive. Everything else is in its parameters: the structure; the static leaves, in a flat
tuple so that JAX finds jaxprs among them; and a `Result`, which records the structure of
the output at the first evaluation.

`unvmap_all` and others have one value for a whole batch.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.primitives import (
    ShapedArray,
    UndefinedPrimal,
    Zero,
    as_aval,
    batch_size,
    finalisations,
    for_whole_batch,
    instantiate,
    is_undefined_primal,
    jvp_rules,
    lower_as,
    new_primitive,
    register_batching,
    transposition_rules,
    zero_like,
)
from .._core.difference import tree_differences
from .._core.flat_call import IsData, take_apart
from .._tree.filters import is_array, is_number
from .._tree.match import spread
from .._typing import NOT_GIVEN, ArrayLike


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


def _map_jvp(rule, batches, primals, tangents) -> tuple[list[Any], list[Any]]:
    def one(*args):
        xs, given = args[: len(primals)], args[len(primals) :]
        ts = [zero_like(x) if t is None else t for x, t in zip(xs, given, strict=True)]
        out, out_tangents = rule(list(xs), ts)
        return list(out), _without_absent(out_tangents)

    wide = [batch._replace(axes=2 * batch.axes) for batch in batches]
    out, found = _mapped(one, wide)(*primals, *_without_absent(tangents))
    pairs = zip(out, found, strict=True)
    return out, [zero_like(x) if t is None else t for x, t in pairs]


def _map_transpose(rule, batches, cotangents, inputs) -> list[Any]:
    """The cotangents of batched inputs, by a `rule` that sees one element of the batch.

    `jax.vmap` passes arrays only. So what is absent, an input whose cotangent is wanted
    or a cotangent that is zero, passes as `None`, and is made anew within the map.
    """
    # Outputs have their batch axes in front, and so have their cotangents.
    in_front = (0,) * len(cotangents)
    wide = [batch._replace(axes=(*batch.axes, *in_front)) for batch in batches]
    given = [*inputs, *cotangents]
    avals = [x.aval if _is_absent(x) else jax.typeof(x) for x in given]
    types = _types_within(avals, wide)

    def of_element(*args):
        typed = [*zip(args, types, strict=True)]
        xs = [UndefinedPrimal(t) if x is None else x for x, t in typed[: len(inputs)]]
        cts = [Zero(t) if ct is None else ct for ct, t in typed[len(inputs) :]]
        found = _without_absent(rule(cts, *xs))
        return [
            ct if is_undefined_primal(x) else None
            for x, ct in zip(xs, found, strict=True)
        ]

    found = _mapped(of_element, wide)(*_without_absent(given))
    return [
        None if ct is None else _unbatched_like(ct, i, batches)
        for i, ct in enumerate(found)
    ]


def _is_absent(x: Any) -> bool:
    """Whether it is a symbolic zero, or an input whose cotangent is wanted."""
    return type(x) is Zero or is_undefined_primal(x)


def _without_absent(values: Sequence[Any]) -> list[Any]:
    return [None if _is_absent(x) else x for x in values]


def _unbatched_like(cotangent: Any, i: int, batches: Sequence[_Batch]) -> Any:
    """A cotangent of the input `i`, whose batch axes come first, with its own axes."""
    for depth in reversed(range(len(batches))):
        axis = batches[depth].axes[i]
        if axis is None:  # all elements share this input
            cotangent = cotangent.sum(depth)
        else:
            cotangent = jax.numpy.moveaxis(cotangent, depth, depth + axis)
    return cotangent


class _Data:
    """A placeholder for an array among the static leaves."""

    def __repr__(self) -> str:
        return "*"


_DATA = _Data()


class Result:
    """The structure and static leaves of a primitive's output, once they are known."""

    def __init__(self) -> None:
        self._rest: Any = None  # a `Template`, once the primitive has been evaluated

    def take_apart(self, out: Any, is_data: IsData = is_array) -> list[Any]:
        """The arrays of an output. Everything else must equal the earlier outputs."""
        arrays, rest = take_apart(out, is_data)
        if self._rest is None:
            self._rest = rest
        elif self._rest != rest:
            before, after = (
                r.fill([_DATA] * len(r.places)) for r in (self._rest, rest)
            )
            found = next(
                tree_differences("out", before, after, lambda x: x is _DATA), ""
            )
            raise ValueError(
                "Two rules of a filtered primitive returned different structures or "
                f"static values. {found}"
            )
        return arrays

    def fill(self, arrays: Sequence[Any]) -> Any:
        return self._rest.fill(arrays)

    def alone(self, arrays: Sequence[Any]) -> Any:
        return self._rest.alone(arrays)

    def take_like(self, tree: Any) -> list[Any]:
        """The values of `tree` at the places of the output's arrays.

        `None` in `tree` may stand for a subtree of the output.
        """
        return _take(tree, self._rest.treedef, self._rest.places)


def filter_primitive_bind(prim: Any, *args: Any) -> Any:
    """Calls a primitive whose rules were made by `filter_primitive_def` and the like.

    **Arguments:**

    - `prim`: a primitive of JAX with `multiple_results = True`.
    - `args`: any pytrees. Arrays are operands; all other leaves are static. A static
        jaxpr is in the parameters of the equation, where JAX finds it.

    **Returns:**

    The output of the rules, any pytree.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from equinox_like import internal as eqxi
        from jax.extend.core import Primitive

        scale_p = Primitive("scale")
        scale_p.multiple_results = True

        @eqxi.filter_primitive_def
        def scale(tree, by):
            return {name: by * x for name, x in tree.items()}, "scaled"

        scale_p.def_impl(scale)
        out = eqxi.filter_primitive_bind(scale_p, {"a": jnp.ones(2)}, 3.0)
        assert out[0]["a"].tolist() == [3, 3] and out[1] == "scaled"
        ```
    """
    assert prim.multiple_results, (
        "A filtered primitive must have `multiple_results = True`."
    )
    leaves, treedef = jtu.tree_flatten(args)
    operands = [jnp.asarray(x) for x in leaves if is_array(x)]
    static = tuple(_DATA if is_array(x) else x for x in leaves)
    result = Result()
    arrays = prim.bind(*operands, treedef=treedef, static=static, result=result)
    return result.fill(arrays)


def filter_primitive_def(rule: Callable[..., Any]) -> Callable[..., Any]:
    """For `prim.def_impl` and `prim.def_abstract_eval`: `rule(*args) -> out` of pytrees.

    In abstract evaluation, arrays are `jax.core.ShapedArray`s, and the rule may return
    these or `jax.ShapeDtypeStruct`s. See
    [`equinox_like.internal.filter_primitive_bind`][] for an example.
    """

    def flat_rule(*operands, treedef, static, result):
        out = rule(*_fill(map(_as_array, operands), treedef, static))
        if all(isinstance(x, ShapedArray) for x in operands):
            kinds = ShapedArray | jax.ShapeDtypeStruct
            is_abstract = lambda x: is_array(x) or isinstance(x, kinds)  # noqa: E731
            return [as_aval(x) for x in result.take_apart(out, is_abstract)]
        return [jnp.asarray(x) for x in result.take_apart(out)]

    return flat_rule


def filter_primitive_jvp(rule: Callable[..., Any]) -> Callable[..., Any]:
    """For JAX's table of forward-mode rules: `rule(primals, tangents) -> (out, tangent)`.

    All four are pytrees. In the tangents that the rule gets and returns, `None` stands
    for a symbolic zero and for a leaf that is not an array.

    !!! example

        ```python
        from equinox_like import internal as eqxi
        from jax.extend.core import Primitive
        from jax.interpreters import ad

        double_p = Primitive("double")
        double_p.multiple_results = True
        double_p.def_impl(eqxi.filter_primitive_def(lambda x: 2 * x))

        @eqxi.filter_primitive_jvp
        def double_jvp(primals, tangents):
            (x,), (t,) = primals, tangents
            double = lambda x: eqxi.filter_primitive_bind(double_p, x)
            return double(x), None if t is None else double(t)

        ad.primitive_jvps[double_p] = double_jvp
        ```
    """

    def flat_rule(primals, tangents, *, treedef, static, result):
        tangents = [None if type(t) is Zero else t for t in tangents]
        given = _fill(
            tangents, treedef, (_DATA if x is _DATA else None for x in static)
        )
        out, out_tangents = rule(_fill(map(_as_array, primals), treedef, static), given)
        data = result.take_apart(out)
        found = result.take_like(out_tangents)
        pairs = zip(data, found, strict=True)
        return data, [zero_like(x) if t is None else t for x, t in pairs]

    return flat_rule


def filter_primitive_transpose(
    rule: Any = NOT_GIVEN, *, materialise_zeros: bool = False
) -> Any:
    """For JAX's table of transposition rules: `rule(inputs, cts_out) -> cts`.

    **Arguments:**

    - `rule`: gets the tuple of inputs, with JAX's `UndefinedPrimal` for each array
        whose cotangent is wanted; and the cotangents of the output, with `None` for
        symbolic zeros and for leaves that are not arrays. It returns a tuple like the
        inputs, with `None` for zeros and for leaves that are not differentiated.
        Without a `rule`, a decorator is returned.
    - `materialise_zeros`: whether the rule gets arrays of zeros in place of symbolic ones.

    !!! example

        ```python
        from equinox_like import internal as eqxi

        @eqxi.filter_primitive_transpose(materialise_zeros=True)
        def double_transpose(inputs, cotangent):
            return (2 * cotangent,)
        ```
    """
    if rule is NOT_GIVEN:
        options = {"materialise_zeros": materialise_zeros}
        return lambda rule: filter_primitive_transpose(rule, **options)

    def flat_rule(cotangents, *operands, treedef, static, result):
        given = [
            instantiate(ct) if materialise_zeros or type(ct) is not Zero else None
            for ct in cotangents
        ]
        inputs = _fill(map(_as_array, operands), treedef, static)
        found = rule(inputs, result.alone(given))
        places = [i for i, x in enumerate(static) if x is _DATA]
        return [
            ct if is_undefined_primal(x) else None
            for x, ct in zip(operands, _take(found, treedef, places), strict=True)
        ]

    return flat_rule


def filter_primitive_batching(rule: Callable[..., Any]) -> Callable[..., Any]:
    """For JAX's table of batching rules: `rule(inputs, batch_axes) -> (out, out_axes)`.

    The trees of axes have the structure of the inputs and the output, with `None` for
    leaves that have no batch axis or are not arrays.

    !!! example

        ```python
        from equinox_like import internal as eqxi

        @eqxi.filter_primitive_batching
        def double_batching(inputs, axes):
            (x,), (axis,) = inputs, axes
            return 2 * x, axis
        ```
    """

    def flat_rule(operands, axes, *, treedef, static, result):
        # The output's structure for this batch, to match `out_axes` with.
        own = Result()
        given = _fill(axes, treedef, (_DATA if x is _DATA else None for x in static))
        out, out_axes = rule(_fill(map(_as_array, operands), treedef, static), given)
        arrays = own.take_apart(out)
        result.take_apart(out)
        return arrays, own.take_like(out_axes)

    return flat_rule


def _fill(operands: Iterable[Any], treedef: Any, static: Iterable[Any]) -> Any:
    remaining = iter(operands)
    leaves = [next(remaining) if x is _DATA else x for x in static]
    return treedef.unflatten(leaves)


def _as_array(x: Any) -> Any:
    """Converts a Python scalar, which may be a literal of a jaxpr, to an array."""
    if is_number(x):
        return jnp.asarray(x, jax.typeof(x).dtype)
    return x


def _take(tree: Any, treedef: Any, places: Sequence[int]) -> list[Any]:
    """The values of `tree` at these leaves of `treedef`; `None` may be a subtree."""
    whole = treedef.unflatten(range(treedef.num_leaves))
    found = [x for _, x in spread(tree, whole, "the output of the rule", "out")]
    return [found[i] for i in places]


unvmap_all_p = for_whole_batch("unvmap_all", jnp.all, like=jnp.all)
"""The primitive of [`equinox_like.internal.unvmap_all`][]: `unvmap_all_p.bind(x)`."""

unvmap_any_p = for_whole_batch("unvmap_any", jnp.any, like=jnp.any)
"""The primitive of [`equinox_like.internal.unvmap_any`][]: `unvmap_any_p.bind(x)`."""

unvmap_max_p = for_whole_batch("unvmap_max", jnp.max, like=jnp.max)
"""The primitive of [`equinox_like.internal.unvmap_max`][]: `unvmap_max_p.bind(x)`."""


def unvmap_all(x: ArrayLike) -> jax.Array:
    """`jnp.all` over an array and over the batch of every `jax.vmap` around it.

    **Arguments:**

    - `x`: an array of any shape and dtype, or a Python number.

    **Returns:**

    A bool of shape `()`, which has no batch axis: it can be the predicate of a `lax.cond`
    that stays a `cond` under `vmap`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        f = jax.vmap(eqx.internal.unvmap_all, out_axes=None)
        assert not f(jnp.asarray([True, False]))
        ```
    """
    return unvmap_all_p.bind(jnp.asarray(x))


def unvmap_any(x: ArrayLike) -> jax.Array:
    """`jnp.any` over an array and over the batch of every `jax.vmap` around it.

    **Arguments:**

    - `x`: an array of any shape and dtype, or a Python number.

    **Returns:**

    A bool of shape `()`, which has no batch axis; `False` for an empty array.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        f = jax.vmap(eqx.internal.unvmap_any, out_axes=None)
        assert f(jnp.asarray([True, False]))
        ```
    """
    return unvmap_any_p.bind(jnp.asarray(x))


def unvmap_max(x: ArrayLike) -> jax.Array:
    """`jnp.max` over an array and over the batch of every `jax.vmap` around it.

    **Arguments:**

    - `x`: an array of any shape and of a real dtype, or a Python number.

    **Returns:**

    An array of shape `()` and the dtype of `x`, which has no batch axis.

    **Raises:**

    `ValueError` for an empty array, `NotImplementedError` if it is differentiated.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        f = jax.vmap(eqx.internal.unvmap_max, out_axes=None)
        assert f(jnp.asarray([1, 3, 2])) == 3
        ```
    """
    return unvmap_max_p.bind(jnp.asarray(x))
