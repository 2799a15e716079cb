"""Gradients, Jacobians and Hessians: `filter_grad`, `filter_jacfwd` and their relatives.

JAX differentiates with respect to the inexact arrays of the first argument, or those of
them that `wrt` chooses. Everything else is closed over. Auxiliary outputs that are not
arrays pass through JAX by `pack`. The outer structure of a Jacobian is that of the output,
the inner one that of the first argument.
"""

import typing
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
)

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._core.base import Transformed, check_not_deprecated, frames_hidden, name_of
from .._core.flat_call import FlatCall, pack, unpack, value_and_aux
from .._module.fields import field
from .._module.freezing import trainable_leaves
from .._module.module import Module
from .._tree.arrays import is_typed_key
from .._tree.filters import is_array_like, is_inexact_array, is_inexact_array_like
from .._tree.nodes import MAKE_A_PYTREE, describe_node
from .._tree.partitioning import evaluate_filter, leaf_names
from .._tree.require import check_options
from .._typing import NOT_GIVEN, GradOptions
from .arguments import NamedCall, WithOptions, applied, check_only_arrays

_P = ParamSpec("_P")
# With a bound, pyright gives the untyped parameter of a lambda the type `Any`.
_X = TypeVar("_X", bound=Any)
_T = TypeVar("_T")
_Aux = TypeVar("_Aux")


# `typing.overload` as in `_jit/jit.py`. What these functions return takes the arguments of
# `fun`, but returns something else.
@typing.overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], _T],
    *,
    has_aux: Literal[False] = False,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], tuple[_T, Any]]: ...
@typing.overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], tuple[_T, _Aux]],
    *,
    has_aux: Literal[True],
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], tuple[tuple[_T, _Aux], Any]]: ...
@typing.overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], Any],
    *,
    has_aux: bool,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], Any]: ...
@typing.overload
def filter_value_and_grad(
    *,
    has_aux: Literal[False] = False,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Callable[
    [Callable[Concatenate[_X, _P], _T]],
    Transformed[Concatenate[_X, _P], tuple[_T, Any]],
]: ...
@typing.overload
def filter_value_and_grad(
    *, has_aux: Literal[True], wrt: Any = None, **gradkwargs: Unpack[GradOptions]
) -> Callable[
    [Callable[Concatenate[_X, _P], tuple[_T, _Aux]]],
    Transformed[Concatenate[_X, _P], tuple[tuple[_T, _Aux], Any]],
]: ...
def filter_value_and_grad(
    fun: Any = NOT_GIVEN, *, has_aux: Any = False, wrt: Any = None, **gradkwargs: Any
) -> Callable[..., Any]:
    """The value of a scalar function, and its gradient for its first argument.

    Arguments and errors are those of [`equinox_like.filter_grad`][].

    **Returns:**

    A function returning `(value, gradient)`, or `((value, aux), gradient)` with `has_aux`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        value, grad = eqx.filter_value_and_grad(lambda p: jnp.sum(p["w"] ** 2))(
            {"w": jnp.ones(2), "name": "first"}
        )
        assert value == 2 and grad["name"] is None
        ```
    """
    return _differentiated("filter_value_and_grad", fun, has_aux, wrt, gradkwargs)


@typing.overload
def filter_grad(
    fun: Callable[Concatenate[_X, _P], tuple[Any, _Aux]],
    *,
    has_aux: Literal[True],
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], tuple[Any, _Aux]]: ...
@typing.overload
def filter_grad(
    fun: Callable[Concatenate[_X, _P], Any],
    *,
    has_aux: bool = False,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], Any]: ...
