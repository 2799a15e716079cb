"""`filter_custom_jvp` and `filter_custom_vjp`: derivatives given by the user.

JAX gets the arrays as inputs, never by closure, since it may run a rule long after the
call. What the user may perturb comes first; all other arrays are *held*: passed to JAX
too, and it is an error if they are perturbed anyway.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import zero_from_primal

from .._compat.custom_vjp import call_with_rules, is_forward_mode
from .._core.base import MISSING, Transformed, frames_hidden, name_of
from .._core.context import in_context_of_now
from .._core.difference import ARRAY_TYPE, STATIC_VALUE, tree_differences
from .._core.pack import pack, unpack
from .._core.parts import as_arrays, is_array_or_struct, is_number, take_apart
from .._module.fields import field
from .._tree.arrays import describe_type
from .._tree.filters import is_array, is_array_like, is_inexact_array, is_none
from .._tree.match import pair_leaves
from .._tree.nodes import describe_node
from .._tree.partitioning import combine, filter, partition
from .._tree.paths import path_str
from .._warn import warn
from .tangents import is_zero, refuse_non_arrays, shape_and_dtype

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Rules:
    """The rules of one function; attached after it was wrapped. Equal to itself alone."""

    jvp: Callable[..., Any] | None = None
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    # The old form of the backward rule knows no symbolic zeros.
    materialises: bool = False
    # Whether `fwd` may return something else than the function, and is checked.
    may_change_output: bool = True


def filter_custom_jvp(fn: Callable[_P, _T]) -> "CustomJVP[_P, _T]":
    """A function with a custom rule for forward-mode derivatives.

    Attach the rule by `.def_jvp(rule)` before the first call. Reverse mode transposes it.

    **Arguments:**

    - `fn`: takes anything and returns a tree of arrays and numbers.

    The rule is `rule(primals, tangents, **kwargs) -> (out, tangent_out)`. `primals` is
    the tuple of positional arguments. `tangents` has the same structure, with `None`
    for everything that has no tangent. `tangent_out` has the structure of `out`, where
    `None` stands for zero. Arguments that are passed by keyword cannot be
    differentiated. A Python number that is differentiated is an array in `primals`.

    **Returns:**

    A callable like `fn`.

    **Raises:**

    `AttributeError` if it is called without a rule. `ValueError` if an argument passed
    by keyword is differentiated, if `out` has another structure than what `fn` returns,
    or `tangent_out` another one than `out`; `TypeError` if they have another shape or
    dtype, or the rule does not return a pair.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_custom_jvp
        def safe_sqrt(x):
            return jnp.sqrt(x)

        @safe_sqrt.def_jvp
        def rule(primals, tangents):
            (x,), (t,) = primals, tangents
            root = safe_sqrt(x)
            return root, None if t is None else t / jnp.maximum(2 * root, 0.125)

        assert eqx.filter_grad(safe_sqrt)(jnp.asarray(0.0)) == 8.0
        ```
    """
    return CustomJVP(fn)


class CustomJVP(Transformed[_P, _T], Generic[_P, _T]):
    """What [`equinox_like.filter_custom_jvp`][] returns."""

    _rules: Rules = field(static=True)

    def __init__(self, fun: Any):
        super().__init__(fun)
        self._rules = Rules()

    def def_jvp(self, rule: Callable[..., Any]) -> None:
        """Attaches the rule."""
        self._rules.jvp = rule

    def defjvp(self, rule: Callable[..., Any]) -> None:
        """The old form of `def_jvp`: tangents of inexact arrays are never `None`."""
        warn("`defjvp` is deprecated: use `def_jvp`, where `None` is a zero tangent.")
        self._rules.jvp = _with_zeros(rule)

    def defjvps(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "`filter_custom_jvp` has no `defjvps`: use `def_jvp`."
        )

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        opaque, name, rule = self._opaque, name_of(self.__wrapped__), self._rules.jvp
        if rule is None:
            raise AttributeError(
                f"`filter_custom_jvp` of `{name}` has no rule yet: attach one by "
                f"`{name}.def_jvp(rule)` before calling it."
            )
        data, rest = take_apart(args)
        held, held_rest = take_apart((self._tree, kwargs))

        def flat(data, held):
            tree, kwargs = held_rest.fill(held)
            out = (opaque if tree is None else tree)(*rest.fill(data), **kwargs)
            refuse_non_arrays(out, name, "filter_custom_jvp")
            return out

        def flat_rule(primals, tangents):
            (data, held), (data_tangents, _) = primals, tangents
            _, kwargs = held_rest.fill(held)
            given = [None if is_zero(t) else t for t in data_tangents]
            primal_args = rest.fill(as_arrays(data))
            returned = rule(primal_args, rest.alone(given), **kwargs)
            rule_name = f"The rule of `filter_custom_jvp` of `{name}`"
            out, tangent_out = _pair(returned, rule_name, "(output, tangent)")
            refuse_non_arrays(out, name, "filter_custom_jvp")
            own = functools.partial(_eval_shape, flat, data, held)
            _check_output(out, own, rule_name, _type_of)
            return out, _output_tangent(out, tangent_out, name)

        # The rule knows `flat` without it: with it, it would keep itself alive.
        flat_with_rule = jax.custom_jvp(flat)
        flat_with_rule.defjvp(in_context_of_now(flat_rule), symbolic_zeros=True)
        message = _KEYWORD_TANGENT.format(name=name)
        return flat_with_rule(data, hold(held, lambda _: ValueError(message)))

    def __repr__(self) -> str:
        return f"<filter_custom_jvp of {name_of(self.__wrapped__)}>"


_KEYWORD_TANGENT = (
    "`filter_custom_jvp` of `{name}` received a keyword tangent: arguments passed by "
    "keyword, and the arrays of the function itself, cannot be differentiated. Pass them "
    "by position."
)


def _eval_shape(flat: Callable[..., Any], *args: Any) -> Any:
    # JAX remembers the trace, with what the function captures, until the function that it
    # was given dies: not `flat`, which lives on in traces.
    return jax.eval_shape(lambda *args: flat(*args), *args)


def _pair(returned: Any, rule: str, pair: str) -> tuple[Any, Any]:
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return returned[0], returned[1]
    raise TypeError(
        f"{rule} must return a pair `{pair}`; it returned {describe_node(returned)}."
    )


def _check_output(
    out: Any, expected: Callable[[], Any], rule: str, type_of: Callable[[Any], str]
) -> None:
    """Raises if the output of a rule is not of the form of the function's own output.

    JAX takes the one or the other, depending on whether the function is differentiated.
    """
    try:
        own = expected()
    except Exception:
        return  # a function that does not run without values
    for found in tree_differences("output", own, out, _is_number_or_struct, type_of):
        if found.kind != STATIC_VALUE:  # for example a new function object
            error = TypeError if found.kind == ARRAY_TYPE else ValueError
            raise error(
                f"{rule} must return the same output as the function, except for the "
                f"values of arrays: `{found.path}` is {found.before} from the "
                f"function, but {found.after} from the rule."
            )


def _is_number_or_struct(x: Any) -> bool:
    return is_array_or_struct(x) or is_number(x)


def _type_of(x: Any) -> str:
    shape, dtype = shape_and_dtype(x)
    return f"an array {describe_type(dtype, shape)}"


def _type_or_number(x: Any) -> str:
    return repr(x) if is_number(x) else _type_of(x)


def _output_tangent(out: Any, tangent_out: Any, name: str) -> Any:
    """The tangent of `out` for JAX, with symbolic zeros."""
    leaves, treedef = jtu.tree_flatten(out, is_none)
    tangents, tangent_treedef = jtu.tree_flatten(tangent_out, is_none)
    if treedef != tangent_treedef:
        raise ValueError(
            f"The rule of `filter_custom_jvp` of `{name}` must return a tangent with the "
            f"structure of the output, with `None` for zero. The output has\n    "
            f"{treedef}\nand the tangent\n    {tangent_treedef}"
        )
    return treedef.unflatten(
        [
            zero_from_primal(x, symbolic_zeros=True)
            if t is None and x is not None
            else t
            for x, t in zip(leaves, tangents, strict=True)
        ]
    )


def _with_zeros(rule: Callable[..., Any]) -> Callable[..., Any]:
    def with_zeros(primals, tangents, **kwargs):
        filled = jtu.tree_map(
            lambda x, t: jnp.zeros_like(x) if t is None and is_inexact_array(x) else t,
            primals,
            tangents,
            is_leaf=is_none,
        )
        return rule(primals, filled, **kwargs)

    return with_zeros


@overload
def filter_custom_vjp(
    *, optimize_remat: bool = False
) -> "Callable[[Callable[_P, _T]], CustomVJP[_P, _T]]": ...
@overload
def filter_custom_vjp(
    fn: Callable[_P, _T], *, optimize_remat: bool = False
) -> "CustomVJP[_P, _T]": ...
def filter_custom_vjp(fn: Any = MISSING, *, optimize_remat: bool = False) -> Any:
    """A function with custom rules for its reverse-mode derivative.

    Attach them by `.def_fwd(fwd)` and `.def_bwd(bwd)` before the first call. Only the first
    argument can be differentiated, which must be passed by position; it may be a tuple of
    several things.

    **Arguments:**

    - `fn`: `fn(vjp_arg, *args, **kwargs)` takes and returns anything.
    - `optimize_remat`: whether `fwd` should run only once under
        [`equinox_like.filter_checkpoint`][]. Then it is not known what is perturbed, or
        has a cotangent: `perturbed` is `True` for all inexact arrays, and cotangents
        are zeros instead of `None`.

    The rules:

    - `fwd(perturbed, vjp_arg, *args, **kwargs) -> (out, residuals)`. `perturbed` is like
        `vjp_arg`, with `True` for each leaf that is differentiated, else `False`. The
        residuals may be anything.
    - `bwd(residuals, cotangent, perturbed, vjp_arg, *args, **kwargs) -> gradient`. The
        cotangent is like `out`, with `None` for what has none. The gradient is like
        `filter(vjp_arg, is_inexact_array)`, where `None` stands for zero.

    **Returns:**

    A callable like `fn`. Where it is not differentiated `fn` itself runs.

    **Raises:**

    `RuntimeError` if it is called without rules, if another argument is differentiated,
    or if the gradient has another structure. `ValueError` if it has another shape,
    `TypeError` if it is not of floating or complex dtype. `ValueError` if the output of
    `fwd` has another structure than what `fn` returns, `TypeError` if it has another
    shape or dtype, or `fwd` does not return a pair.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_custom_vjp
        def clip_gradient(x, limit):
            return x

        @clip_gradient.def_fwd
        def fwd(perturbed, x, limit):
            return x, None

        @clip_gradient.def_bwd
        def bwd(residuals, cotangent, perturbed, x, limit):
            return jnp.clip(cotangent, -limit, limit)

        grad = eqx.filter_grad(lambda x: 5 * clip_gradient(x, 1.0))(jnp.asarray(2.0))
        assert grad == 1.0
        ```
    """
    if fn is MISSING:
        return lambda fn: CustomVJP(fn, optimize_remat)
    return CustomVJP(fn, optimize_remat)


class CustomVJP(Transformed[_P, _T], Generic[_P, _T]):
    """What [`equinox_like.filter_custom_vjp`][] returns."""

    _rules: Rules = field(static=True)
    _optimize_remat: bool = field(static=True)

    def __init__(self, fun: Any, optimize_remat: bool):
        super().__init__(fun)
        self._rules = Rules()
        self._optimize_remat = optimize_remat

    def def_fwd(self, fwd: Callable[..., Any]) -> None:
        """Attaches the forward rule."""
        self._rules.fwd = fwd

    def def_bwd(self, bwd: Callable[..., Any]) -> None:
        """Attaches the backward rule."""
        self._rules.bwd = bwd

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """The old form: the rules get no `perturbed`, and zeros for `None`."""
        warn("`defvjp` is deprecated: use `def_fwd` and `def_bwd`.")
        rules = self._rules
        rules.fwd = lambda perturbed, *args, **kwargs: fwd(*args, **kwargs)
        rules.bwd = lambda residuals, cotangent, perturbed, *args, **kwargs: bwd(
            residuals, cotangent, *args, **kwargs
        )
        rules.materialises = True

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        opaque, name, rules = self._opaque, name_of(self.__wrapped__), self._rules
        optimize_remat = self._optimize_remat
        fwd, bwd = rules.fwd, rules.bwd
        if fwd is None or bwd is None:
            raise RuntimeError(
                f"`def_fwd` or `def_bwd` not yet called for `{name}`: a "
                "`filter_custom_vjp` needs both before it is called."
            )
        if not args:
            raise TypeError(
                f"`filter_custom_vjp` of `{name}` takes its first argument, which is the "
                "one that is differentiated, by position."
            )
        fwd_name = f"`def_fwd` of `{name}`"
        inexact, others = partition(args[0], is_inexact_array)
        data, treedef = jtu.tree_flatten(inexact)
        held, rest = take_apart((self._tree, others, args[1:], kwargs))

        def arguments(data, held):
            """The callable, and what it is called with."""
            tree, others, args, kwargs = rest.fill(held)
            vjp_arg = combine(treedef.unflatten(data), others)
            return opaque if tree is None else tree, (vjp_arg, *args), kwargs

        def like_argument(flags):
            return combine(
                treedef.unflatten(flags), jtu.tree_map(lambda _: False, others)
            )

        def flat(data, held):
            fun, args, kwargs = arguments(data, held)
            return pack(fun(*args, **kwargs))

        def flat_fwd(data, held):
            if optimize_remat:
                flags = [True] * len(data)
            else:
                flags = [x.perturbed for x in data]
                data, held = ([x.value for x in group] for group in (data, held))
            data = as_arrays(data)
            _, args, kwargs = arguments(data, held)
            returned = fwd(like_argument(flags), *args, **kwargs)
            out, residuals = _pair(returned, fwd_name, "(output, residuals)")
            if rules.may_change_output:
                own = functools.partial(_eval_shape, flat, data, held)
                _check_output(out, lambda: unpack(own()), fwd_name, _type_or_number)
            out_treedef = jtu.tree_structure(filter(out, is_array))
            return pack(out), pack((residuals, out_treedef, flags, data, held))

        def flat_bwd(saved, cotangents):
            residuals, out_treedef, flags, data, held = unpack(saved)
            _, args, kwargs = arguments(data, held)
            given = [
                _cotangent(c, rules.materialises) for c in jtu.tree_leaves(cotangents)
            ]
            gradient = bwd(
                residuals,
                out_treedef.unflatten(given),
                like_argument(flags),
                *args,
                **kwargs,
            )
            return _input_cotangents(gradient, treedef, data, name), None

        # The rules know `flat` without them: with these it would keep itself alive.
        flat_with_rules = jax.custom_vjp(flat)
        flat_with_rules.defvjp(
            in_context_of_now(flat_fwd),
            in_context_of_now(flat_bwd),
            symbolic_zeros=not optimize_remat,
            optimize_remat=optimize_remat,
        )
        message = _UNEXPECTED_TANGENT.format(name=name)
        held = hold(held, lambda _: RuntimeError(message))
        try:
            return unpack(call_with_rules(flat_with_rules, data, held))
        except TypeError as e:
            if not is_forward_mode(e):
                raise
            raise TypeError(
                f"`{name}` has rules for reverse mode only, by `filter_custom_vjp`: it has "
                "no forward mode (forward-mode autodiff is `jax.jvp`, `jax.jacfwd`, "
                "`jax.hessian`). Use `filter_custom_jvp`, whose rule serves both modes."
            ) from e

    def __repr__(self) -> str:
        return f"<filter_custom_vjp of {name_of(self.__wrapped__)}>"


_UNEXPECTED_TANGENT = (
    "`*args` and `**kwargs` of `{name}`, a `filter_custom_vjp`, cannot be "
    "autodifferentiated, nor can the arrays of the function itself. Only its first "
    "argument can, which may be a tuple of several; or use `jax.lax.stop_gradient` on the "
    "others."
)


def _cotangent(cotangent: Any, materialise: bool) -> Any:
    """What the user's backward rule gets for one leaf."""
    if not is_zero(cotangent):
        return cotangent
    if materialise and cotangent.dtype != jax.dtypes.float0:
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return None


