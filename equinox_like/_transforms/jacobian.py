"""`filter_jacfwd`, `filter_jacrev` and `filter_hessian`: Jacobians as nested pytrees.

The outer structure is that of the output, the inner one that of the first argument.
"""

import typing
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._core.base import Transformed, frames_hidden, name_of
from .._core.flat_call import pack, unpack, value_and_aux
from .._module.fields import field
from .._tree.arrays import is_typed_key
from .._tree.filters import is_array_like, is_inexact_array_like
from .._tree.require import check_options
from .._typing import NOT_GIVEN, GradOptions
from .arguments import NamedCall
from .grad import check_no_argnums, of_first_argument
from .jvp_vjp import check_only_arrays

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Aux = TypeVar("_Aux")


@typing.runtime_checkable  # by beartype, for example
class _MakesJacobian(Protocol):
    """The type of the three functions below."""

    @overload
    def __call__(
        self,
        fun: Callable[_P, tuple[Any, _Aux]],
        has_aux: Literal[True],
        **jackwargs: Unpack[GradOptions],
    ) -> "Jacobian[_P, tuple[Any, _Aux]]": ...
    @overload
    def __call__(
        self,
        fun: Callable[_P, Any],
        has_aux: bool = False,
        **jackwargs: Unpack[GradOptions],
    ) -> "Jacobian[_P, Any]": ...
    @overload
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
    options = (transformation, steps, has_aux, jackwargs)
    if fun is NOT_GIVEN:
        return lambda fun: Jacobian(fun, *options)
    return Jacobian(fun, *options)


# Functions of JAX, of which the last one is applied first.
_STEPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "filter_jacfwd": (jax.jacfwd,),
    "filter_jacrev": (jax.jacrev,),
    "filter_hessian": (jax.jacfwd, jax.jacrev),
}


class Jacobian(Transformed[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_jacfwd`][] and its relatives."""

    _transformation_: str = field(static=True)
    _steps: tuple[Callable[..., Any], ...] = field(static=True)
    _has_aux: bool = field(static=True)
    _jackwargs: tuple[tuple[str, Any], ...] = field(static=True)

    def __init__(
        self, fun: Any, transformation: str, steps: Any, has_aux: bool, jackwargs: Any
    ):
        self._transformation_ = transformation
        super().__init__(fun)
        self._steps = steps
        self._has_aux = has_aux
        self._jackwargs = tuple(sorted(jackwargs.items()))

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fun, has_aux = self.__wrapped__, self._has_aux
        name, jackwargs = self._transformation_, dict(self._jackwargs)
        step, *inner = self._steps
        if inner:
            fun = Jacobian(fun, name, tuple(inner), has_aux, jackwargs)
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
            rows, packed = step(flat, has_aux=True, **jackwargs)(data)
        else:  # JAX's functions fail for an empty list of inputs
            moving, packed = flat(data)
            rows = [[] for _ in moving]
        treedef, aux, constants = unpack(packed)
        found = iter(rows)
        leaves = [next(found) if x is None else _zeros(data, x) for x in constants]
        result: Any = treedef.unflatten(call.args_alone(x)[0] for x in leaves)
        if has_aux:
            result = result, aux
        return result


def _zeros(data: list[Any], out: Any) -> list[Any]:
    """The Jacobian of an output that has no derivative."""
    return [
        jnp.zeros((*jnp.shape(out), *jnp.shape(x)), jnp.result_type(out)) for x in data
    ]
