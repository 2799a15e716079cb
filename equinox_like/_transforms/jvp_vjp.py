"""`filter_jvp`, `filter_linearize` and `filter_vjp`: derivatives along (co)tangents.

Tangents are trees like the primal. `None` is the tangent of a leaf that is not
differentiated. JAX's float0 arrays are accepted in its place, but never returned.

JAX represents zero tangents as `float0` and as arrays of zeros; here both are `None`. To
distinguish a symbolic zero from a computed one, `filter_jvp` passes the outputs through an
identity whose rule, with symbolic zeros, sees which of them have a tangent.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from .._compat.tracing import Tracer
from .._core.base import frames_hidden, name_of, require_callable
from .._core.flat_call import FlatCall, pack, take_apart, unpack, value_and_aux
from .._module.fields import field
from .._module.module import Function
from .._tree.arrays import jax_struct_of
from .._tree.filters import is_array_like, is_inexact_array, is_none
from .._tree.match import pair_leaves
from .._tree.nodes import describe_node, path_str
from .._tree.partitioning import combine, partition

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Aux = TypeVar("_Aux")


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
    depends: set[int] = set()

    def watched(data, token):
        inexact, aux = flat(data)
        # Anything else, such as a NumPy array, has no tangent, and stays as it is.
        traced, template = take_apart(inexact, lambda x: isinstance(x, Tracer))
        depends.clear()

        def see(i, has_tangent):
            if has_tangent and i < len(traced):  # and not the token
                depends.add(template.places[i])

        # The token always has a tangent, so that the rule runs in this `jax.jvp`, not in
        # an outer one.
        *found, _ = watch([*traced, token], see)
        return template.fill(found), aux

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
    found = [t if i in depends else None for i, t in enumerate(found)]
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


class Linearized(Function):
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


class Pullback(Function):
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
        out = jtu.tree_structure(self._out, is_leaf=is_none)
        return self._primals.unflatten(self._pull(out.unflatten(matched))[0])

    def __repr__(self) -> str:
        return f"<vjp of {self._name}>"


def by_parts(call: FlatCall, has_aux: bool = False) -> Callable[..., Any]:
    """A call as a function for JAX to differentiate with `has_aux=True`.

    It maps the data to the output, with `None` for all leaves that are not inexact arrays.
    These leaves are auxiliary, and `rejoin` puts them back.
    """

    def flat(data):
        out, aux = value_and_aux(call.fun, call.run(data), has_aux)
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
    is_cotangent = name == "cotangent"
    owner = "the output" if is_cotangent else "the primals"
    message = (
        f"`{name}` must have the structure of {owner}, with `None` for leaves that are "
        "not differentiated."
    )
    return [
        _match(primal, tangent, path_str(path, name), is_cotangent)
        for path, primal, tangent in pair_leaves(
            primals, tangents, message, name, is_none
        )
    ]


def _match(primal: Any, tangent: Any, name: str, is_cotangent: bool) -> Any:
    if tangent is None:
        if is_cotangent and primal is not None:
            raise ValueError(
                f"`{name}` is `None`, but belongs to an output of shape {primal.shape} "
                f"and dtype {primal.dtype}: pass zeros."
            )
        return None
    if not is_array_like(tangent):
        raise TypeError(
            f"`{name}` is {describe_node(tangent)}, which is not a tangent: pass an "
            "array, or `None` for a leaf that is not differentiated. `filter(tree, "
            "is_inexact_array)` has `None` there."
        )
    shape, dtype = array_type(primal)
    given_shape, given_dtype = array_type(tangent)
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


def array_type(x: Any) -> tuple[Any, Any]:
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
