"""Primitives of JAX that take and return any pytrees.

The arrays are the operands of the primitive. Everything else is in its parameters: the
structure; the static leaves, in a flat tuple so that JAX finds jaxprs among them; and a
`Result`, which records the structure of the output at the first evaluation.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.primitives import (
    ShapedArray,
    Zero,
    as_aval,
    instantiate,
    is_undefined_primal,
    zero_like,
)
from .._core.difference import tree_differences
from .._core.flat_call import IsData, take_apart
from .._tree.filters import is_array, is_number
from .._tree.match import spread
from .._typing import NOT_GIVEN


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
            return [as_aval(x) for x in result.take_apart(out, _is_abstract)]
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
        given = [_cotangent(ct, materialise_zeros) for ct in cotangents]
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


def _is_abstract(x: Any) -> bool:
    return is_array(x) or isinstance(x, ShapedArray | jax.ShapeDtypeStruct)


def _cotangent(cotangent: Any, materialise_zeros: bool) -> Any:
    if type(cotangent) is not Zero:
        return cotangent
    return instantiate(cotangent) if materialise_zeros else None