@typing.overload
def filter_grad(
    *, has_aux: Literal[True], wrt: Any = None, **gradkwargs: Unpack[GradOptions]
) -> Callable[
    [Callable[Concatenate[_X, _P], tuple[Any, _Aux]]],
    Transformed[Concatenate[_X, _P], tuple[Any, _Aux]],
]: ...
@typing.overload
def filter_grad(
    *, has_aux: bool = False, wrt: Any = None, **gradkwargs: Unpack[GradOptions]
) -> Callable[
    [Callable[Concatenate[_X, _P], Any]], Transformed[Concatenate[_X, _P], Any]
]: ...
def filter_grad(
    fun: Any = NOT_GIVEN, *, has_aux: Any = False, wrt: Any = None, **gradkwargs: Any
) -> Callable[..., Any]:
    """The gradient of a scalar function with respect to its first argument.

    **Arguments:**

    - `fun`: `fun(x, *args, **kwargs)` returns a real floating scalar; with `has_aux`, a
        pair of the scalar and anything else. The floating-point and complex arrays of
        `x`, which may be any pytree, are differentiated, except for those that are not
        [`equinox_like.trainable`][]. All other arguments may be anything.
    - `has_aux`: whether `fun` returns `(value, aux)`.
    - `wrt`: a specification as for [`equinox_like.filter`][], on `x`: only what it chooses
        is differentiated. By default all of these arrays.
    - `**gradkwargs`: as for `jax.grad`, for example `holomorphic`; but not `argnums`.

    **Returns:**

    A function of the same arguments that returns the gradient, or `(gradient, aux)`. The
    gradient has the structure of `x`, with `None` for each leaf that is not differentiated.

    **Raises:**

    `TypeError` if `x` is not passed by position, if none of its leaves can be
    differentiated, or `wrt` chooses none of these, or if it holds a `jax.Ref`.
    `ValueError` if `argnums` is given, or `wrt` does not fit `x`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_grad
        def grad(params, x):
            return jnp.sum(params["f"](params["w"] * x))

        gradient = grad({"w": jnp.ones(2), "f": jnp.sin}, jnp.zeros(2))
        assert gradient["f"] is None and gradient["w"].shape == (2,)
        ```
    """
    return _differentiated("filter_grad", fun, has_aux, wrt, gradkwargs)


class Differentiated(WithOptions[..., Any]):
    """The result of [`equinox_like.filter_grad`][] or `filter_value_and_grad`."""

    _transformation_: str = field(static=True)
    _has_aux: bool = field(static=True)
    _wrt: Any = field(static=True)
    _gradkwargs: tuple[tuple[str, Any], ...] = field(static=True)

    @frames_hidden
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun, has_aux = self.__wrapped__, self._has_aux
        name = self._transformation_
        data, call = of_first_argument(NamedCall(name, fun, args, kwargs), self._wrt)

        def inner(data):
            value, aux = value_and_aux(fun, call.run(data), has_aux)
            if isinstance(value, tuple) and not has_aux:
                raise TypeError(
                    "Gradient only defined for scalar-output functions. "
                    f"`{name_of(fun)}` returned {describe_node(value)}: to return "
                    "`(value, aux)`, pass `has_aux=True`."
                )
            return value, pack(aux)

        differentiated = jax.value_and_grad(
            inner, has_aux=True, **dict(self._gradkwargs)
        )
        (value, aux), gradient = differentiated(data)
        (gradient,) = call.args_alone(gradient)
        if name == "filter_value_and_grad":
            return ((value, unpack(aux)) if has_aux else value), gradient
        return (gradient, unpack(aux)) if has_aux else gradient


def of_first_argument(call: NamedCall, wrt: Any = None) -> tuple[list[Any], FlatCall]:
    """The leaves of the first argument to differentiate, and a call with that argument."""
    transformation, fun, args, kwargs = call
    if not args:
        # The first words are Equinox's, as users match on them.
        raise TypeError(
            f"Functions wrapped with `{transformation}` are differentiated with respect "
            f"to their first positional argument; `{name_of(fun)}` was called "
            + ("with keywords only." if kwargs else "without arguments.")
        )
    x, *others = args
    leaves, treedef = jtu.tree_flatten(x)
    can_be = trainable_leaves(x)
    if wrt is None:
        chosen = [True] * len(leaves)
    else:
        try:
            chosen = evaluate_filter(wrt, x, leaves, treedef, names=("wrt", "x"))
        except Exception as error:
            error.add_note(f"Here `x` is the first argument of `{name_of(fun)}`.")
            raise
    if not all(can_be):
        _check_no_refs(fun, treedef, leaves, chosen)
    # A Jacobian for an empty tuple has no columns, but an empty Module is a mistake.
    is_gradient = transformation.endswith("grad")
    chosen = [a and b for a, b in zip(can_be, chosen, strict=True)]
    why = ""
    if not any(can_be) and (leaves or is_gradient or isinstance(x, Module)):
        why = _why_nothing(x, leaves)
    elif wrt is not None and leaves and not any(chosen):
        why = f"`wrt={wrt!r}` chooses none of its floating-point and complex arrays."
    if why:
        raise TypeError(
            f"The first argument of `{name_of(fun)}` has nothing to differentiate: {why}"
        )
    return FlatCall.of(lambda x: fun(x, *others, **kwargs), (x,), {}, chosen)


def _check_no_refs(
    fun: Any, treedef: Any, leaves: list[Any], chosen: list[bool]
) -> None:
    """Raises for a `jax.Ref`, which has no gradient: the gradient would be `None`."""
    for i, leaf in enumerate(leaves):
        if chosen[i] and isinstance(leaf, jax.Ref):
            raise TypeError(
                f"The first argument of `{name_of(fun)}` holds a `jax.Ref` at "
                f"`{leaf_names(treedef, 'x')[i]}`, which cannot be differentiated. Pass "
                "it as another argument, or read it first: `ref[...]`."
            )


