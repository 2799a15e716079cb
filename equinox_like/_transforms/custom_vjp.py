"""`filter_custom_vjp`: reverse-mode derivatives given by the user."""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from .._call_path import call_rebuilt
from .._compat.axes import vary_over, varying_axes
from .._compat.errors import call_with_rules, is_forward_mode
from .._core.base import frames_hidden, name_of, require_callable
from .._core.context import in_context_of_now
from .._core.flat_call import Template, as_arrays, pack, pair_of, take_apart, unpack
from .._errors import warn
from .._module.fields import field
from .._tree.filters import (
    is_array,
    is_array_like,
    is_inexact_array,
    is_none,
    is_number,
)
from .._tree.match import pair_leaves
from .._tree.nodes import path_str
from .._tree.partitioning import filter
from .._typing import NOT_GIVEN
from .custom_jvp import WithRules, batched_as_any, check_output, hold, type_of
from .jvp_vjp import is_zero

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def filter_custom_vjp(
    fn: Callable[_P, _T], *, optimize_remat: bool = False
) -> "CustomVJP[_P, _T]": ...
@overload
def filter_custom_vjp(
    *, optimize_remat: bool = False
) -> "Callable[[Callable[_P, _T]], CustomVJP[_P, _T]]": ...
def filter_custom_vjp(fn: Any = NOT_GIVEN, *, optimize_remat: bool = False) -> Any:
    """A function with custom rules for its reverse-mode derivative.

    Attach them by `.def_fwd(fwd)` and `.def_bwd(bwd)` before the first call. Both return
    `None`, so do not call a decorated rule by its name. Only the first argument can be
    differentiated. It must be passed by position, and may be a tuple of several
    arguments.

    **Arguments:**

    - `fn`: `fn(vjp_arg, *args, **kwargs)` takes and returns anything.
    - `optimize_remat`: if `True`, `fwd` runs only once under
        [`equinox_like.filter_checkpoint`][]. Then the rules do not learn what is
        perturbed, or has a cotangent: `perturbed` is `True` for all inexact arrays, and
        cotangents are zeros instead of `None`. And the gradient has no reverse mode: JAX
        raises `ValueError`, "Linearization failed". Forward over reverse mode works, as in
        [`equinox_like.filter_hessian`][].

    The rules:

    - `fwd(perturbed, vjp_arg, *args, **kwargs) -> (out, residuals)`. `perturbed` is like
        `vjp_arg`, with `True` for each leaf that is differentiated, else `False`. The
        residuals may be anything.
    - `bwd(residuals, cotangent, perturbed, vjp_arg, *args, **kwargs) -> gradient`. The
        cotangent is like `out`, with `None` for each leaf without one. The gradient is
        like `filter(vjp_arg, is_inexact_array)`, where `None` stands for zero.

    **Returns:**

    A callable like `fn`. If it is not differentiated, `fn` itself runs. Under `jax.vmap`
    all arrays of the output are mapped if an array of the arguments is, so its `out_axes`
    cannot be `None`.

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
    if fn is NOT_GIVEN:
        return lambda fn: CustomVJP(fn, optimize_remat)
    return CustomVJP(fn, optimize_remat)


class CustomVJP(WithRules[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_custom_vjp`][]."""

    _transformation_ = "filter_custom_vjp"

    _optimize_remat: bool = field(static=True)

    def __init__(self, fun: Any, optimize_remat: bool):
        super().__init__(fun)
        self._optimize_remat = optimize_remat

    def def_fwd(self, fwd: Callable[..., Any]) -> None:
        """Attaches the forward rule."""
        require_callable(fwd, "def_fwd", "fwd")
        self._rules.fwd = fwd

    def def_bwd(self, bwd: Callable[..., Any]) -> None:
        """Attaches the backward rule."""
        require_callable(bwd, "def_bwd", "bwd")
        self._rules.bwd = bwd

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Deprecated: the rules do not get `perturbed`, and get zeros for `None`."""
        warn("`defvjp` is deprecated: use `def_fwd` and `def_bwd`.")
        rules = self._rules
        rules.fwd = lambda perturbed, *args, **kwargs: fwd(*args, **kwargs)
        rules.bwd = lambda residuals, cotangent, perturbed, *args, **kwargs: bwd(
            residuals, cotangent, *args, **kwargs
        )
        rules.materialises = True

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        name, rules = name_of(self.__wrapped__), self._rules
        optimize_remat = self._optimize_remat
        fwd, bwd = rules.fwd, rules.bwd
        if fwd is None or bwd is None:
            raise RuntimeError(
                f"`def_fwd` or `def_bwd` not yet called for `{name}`: a "
                "`filter_custom_vjp` needs both before it is called."
            )
        if not args:
            raise TypeError(
                f"`filter_custom_vjp` of `{name}` takes its first argument, which is "
                "differentiated, by position."
            )
        data, held, call = _take_apart(self._held_, args, kwargs)

        def flat(data, held):
            fun, args, kwargs = call.fill(data, held)
            out = call_rebuilt(fun, *args, **kwargs)
            return pack(batched_as_any(out, (data, held)))

        def flat_fwd(data, held):
            if optimize_remat:
                flags = [True] * len(data)
            else:
                flags = [x.perturbed for x in data]
                data, held = ([x.value for x in group] for group in (data, held))
            data, held = as_arrays(data), as_arrays(held)
            _, args, kwargs = call.fill(data, held)
            fwd_of = functools.partial(fwd, call.like_argument(flags))
            returned = call_rebuilt(fwd_of, *args, **kwargs)
            fwd_name = f"`def_fwd` of `{name}`"
            out, residuals = pair_of(returned, fwd_name, "(output, residuals)")
            if rules.may_change_output:
                shown = lambda x: repr(x) if is_number(x) else type_of(x)  # noqa: E731
                check_output(out, flat, (data, held), fwd_name, shown)
            out_treedef = jtu.tree_structure(filter(out, is_array))
            saved = pack((residuals, out_treedef, flags, data, held))
            return pack(batched_as_any(out, (data, held))), saved

        def flat_bwd(saved, cotangents):
            residuals, out_treedef, flags, data, held = unpack(saved)
            _, args, kwargs = call.fill(as_arrays(data), as_arrays(held))
            given = [
                _cotangent(c, rules.materialises) for c in jtu.tree_leaves(cotangents)
            ]
            cotangent = out_treedef.unflatten(given)
            perturbed = call.like_argument(flags)
            gradient = bwd(residuals, cotangent, perturbed, *args, **kwargs)
            return _input_cotangents(gradient, args[0], name), None

        # The rules refer to the plain `flat`. If they referred to `flat_with_rules`,
        # they would form a reference cycle.
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
            raise TypeError(_NO_FORWARD_MODE.format(name=name)) from e


class _HeldCall(NamedTuple):
    """A call without its arrays: the data of the first argument, and all others."""

    first: Template
    others: Template

    def fill(self, data: Any, held: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The callable, and its arguments `(args, kwargs)`."""
        fun, leaves, args, kwargs = self.others.fill(held)
        first = Template(self.first.treedef, leaves, self.first.places).fill(data)
        return fun, (first, *args), kwargs

    def like_argument(self, flags: Any) -> Any:
        return self.first.fill(flags, lambda _: False)


