"""`filter_grad` and `filter_value_and_grad`: gradients of functions of any pytrees.

JAX differentiates with respect to the inexact arrays of the first argument, or those of
them that `wrt` chooses. Everything else is closed over. Auxiliary outputs that are not
arrays pass through JAX by `pack`.
"""

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.tree_util as jtu

from .._core.base import (
    Transformed,
    check_not_deprecated,
    frames_hidden,
    name_of,
)
from .._core.flat_call import FlatCall, pack, unpack, value_and_aux
from .._module.fields import field
from .._module.freezing import trainable_leaves
from .._module.module import Module
from .._tree.filters import is_inexact_array
from .._tree.nodes import MAKE_A_PYTREE, describe_node
from .._tree.partitioning import evaluate_filter, leaf_names
from .._tree.require import check_options
from .._typing import NOT_GIVEN, GradOptions
from .arguments import NamedCall

_P = ParamSpec("_P")
# With a bound, pyright gives the untyped parameter of a lambda the type `Any`.
_X = TypeVar("_X", bound=Any)
_T = TypeVar("_T")
_Aux = TypeVar("_Aux")
_DEPRECATED = ("arg", "filter_spec")


@overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], _T],
    *,
    has_aux: Literal[False] = False,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], tuple[_T, Any]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], tuple[_T, _Aux]],
    *,
    has_aux: Literal[True],
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], tuple[tuple[_T, _Aux], Any]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], Any],
    *,
    has_aux: bool,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], Any]: ...
@overload
def filter_value_and_grad(
    *,
    has_aux: Literal[False] = False,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Callable[
    [Callable[Concatenate[_X, _P], _T]],
    Transformed[Concatenate[_X, _P], tuple[_T, Any]],
]: ...
@overload
def filter_value_and_grad(
    *, has_aux: Literal[True], wrt: Any = None, **gradkwargs: Unpack[GradOptions]
) -> Callable[
    [Callable[Concatenate[_X, _P], tuple[_T, _Aux]]],
    Transformed[Concatenate[_X, _P], tuple[tuple[_T, _Aux], Any]],
]: ...
def filter_value_and_grad(
    fun: Any = NOT_GIVEN, *, has_aux: Any = False, wrt: Any = None, **gradkwargs: Any
) -> Any:
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


@overload
def filter_grad(
    fun: Callable[Concatenate[_X, _P], Any],
    *,
    has_aux: Literal[False] = False,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], Any]: ...
@overload
def filter_grad(
    fun: Callable[Concatenate[_X, _P], tuple[Any, _Aux]],
    *,
    has_aux: Literal[True],
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], tuple[Any, _Aux]]: ...
@overload
def filter_grad(
    fun: Callable[Concatenate[_X, _P], Any],
    *,
    has_aux: bool,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Transformed[Concatenate[_X, _P], Any]: ...
@overload
def filter_grad(
    *,
    has_aux: Literal[False] = False,
    wrt: Any = None,
    **gradkwargs: Unpack[GradOptions],
) -> Callable[
    [Callable[Concatenate[_X, _P], Any]], Transformed[Concatenate[_X, _P], Any]
]: ...
@overload
def filter_grad(
    *, has_aux: Literal[True], wrt: Any = None, **gradkwargs: Unpack[GradOptions]
) -> Callable[
    [Callable[Concatenate[_X, _P], tuple[Any, _Aux]]],
    Transformed[Concatenate[_X, _P], tuple[Any, _Aux]],
]: ...
def filter_grad(
    fun: Any = NOT_GIVEN, *, has_aux: Any = False, wrt: Any = None, **gradkwargs: Any
) -> Any:
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


class Differentiated(Transformed[..., Any]):
    """The result of [`equinox_like.filter_grad`][] or `filter_value_and_grad`."""

    _transformation_: str = field(static=True)
    _has_aux: bool = field(static=True)
    _wrt: Any = field(static=True)
    _gradkwargs: tuple[tuple[str, Any], ...] = field(static=True)

    def __init__(
        self, name: str, fun: Any, has_aux: bool, wrt: Any, gradkwargs: dict[str, Any]
    ):
        self._transformation_ = name
        super().__init__(fun)
        self._has_aux = has_aux
        self._wrt = wrt
        self._gradkwargs = tuple(sorted(gradkwargs.items()))

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
    if not any(can_be) and (leaves or is_gradient or isinstance(x, Module)):
        raise _nothing(fun, _why_nothing(x, leaves))
    chosen = [a and b for a, b in zip(can_be, chosen, strict=True)]
    if wrt is not None and leaves and not any(chosen):
        why = f"`wrt={wrt!r}` chooses none of its floating-point and complex arrays."
        raise _nothing(fun, why)
    return FlatCall.of(lambda x: fun(x, *others, **kwargs), (x,), {}, chosen)


def _check_no_refs(
    fun: Any, treedef: Any, leaves: list[Any], chosen: list[bool]
) -> None:
    """Raises for a `jax.Ref`, which has no gradient: the gradient would be `None`."""
    for i, leaf in enumerate(leaves):
        if chosen[i] and isinstance(leaf, jax.Ref):
            raise TypeError(
                f"The first argument of `{name_of(fun)}` holds a `jax.Ref` at "
                f"`{leaf_names(treedef, 'x')[i]}`, which cannot be "
                "differentiated. Pass it as another argument, read it first (`ref[...]`), "
                "or leave it out by `wrt`."
            )


def _nothing(fun: Any, why: str) -> TypeError:
    return TypeError(
        f"The first argument of `{name_of(fun)}` has nothing to differentiate: {why}"
    )


def _why_nothing(x: Any, leaves: list[Any]) -> str:
    if not leaves:
        fix = ""
        if isinstance(x, Module):
            fix = (
                " A Module's leaves are in its annotated fields: an attribute of the "
                "class without an annotation, and a static field, hold none."
            )
        return f"it is {describe_node(x)}, a tree without leaves.{fix}"
    if any(map(is_inexact_array, leaves)):
        return (
            "all its floating-point and complex arrays are frozen, or in a "
            "`field(trainable=False)`. Use `unfrozen` on what you want to train."
        )
    seen = sorted(
        {
            f"{type(x).__name__} of dtype {x.dtype}"
            if hasattr(x, "dtype")
            else type(x).__name__
            for x in leaves
        }
    )
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
    elif leaves and all(map(callable, leaves)):
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
    check_not_deprecated(
        name,
        _DEPRECATED,
        gradkwargs,
        ": use `partition` and `combine` to choose what to differentiate",
    )
    check_options(gradkwargs, name, jax.value_and_grad, ["wrt"])
    if fun is NOT_GIVEN:
        return lambda fun: Differentiated(name, fun, has_aux, wrt, gradkwargs)
    return Differentiated(name, fun, has_aux, wrt, gradkwargs)


def check_no_argnums(name: str, options: dict[str, Any]) -> None:
    """Removes `argnums=None`, and raises for another one."""
    if options.pop("argnums", None) is not None:
        raise ValueError(
            f"`{name}` does not take `argnums`: it differentiates with respect to the "
            f"first argument. Put several into a tuple, as in "
            f"`{name}(lambda xy: fun(*xy))((x, y))`."
        )