def _why_nothing(x: Any, leaves: list[Any]) -> str:
    if not leaves:
        return f"it is {describe_node(x)}, a tree without leaves."
    if any(map(is_inexact_array, leaves)):
        return (
            "all its floating-point and complex arrays are frozen, or in a "
            "`field(trainable=False)`. Use `unfrozen` on what you want to train."
        )
    seen = sorted({str(getattr(x, "dtype", type(x).__name__)) for x in leaves})
    fix = (
        "convert the value to differentiate with `jnp.asarray`, as in "
        "`jnp.asarray(2.0)`."
    )
    holder = next((x for x in leaves if _holds_array(x)), None)
    if holder is not None:
        fix = (
            f"{type(holder).__name__} is not a pytree, so JAX does not see its arrays: "
            + MAKE_A_PYTREE
        )
    elif all(map(callable, leaves)):
        fix = (
            "JAX does not look inside functions. Pass the model itself, or use "
            "`equinox_like.Partial` in place of `functools.partial`."
        )
    return (
        f"its leaves are {', '.join(seen)}. Only floating-point and complex arrays are "
        f"differentiated: {fix}"
    )


def _holds_array(x: Any) -> bool:
    """Whether an object has an array to differentiate, or a model, in its attributes."""
    attributes = dict(getattr(x, "__dict__", {}))
    attributes.pop("__wrapped__", None)  # of a function
    return any(map(is_inexact_array, jtu.tree_leaves(attributes)))


def _differentiated(
    name: str, fun: Any, has_aux: bool, wrt: Any, gradkwargs: dict[str, Any]
) -> Any:
    check_no_argnums(name, gradkwargs)
    fix = ": use `partition` and `combine` to choose what to differentiate"
    check_not_deprecated(name, ("arg", "filter_spec"), gradkwargs, fix)
    check_options(gradkwargs, name, jax.value_and_grad, ["wrt"])
    fields = {"_has_aux": has_aux, "_wrt": wrt, "_gradkwargs": _hashable(gradkwargs)}
    return applied(Differentiated, fun, _transformation_=name, **fields)


def _hashable(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items()))


def check_no_argnums(name: str, options: dict[str, Any]) -> None:
    """Removes `argnums=None`, and raises for another one."""
    if options.pop("argnums", None) is not None:
        raise ValueError(
            f"`{name}` does not take `argnums`: it differentiates with respect to the "
            f"first argument. Put several into a tuple, as in "
            f"`{name}(lambda xy: fun(*xy))((x, y))`."
        )


@typing.runtime_checkable  # by beartype, for example
class _MakesJacobian(Protocol):
    """The type of the three functions below."""

    @typing.overload
    def __call__(
        self,
        fun: Callable[_P, tuple[Any, _Aux]],
        has_aux: Literal[True],
        **jackwargs: Unpack[GradOptions],
    ) -> "Jacobian[_P, tuple[Any, _Aux]]": ...
    @typing.overload
    def __call__(
        self,
        fun: Callable[_P, Any],
        has_aux: bool = False,
        **jackwargs: Unpack[GradOptions],
    ) -> "Jacobian[_P, Any]": ...
    @typing.overload
    def __call__(
        self, *, has_aux: bool = False, **jackwargs: Unpack[GradOptions]
    ) -> "Callable[[Callable[_P, Any]], Jacobian[_P, Any]]": ...


def _typed(function: Any) -> _MakesJacobian:
    return function


@_typed
def filter_jacfwd(fun: Any = NOT_GIVEN, has_aux: bool = False, **jackwargs: Any) -> Any:
    """The Jacobian with respect to the first argument, column by column.

    The time it takes grows with the size of the argument; with
    [`equinox_like.filter_jacrev`][] it grows with the size of the output.

    **Arguments:**

    - `fun`: `fun(x, *args, **kwargs)` returns a tree of arrays. The arrays of `x` that
        [`equinox_like.trainable`][] chooses are differentiated: floating-point and
        complex arrays that are not frozen. The other arguments may be anything.
    - `has_aux`: whether `fun` returns `(out, aux)`, where `aux` may be anything.
    - `**jackwargs`: as for `jax.jacfwd`, for example `holomorphic`; but not `argnums`.

    **Returns:**

    A function of the same arguments, which returns the Jacobian, or `(jacobian, aux)`. The
    Jacobian has the structure of the output, with a tree like `x` in place of each array.
    The leaves of this tree are arrays of shape `(*output.shape, *input.shape)`, and
    `None` for each leaf of `x` that is not differentiated.

    **Raises:**

    `TypeError` if `x` is not passed by position or has nothing to differentiate, or if
    the output holds anything but arrays and numbers.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        jacobian = eqx.filter_jacfwd(lambda p: {"y": p["a"] ** 2})
        jac = jacobian({"a": jnp.arange(3.0), "name": "first"})
        assert jac["y"]["a"].shape == (3, 3) and jac["y"]["name"] is None
        ```
    """
    return _jacobian(fun, "filter_jacfwd", has_aux, jackwargs)