def _take_apart(
    fun: Any, args: Any, kwargs: Any
) -> tuple[list[Any], list[Any], _HeldCall]:
    data, first = take_apart(args[0], is_inexact_array)
    held, others = take_apart((fun, first.leaves, args[1:], kwargs))
    first.leaves = [None] * len(first.leaves)  # they are among the held
    return data, held, _HeldCall(first, others)


_UNEXPECTED_TANGENT = (
    "`*args` and `**kwargs` of `{name}`, a `filter_custom_vjp`, cannot be "
    "autodifferentiated, nor can the arrays of the function itself. Only its first "
    "argument can, which may be a tuple of several; or use `jax.lax.stop_gradient` on the "
    "others."
)
_NO_FORWARD_MODE = (
    "`{name}` has rules for reverse mode only, by `filter_custom_vjp`: it has "
    "no forward mode (forward-mode autodiff is `jax.jvp`, `jax.jacfwd`, "
    "`jax.hessian`). Use `filter_custom_jvp`, whose rule serves both modes."
)


def _cotangent(cotangent: Any, materialise: bool) -> Any:
    """The cotangent of one leaf that the user's backward rule gets."""
    if not is_zero(cotangent):
        return cotangent
    if materialise and cotangent.dtype != jax.dtypes.float0:
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return None


def _input_cotangents(gradient: Any, vjp_arg: Any, name: str) -> list[Any]:
    """The validated gradient of the user's backward rule, for each inexact array."""
    message = (
        f"The gradient that `def_bwd` of `{name}` returned must have the same structure "
        "as `filter(vjp_arg, is_inexact_array)`, with `None` for zero."
    )
    cotangents = []
    for path, primal, leaf in pair_leaves(
        vjp_arg, gradient, message, "gradient", is_none, RuntimeError
    ):
        where = path_str(path, "gradient")
        if type(leaf) is SymbolicZero:  # as of `zero_from_primal`
            leaf = None
        if is_inexact_array(primal):
            says = f"`def_bwd` of `{name}` returned at `{where}`"
            cotangents.append(leaf if leaf is None else _cast(leaf, primal, says))
        # A rule need not ask whether a number that it multiplies by is an array.
        elif leaf is not None and not isinstance(primal, float | complex):
            raise RuntimeError(
                f"`def_bwd` of `{name}` returned `{where}` for a leaf that is not a "
                "floating-point or complex array: it must have the same structure as "
                "`filter(vjp_arg, is_inexact_array)`."
            )
    return cotangents


def _cast(leaf: Any, primal: Any, says: str) -> Any:
    dtype = jnp.result_type(leaf) if is_array_like(leaf) else None
    is_complex = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        what = type(leaf).__name__ if dtype is None else f"dtype {dtype}"
        raise TypeError(
            f"{says} a leaf of {what}, for an array of dtype {primal.dtype}: a gradient "
            "must have a floating or complex dtype."
        )
    if is_complex and not jnp.iscomplexobj(primal):
        raise TypeError(f"{says} a complex gradient of a real array.")
    if jnp.shape(leaf) != jnp.shape(primal):
        raise ValueError(
            f"{says} an array of shape {jnp.shape(leaf)}, for one of shape "
            f"{jnp.shape(primal)}."
        )
    axes, leaf = varying_axes(jax.typeof(primal)), jnp.asarray(leaf, primal.dtype)
    if more := sorted(map(str, varying_axes(jax.typeof(leaf)) - axes)):
        raise ValueError(
            f"{says} a gradient that differs between the devices along "
            f"{', '.join(map(repr, more))}, for an array that is the same on all of them. "
            f"It must be summed: `jax.lax.psum(..., {tuple(more)!r})`."
        )
    return vary_over(axes, leaf)