def _input_cotangents(
    gradient: Any, treedef: Any, data: list[Any], name: str
) -> list[Any]:
    """What the user's backward rule returned, checked, for each inexact array."""
    message = (
        f"The gradient that `def_bwd` of `{name}` returned must have the same structure "
        "as `filter(vjp_arg, is_inexact_array)`, with `None` for zero."
    )
    expected = treedef.unflatten(data)
    cotangents = []
    for path, primal, leaf in pair_leaves(
        expected, gradient, message, is_none, RuntimeError
    ):
        where = path_str(path, "gradient")
        if primal is not None:
            cotangents.append(
                leaf if leaf is None else _cast(leaf, primal, where, name)
            )
        elif leaf is not None:
            raise RuntimeError(
                f"`def_bwd` of `{name}` returned `{where}` for a leaf that is not a "
                "floating-point or complex array: it must have the same structure as "
                "`filter(vjp_arg, is_inexact_array)`."
            )
    return cotangents


def _cast(leaf: Any, primal: Any, where: str, name: str) -> Any:
    dtype = jnp.result_type(leaf) if is_array_like(leaf) else None
    is_complex = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"`def_bwd` of `{name}` returned at `{where}` a leaf of "
            f"{type(leaf).__name__ if dtype is None else f'dtype {dtype}'}, for an "
            f"array of dtype {primal.dtype}: a gradient must have a floating or "
            "complex dtype."
        )
    if is_complex and not jnp.iscomplexobj(primal):
        raise TypeError(
            f"`def_bwd` of `{name}` returned at `{where}` a complex gradient of a real "
            "array."
        )
    if jnp.shape(leaf) != jnp.shape(primal):
        raise ValueError(
            f"`def_bwd` of `{name}` returned at `{where}` an array of shape "
            f"{jnp.shape(leaf)}, for one of shape {jnp.shape(primal)}."
        )
    return jnp.asarray(leaf, primal.dtype)


def hold(values: Sequence[Any], error: Callable[[int], Exception]) -> list[Any]:
    """`values`, none of which may have a tangent.

    If one has, `error(index)` of the first of these is raised.
    """

    @jax.custom_jvp
    def identity(values):
        return values

    def rule(primals, tangents):
        for i, tangent in enumerate(tangents[0]):
            if not is_zero(tangent):
                raise error(i)
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    return (
        identity(list(values)) if any(map(is_inexact_array, values)) else list(values)
    )