@_typed
def filter_jacrev(fun: Any = NOT_GIVEN, has_aux: bool = False, **jackwargs: Any) -> Any:
    """The Jacobian with respect to the first argument, row by row.

    Like [`equinox_like.filter_jacfwd`][], for functions with small outputs. For a scalar
    function the result is the gradient.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        jac = eqx.filter_jacrev(jnp.sum)(jnp.ones(3))
        assert jac.tolist() == [1, 1, 1]
        ```
    """
    return _jacobian(fun, "filter_jacrev", has_aux, jackwargs)


@_typed
def filter_hessian(
    fun: Any = NOT_GIVEN, has_aux: bool = False, **jackwargs: Any
) -> Any:
    """The second derivatives with respect to the first argument, forward over reverse.

    Arguments and errors are those of [`equinox_like.filter_jacfwd`][].

    **Returns:**

    A function of the same arguments. Its result is like that of `filter_jacfwd`, with
    another tree like `x` in place of each array.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        hessian = eqx.filter_hessian(lambda p: jnp.sum(p["a"] ** 3))({"a": jnp.ones(2)})
        assert hessian["a"]["a"].tolist() == [[6, 0], [0, 6]]
        ```
    """
    return _jacobian(fun, "filter_hessian", has_aux, jackwargs)


def _jacobian(
    fun: Any, transformation: str, has_aux: bool, jackwargs: dict[str, Any]
) -> Any:
    check_no_argnums(transformation, jackwargs)
    steps = _STEPS[transformation]
    check_options(jackwargs, transformation, steps[0])
    fields = {"_steps": steps, "_has_aux": has_aux, "_jackwargs": _hashable(jackwargs)}
    return applied(Jacobian, fun, _transformation_=transformation, **fields)


# Functions of JAX, of which the last one is applied first.
_STEPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "filter_jacfwd": (jax.jacfwd,),
    "filter_jacrev": (jax.jacrev,),
    "filter_hessian": (jax.jacfwd, jax.jacrev),
}


class Jacobian(WithOptions[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_jacfwd`][] and its relatives."""

    _transformation_: str = field(static=True)
    _steps: tuple[Callable[..., Any], ...] = field(static=True)
    _has_aux: bool = field(static=True)
    _jackwargs: tuple[tuple[str, Any], ...] = field(static=True)

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fun, has_aux = self.__wrapped__, self._has_aux
        name, jackwargs = self._transformation_, self._jackwargs
        step, *inner = self._steps
        if inner:
            fields = {"_has_aux": has_aux, "_jackwargs": jackwargs}
            fields |= {"_transformation_": name, "_steps": tuple(inner)}
            fun = applied(Jacobian, fun, **fields)
        data, call = of_first_argument(NamedCall(name, fun, args, kwargs))

        def flat(data):
            out, aux = value_and_aux(fun, call.run(data), has_aux)
            check_only_arrays(
                out,
                name_of(fun),
                name,
                lambda x: is_array_like(x) and not is_typed_key(x),
            )
            leaves, treedef = jtu.tree_flatten(out)
            # In reverse mode JAX takes neither integers and bools nor an empty list.
            moving = [x for x in leaves if is_inexact_array_like(x)]
            constants = [None if is_inexact_array_like(x) else x for x in leaves]
            return moving or [jnp.zeros(())], pack((treedef, aux, constants))

        if data:
            rows, packed = step(flat, has_aux=True, **dict(jackwargs))(data)
        else:  # JAX's functions fail for an empty list of inputs
            moving, packed = flat(data)
            rows = [[] for _ in moving]
        treedef, aux, constants = unpack(packed)
        found = iter(rows)
        leaves = [next(found) if x is None else _no_slope(data, x) for x in constants]
        result: Any = treedef.unflatten(call.args_alone(x)[0] for x in leaves)
        if has_aux:
            result = result, aux
        return result


def _no_slope(data: list[Any], out: Any) -> list[Any]:
    """The Jacobian of an output that has no derivative."""
    return [
        jnp.zeros((*jnp.shape(out), *jnp.shape(x)), jnp.result_type(out)) for x in data
    ]
