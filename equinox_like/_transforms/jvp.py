"""`filter_jvp` and `filter_linearize`: forward mode for functions of any pytrees."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.tracing import Tracer
from .._core.base import frames_hidden, name_of, require_callable
from .._core.flat_call import FlatCall
from .._module.fields import field
from .._module.module import Module
from .._tree.arrays import jax_struct_of
from .._tree.filters import is_inexact_array, is_none
from .._tree.nodes import describe_node
from .tangents import by_parts, match_tangents, rejoin, watch

_P = ParamSpec("_P")
_T = TypeVar("_T")


@frames_hidden
def filter_jvp(
    fn: Callable[..., _T], primals: Any, tangents: Any, **kwargs: Any
) -> tuple[_T, Any]:
    """The value of a function, and how it changes along `tangents`.

    **Arguments:**

    - `fn`: `fn(*primals, **kwargs)` may take and return anything.
    - `primals`: a tuple or list of the positional arguments.
    - `tangents`: a tree with the structure of `primals`, where `None` counts as a leaf.
        For each floating or complex array, and for each Python float, it has a tangent of
        the same shape and dtype, or `None` if the value is not perturbed; for everything
        else, `None`.
    - `**kwargs`: keyword arguments of `fn`. They are not differentiated.

    **Returns:**

    The output, and its tangent. The tangent has the structure of the output, with `None`
    for everything that cannot be differentiated or does not depend on a perturbed value.

    **Raises:**

    `ValueError` if the structure or a shape differs, `TypeError` if a dtype differs or a
    value that cannot be differentiated has a tangent. Both name the tangent.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        primals = {"w": jnp.ones(2), "name": "first"}, jnp.asarray(3.0)
        tangents = {"w": jnp.ones(2), "name": None}, None
        out, tangent = eqx.filter_jvp(lambda p, x: (x * p["w"], x), primals, tangents)
        assert tangent[0].tolist() == [3, 3] and tangent[1] is None
        ```
    """
    require_callable(fn, "filter_jvp")
    if not isinstance(primals, tuple | list):
        raise TypeError(
            "The primals of `filter_jvp` are a tuple or list of all arguments of "
            f"`{name_of(fn)}`; got {describe_node(primals)}. For one argument: `(x,)`."
        )
    matched = match_tangents(primals, tangents)
    leaves = zip(jtu.tree_leaves(primals, is_none), matched, strict=True)
    is_perturbed = [tangent is not None for x, tangent in leaves if x is not None]
    fun = functools.partial(fn, **kwargs)
    data, call = FlatCall.of(fun, primals, {}, is_perturbed)
    flat = by_parts(call)
    depends: list[bool] = []

    def watched(data, token):
        inexact, aux = flat(data)
        values, treedef = jtu.tree_flatten(inexact)
        # Anything else, such as a NumPy array, has no tangent, and stays as it is.
        traced = [i for i, x in enumerate(values) if isinstance(x, Tracer)]
        depends[:] = [False] * len(values)

        def see(i, has_tangent):
            if i < len(traced):  # and not the token
                depends[traced[i]] = has_tangent

        # The token always has a tangent, so that the rule runs in this `jax.jvp`, not in
        # an outer one.
        *found, _ = watch([*(values[i] for i in traced), token], see)
        for i, x in zip(traced, found, strict=True):
            values[i] = x
        return treedef.unflatten(values), aux

    if not data:
        out = fn(*primals, **kwargs)
        return out, jtu.tree_map(lambda _: None, out)
    inexact, inexact_tangents, aux = jax.jvp(
        watched,
        (data, 0.0),
        ([tangent for tangent in matched if tangent is not None], 1.0),
        has_aux=True,
    )
    found, treedef = jtu.tree_flatten(inexact_tangents)
    found = [t if d else None for t, d in zip(found, depends, strict=True)]
    return rejoin(inexact, aux)[0], treedef.unflatten(found)


@frames_hidden
def filter_linearize(fun: Callable[..., _T], *primals: Any) -> "tuple[_T, Linearized]":
    """The value of a function, and its derivative as a linear function.

    Like [`equinox_like.filter_jvp`][] for many tangents at the same place: the function
    itself runs once.

    **Arguments:**

    - `fun`: `fun(*primals)` may take and return anything.
    - `*primals`: the arguments. All their floating and complex arrays are differentiated.

    **Returns:**

    The output, and a function of tangents, one for each primal: with the structure of
    the primals, and `None` for whatever is not differentiated, or not perturbed. It
    returns the tangent of the output, with `None` for everything that is not a
    floating-point or complex array. It is a pytree that holds the intermediate values.

    **Raises:**

    As `filter_jvp`, when the linear function is called.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        out, f_jvp = eqx.filter_linearize(lambda x, n: (x**n, n), jnp.asarray(3.0), 2)
        assert out == (9.0, 2)
        assert f_jvp(jnp.asarray(1.0), None) == (6.0, None)
        ```
    """
    require_callable(fun, "filter_linearize")
    data, call = FlatCall.of(fun, primals, {}, is_inexact_array)
    inexact, linear, aux = jax.linearize(by_parts(call), data, has_aux=True)
    structs = call.args_alone(map(jax_struct_of, data))
    return rejoin(inexact, aux)[0], Linearized(name_of(fun), linear, structs)


class Linearized(Module):
    """The linear function that [`equinox_like.filter_linearize`][] returns."""

    _name: str = field(static=True)
    _linear: Any
    _primals: tuple[Any, ...] = field(static=True)

    @frames_hidden
    def __call__(self, /, *tangents: Any) -> Any:
        matched = match_tangents(self._primals, tangents)
        structs = jtu.tree_leaves(self._primals, is_leaf=is_none)
        return self._linear(
            [
                jnp.zeros(struct.shape, struct.dtype) if tangent is None else tangent
                for struct, tangent in zip(structs, matched, strict=True)
                if struct is not None
            ]
        )

    def __repr__(self) -> str:
        return f"<derivative of {self._name}>"
