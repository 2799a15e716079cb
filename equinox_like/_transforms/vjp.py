"""`filter_vjp`: reverse-mode derivatives of functions of any pytrees."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import jax
import jax.tree_util as jtu

from .._core.base import frames_hidden, name_of, require_callable
from .._core.flat_call import FlatCall
from .._module.fields import field
from .._module.module import Module
from .._tree.arrays import jax_struct_of
from .._tree.filters import is_inexact_array, is_none
from .._tree.nodes import path_str
from .tangents import by_parts, match_tangents, rejoin

_T = TypeVar("_T")
_Aux = TypeVar("_Aux")


@overload
def filter_vjp(
    fun: Callable[..., _T], *primals: Any, has_aux: Literal[False] = False
) -> "tuple[_T, Pullback]": ...
@overload
def filter_vjp(
    fun: Callable[..., tuple[_T, _Aux]], *primals: Any, has_aux: Literal[True]
) -> "tuple[_T, Pullback, _Aux]": ...
@frames_hidden
def filter_vjp(fun: Any, *primals: Any, has_aux: bool = False) -> Any:
    """The value of a function, and the function that pulls cotangents back.

    **Arguments:**

    - `fun`: `fun(*primals)` may take and return anything.
    - `*primals`: the arguments. All their floating and complex arrays are differentiated,
        frozen ones too.
    - `has_aux`: whether `fun` returns `(out, aux)`.

    **Returns:**

    `(out, vjp_fn)`, or `(out, vjp_fn, aux)`. `vjp_fn(cotangent)` takes a tree like `out`,
    and returns a tuple of trees like the primals. All have `None` for everything that is
    not a floating-point or complex array. `vjp_fn` may be called many times, and is a
    pytree that holds the intermediate values.

    **Raises:**

    `ValueError` if a cotangent does not fit the output, naming it, when `vjp_fn` is called.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        out, vjp_fn = eqx.filter_vjp(lambda x, n: (x**n, n), jnp.asarray(3.0), 2)
        assert out == (9.0, 2)
        assert vjp_fn((jnp.asarray(1.0), None)) == (6.0, None)
        ```
    """
    require_callable(fun, "filter_vjp")
    data, call = FlatCall.of(fun, primals, {}, is_inexact_array)
    inexact, pull, packed = jax.vjp(by_parts(call, has_aux), data, has_aux=True)
    out, aux = rejoin(inexact, packed)
    values, treedef = jtu.tree_flatten(inexact)
    pullback = Pullback(
        name_of(fun),
        pull,
        treedef.unflatten(map(jax_struct_of, values)),
        jtu.tree_structure(call.args_alone(data)),
    )
    return (out, pullback, aux) if has_aux else (out, pullback)


class Pullback(Module):
    """The function from cotangents that [`equinox_like.filter_vjp`][] returns."""

    _name: str = field(static=True)
    _pull: Any
    _out: Any = field(static=True)
    _primals: Any = field(static=True)

    @frames_hidden
    def __call__(self, cotangent: Any, /) -> tuple[Any, ...]:
        try:
            matched = match_tangents(self._out, cotangent, "cotangent")
        except TypeError as e:
            raise ValueError(str(e)) from None
        expected = jtu.tree_flatten_with_path(self._out, is_none)[0]
        for (path, struct), given in zip(expected, matched, strict=True):
            if given is None and struct is not None:
                raise ValueError(
                    f"`{path_str(path, 'cotangent')}` is `None`, but belongs to an "
                    f"output of shape {struct.shape} and dtype {struct.dtype}: pass "
                    "zeros."
                )
        out = jtu.tree_structure(self._out, is_leaf=is_none)
        return self._primals.unflatten(self._pull(out.unflatten(matched))[0])

    def __repr__(self) -> str:
        return f"<vjp of {self._name}>"
