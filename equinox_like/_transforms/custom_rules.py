"""Rules by the user: `filter_custom_jvp`, `filter_custom_vjp` and `filter_custom_vmap`.

All arrays are passed to JAX as inputs and never closed over, because JAX may run a rule
long after the call. The differentiable arrays come first. All other arrays are *held*:
they are inputs too, but it is an error if they have a tangent.

For a batching rule the function is traced first, so that the arrays it closes over become
inputs of the flat function that JAX gets. The user's rule does not see these inputs. If
one of them is batched, the function is batched by `jax.vmap` instead.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .._call_path import call_rebuilt
from .._compat.axes import vary_over, varying_axes
from .._compat.errors import call_with_rules, is_forward_mode
from .._compat.jaxpr import eval_jaxpr
from .._compat.primitives import batch_size, identity
from .._compat.tracing import Tracer
from .._core.base import by_position, frames_hidden, name_of, require_callable
from .._core.context import in_context_of_now
from .._core.difference import ARRAY_TYPE, STATIC_VALUE, Difference, tree_differences
from .._core.flat_call import (
    Template,
    as_arrays,
    pack,
    pair_of,
    take_apart,
    take_apart_like,
    unpack,
)
from .._errors import warn
from .._module.fields import field
from .._tree.arrays import describe_type, reusable
from .._tree.filters import (
    is_array,
    is_array_like,
    is_array_or_struct,
    is_inexact_array,
    is_inexact_array_like,
    is_none,
    is_number,
)
from .._tree.match import leaf_name, pair_leaves, spread
from .._tree.nodes import path_str
from .._tree.partitioning import filter
from .._typing import NOT_GIVEN
from .arguments import WithOptions, applied, check_only_arrays
from .jvp_vjp import array_type, filter_jvp, is_zero, watch
from .trace import trace

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Rules:
    """The rules of one function, attached after wrapping it. Compared by identity."""

    jvp: Callable[..., Any] | None = None
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    # Whether zero cotangents are passed as arrays, as the old `defvjp` does.
    materialises: bool = False
    # Whether `fwd` may return a different output than the function, and so is checked.
    may_change_output: bool = True

    def __deepcopy__(self, memo: Any) -> "Rules":
        return self  # as for the functions themselves, so that the treedefs are equal


class WithRules(WithOptions[_P, _T], Generic[_P, _T]):
    """A function with rules by the user."""

    _rules: Rules = field(static=True)

    def __init__(self, fun: Any, /, **fields: Any):
        super().__init__(fun, _rules=Rules(), **fields)


def filter_custom_jvp(fn: Callable[_P, _T]) -> "CustomJVP[_P, _T]":
    """A function with a custom rule for forward-mode derivatives.

    Attach the rule by `.def_jvp(rule)` before the first call. Reverse mode transposes the
    rule. `def_jvp` returns `None`, so do not call a decorated rule by its name.

    **Arguments:**

    - `fn`: takes anything and returns a tree of arrays and numbers.

    The rule is `rule(primals, tangents, **kwargs) -> (out, tangent_out)`. `primals` is
    the tuple of positional arguments. `tangents` has the same structure, with `None`
    for everything that has no tangent. `tangent_out` has the structure of `out`, where
    `None` stands for zero. Arguments that are passed by keyword cannot be
    differentiated. NumPy arrays, and Python numbers that are differentiated, are JAX
    arrays in the rule.

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
    return applied(CustomJVP, fn)


class CustomJVP(WithRules[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_custom_jvp`][]."""

    _transformation_ = "filter_custom_jvp"

    def def_jvp(self, rule: Callable[..., Any]) -> None:
        """Attaches the rule."""
        require_callable(rule, "def_jvp", "rule")
        self._rules.jvp = rule

    def defjvp(self, rule: Callable[..., Any]) -> None:
        """Deprecated: the rule gets zeros for the `None` tangents of inexact arrays."""
        warn("`defjvp` is deprecated: use `def_jvp`, where `None` is a zero tangent.")
        self._rules.jvp = _with_zeros(rule)

    def defjvps(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "`filter_custom_jvp` has no `defjvps`: use `def_jvp`."
        )

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        name, rule = name_of(self.__wrapped__), self._rules.jvp
        if rule is None:
            raise AttributeError(
                f"`filter_custom_jvp` of `{name}` has no rule yet: attach one by "
                f"`{name}.def_jvp(rule)` before calling it."
            )
        data, template = take_apart(args)
        held, held_template = take_apart((self._held_, kwargs))

        def flat(data, held):
            fun, kwargs = held_template.fill(held)
            out = call_rebuilt(fun, *template.fill(data), **kwargs)
            check_only_arrays(out, name, "filter_custom_jvp")
            return batched_in_front(out)

        def flat_rule(primals, tangents):
            (data, held), (data_tangents, _) = primals, tangents
            _, kwargs = held_template.fill(as_arrays(held))
            given = [None if is_zero(t) else jnp.asarray(t) for t in data_tangents]
            primal_args = template.fill(as_arrays(data))
            returned = rule(primal_args, template.alone(given), **kwargs)
            rule_name = f"The rule of `filter_custom_jvp` of `{name}`"
            out, tangent_out = pair_of(returned, rule_name, "(output, tangent)")
            check_only_arrays(out, name, "filter_custom_jvp")
            check_output(out, flat, (data, held), rule_name, shown_type)
            return batched_in_front((out, _output_tangent(out, tangent_out, rule_name)))

        # `flat_rule` refers to the plain `flat`. If it referred to `flat_with_rule`,
        # the two would form a reference cycle.
        flat_with_rule = jax.custom_jvp(flat)
        flat_with_rule.defjvp(in_context_of_now(flat_rule), symbolic_zeros=True)
        message = (
            f"`filter_custom_jvp` of `{name}` received a keyword tangent: arguments passed "
            "by keyword, and the arrays of the function itself, cannot be differentiated. "
            "Pass them by position."
        )
        return flat_with_rule(data, hold(held, lambda _: ValueError(message)))


def _output_tangent(out: Any, tangent_out: Any, rule: str) -> Any:
    """The tangent of `out` for JAX, with symbolic zeros."""
    message = (
        f"{rule} must return a tangent with the structure of the output, with `None` for "
        "zero."
    )
    tangents = []
    for path, x, t in pair_leaves(out, tangent_out, message, "tangent", is_none):
        # JAX's own zeros, of `zero_from_primal`, may stand in place of `None`.
        if t is None or type(t) is SymbolicZero:
            t = None if x is None else zero_from_primal(x, symbolic_zeros=True)
        elif x is not None:
            (shape, dtype), given = array_type(x), array_type(t)
            wanted = dtype if is_inexact_array_like(x) else jax.dtypes.float0
            if given != (shape, wanted):
                raise TypeError(
                    f"{rule} must produce a tangent of the shape and dtype of the output, "
                    "or `None` if the output is not floating or complex, but "
                    f"`{path_str(path, 'output')}` has shape {shape}, dtype {dtype}, and "
                    f"its tangent has shape {given[0]}, dtype {given[1]}."
                )
        tangents.append(t)
    return jtu.tree_structure(out, is_leaf=is_none).unflatten(tangents)


def _with_zeros(rule: Callable[..., Any]) -> Callable[..., Any]:
    def fill(x, t):
        return jnp.zeros_like(x) if t is None and is_inexact_array(x) else t

    def with_zeros(primals, tangents, **kwargs):
        filled = jtu.tree_map(fill, primals, tangents, is_leaf=is_none)
        return rule(primals, filled, **kwargs)

    return with_zeros


def hold(values: Sequence[Any], error: Callable[[int], Exception]) -> list[Any]:
    """Returns `values`, and raises `error(index)` for the first one with a tangent."""

    def see(i, has_tangent):
        if has_tangent:
            raise error(i)

    return watch(values, see) if any(map(is_inexact_array, values)) else list(values)


def batched_in_front(out: Any) -> Any:
    """`out`, with the axis of any `vmap` in front.

    JAX differentiates a compiled `vmap`, as in `grad(jit(vmap(f)))` or in a scan, as if
    a function and its rule always put that axis in the same place (until jax 0.12, where
    the flags `JAX_CUSTOM_JVP3` and `JAX_CUSTOM_VJP3` repair it). The gradient is wrong if
    they do not.
    """
    return jtu.tree_map(
        lambda x: _in_front.bind(x)[0] if isinstance(x, Tracer) else x, out
    )


def batched_as_any(out: Any, inputs: Any) -> Any:
    """As `batched_in_front`, but all arrays have the axis if an input has it.

    JAX would call the rule of a `custom_vjp` for each element with the cotangent of all of
    them (jax 0.10), or refuse, if an output depends on nothing that is mapped.
    """
    is_batched = lambda x: is_array(x) and x.dtype != jax.dtypes.float0  # noqa: E731
    data, template = take_apart(out, is_batched)
    given = [reusable(x) for x in jtu.tree_leaves(inputs) if is_array(x)]
    if any(isinstance(x, Tracer) for x in [*data, *given]):
        data = _in_front.bind(*data, *given)[: len(data)]
    return template.fill(data)


def _batch(arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], list[int]]:
    size = batch_size(arrays, axes)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape))
        if axis is None
        else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    return _in_front.bind(*moved), [0] * len(moved)  # again, for an outer `vmap`


_in_front = identity("batched_in_front", batch=_batch)


def check_output(
    out: Any,
    flat: Callable[..., Any],
    args: tuple[Any, ...],
    rule: str,
    type_of: Callable[[Any], str],
) -> None:
    """Raises if a rule's output differs from the function's in more than array values.

    JAX uses one or the other, depending on whether the function is differentiated.
    """
    try:
        # JAX caches the trace, and what the function captures, as long as the function
        # lives. So it gets a new function: `flat` itself lives on in other traces.
        own = unpack(jax.eval_shape(lambda *args: flat(*args), *args))
    except Exception:
        return  # a function that does not run without values
    is_data = lambda x: is_array_or_struct(x) or is_number(x)  # noqa: E731
    for found in tree_differences("output", own, out, is_data, type_of):
        if found.kind != STATIC_VALUE:  # for example a new function object
            error = TypeError if found.kind == ARRAY_TYPE else ValueError
            raise error(_other_output(rule, found))


def _other_output(rule: str, found: Difference | None) -> str:
    return (
        f"{rule} must return the same output as the function, except for the values of "
        "arrays: "
    ) + (
        f"`{found.path}` is {found.before} from the function, but {found.after} from the "
        "rule."
        if found
        else "the structures differ."
    )


def shown_type(x: Any) -> str:
    shape, dtype = array_type(x)
    return f"an array {describe_type(dtype, shape)}"


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
    return applied(CustomVJP, fn, _optimize_remat=optimize_remat)


class CustomVJP(WithRules[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_custom_vjp`][]."""

    _transformation_ = "filter_custom_vjp"

    _optimize_remat: bool = field(static=True)

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
        if rules.fwd is None or rules.bwd is None:
            raise RuntimeError(
                f"`def_fwd` or `def_bwd` not yet called for `{name}`: a "
                "`filter_custom_vjp` needs both before it is called."
            )
        if not args:
            raise TypeError(
                f"`filter_custom_vjp` of `{name}` takes its first argument, which is "
                "differentiated, by position."
            )
        data, first = take_apart(args[0], is_inexact_array)
        held, others = take_apart((self._held_, first.leaves, args[1:], kwargs))
        first.leaves = [None] * len(first.leaves)  # they are among the held
        now = copy.copy(
            rules
        )  # not those that may be attached before the backward pass
        call = _ReverseCall(name, now, self._optimize_remat, first, others)
        # The rules refer to the plain `flat`. If they referred to `flat_with_rules`,
        # they would form a reference cycle.
        flat_with_rules = jax.custom_vjp(call.flat)
        flat_with_rules.defvjp(
            in_context_of_now(call.fwd),
            in_context_of_now(call.bwd),
            symbolic_zeros=not self._optimize_remat,
            optimize_remat=self._optimize_remat,
        )
        message = (
            f"`*args` and `**kwargs` of `{name}`, a `filter_custom_vjp`, cannot be "
            "autodifferentiated, nor can the arrays of the function itself: only its "
            "first argument can, which may be a tuple. Use `jax.lax.stop_gradient` on "
            "the others."
        )
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


@dataclasses.dataclass(frozen=True, eq=False)
class _ReverseCall:
    """A call without its arrays, and its rules: as functions of arrays, for JAX."""

    name: str
    rules: Rules
    optimize_remat: bool
    # The data of the first argument; the callable, and all other arrays.
    first: Template
    others: Template

    def flat(self, data: Any, held: Any) -> Any:
        fun, args, kwargs = self._fill(data, held)
        out = call_rebuilt(fun, *args, **kwargs)
        return pack(batched_as_any(out, (data, held)))

    def fwd(self, data: Any, held: Any) -> tuple[Any, Any]:
        if self.optimize_remat:
            flags = [True] * len(data)
        else:
            flags = [x.perturbed for x in data]
            data, held = ([x.value for x in group] for group in (data, held))
        data, held = as_arrays(data), as_arrays(held)
        _, args, kwargs = self._fill(data, held)
        rule: Any = self.rules.fwd
        fwd_of = functools.partial(rule, self._like_argument(flags))
        returned = call_rebuilt(fwd_of, *args, **kwargs)
        fwd_name = f"`def_fwd` of `{self.name}`"
        out, residuals = pair_of(returned, fwd_name, "(output, residuals)")
        if self.rules.may_change_output:
            shown = lambda x: repr(x) if is_number(x) else shown_type(x)  # noqa: E731
            check_output(out, self.flat, (data, held), fwd_name, shown)
        out_treedef = jtu.tree_structure(filter(out, is_array))
        saved = pack((residuals, out_treedef, flags, data, held))
        return pack(batched_as_any(out, (data, held))), saved

    def bwd(self, saved: Any, cotangents: Any) -> tuple[list[Any], None]:
        residuals, out_treedef, flags, data, held = unpack(saved)
        _, args, kwargs = self._fill(as_arrays(data), as_arrays(held))
        leaves = jtu.tree_leaves(cotangents)
        given = [_cotangent(ct, self.rules.materialises) for ct in leaves]
        cotangent = out_treedef.unflatten(given)
        rule: Any = self.rules.bwd
        perturbed = self._like_argument(flags)
        gradient = rule(residuals, cotangent, perturbed, *args, **kwargs)
        return _input_cotangents(gradient, args[0], self.name), None

    def _fill(
        self, data: Any, held: Any
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The callable, and its arguments `(args, kwargs)`."""
        fun, leaves, args, kwargs = self.others.fill(held)
        first = Template(self.first.treedef, leaves, self.first.places).fill(data)
        return fun, (first, *args), kwargs

    def _like_argument(self, flags: Any) -> Any:
        return self.first.fill(flags, lambda _: False)


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


def filter_custom_vmap(fun: Callable[_P, _T]) -> "CustomVmap[_P, _T]":
    """A function with a custom rule for `vmap`.

    Attach the rule by `.def_vmap(rule)`; without one the function is batched like any
    other.

    **Arguments:**

    - `fun`: takes and returns anything.

    The rule is `rule(axis_size, in_batched, *args) -> (out, out_batched)`. Arrays that
    are batched have the batch along axis 0. `in_batched` is like `args`, with `True`
    for each array that is, and `False` for everything else. `out_batched` is the same for
    `out`, and may be a prefix tree. Arguments passed by keyword are passed to the rule by
    position; keyword-only arguments are passed by keyword.

    **Returns:**

    A callable like `fun`. Derivatives are those of `fun`, batched by JAX. If an array
    that `fun` closes over or holds is batched, or a keyword-only argument, the rule is
    not called, and JAX batches `fun`.

    **Raises:**

    `ValueError` if the rule returns another tree, shape or dtype than the function, or if
    an output is not batched as `out_batched` says, naming the path. `TypeError` if it
    does not return a pair.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_custom_vmap
        def solve(matrix, vector):
            return jnp.linalg.solve(matrix, vector)

        @solve.def_vmap
        def rule(axis_size, in_batched, matrix, vector):
            if in_batched == (False, True):  # one factorisation for all of them
                return jnp.linalg.solve(matrix, vector.T).T, True
            return eqx.filter_vmap(
                jnp.linalg.solve, in_axes=tuple(0 if b else None for b in in_batched)
            )(matrix, vector), True

        call = eqx.filter_vmap(solve, in_axes=(None, 0))
        assert call(2 * jnp.eye(2), jnp.ones((3, 2))).tolist() == [[0.5, 0.5]] * 3
        ```
    """
    return applied(CustomVmap, fun)


class CustomVmap(WithRules[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_custom_vmap`][]."""

    _transformation_ = "filter_custom_vmap"

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Attaches the rule, and returns it."""
        require_callable(rule, "def_vmap", "rule")
        self._rules.vmap = rule
        return rule

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fun, rule = self.__wrapped__, self._rules.vmap
        if rule is None:
            return fun(*args, **kwargs)
        placed, named = by_position(fun, args, kwargs)
        jaxpr, structs, template, out_template = trace(
            lambda *args: fun(*args, **named), placed, {}
        )
        data, _ = take_apart(placed)
        where = f"The rule of `filter_custom_vmap` of `{name_of(fun)}`"

        def plain(consts, data):
            return eval_jaxpr(jaxpr.jaxpr, consts, *data)

        def flat_rule(axis_size, in_batched, consts, data):
            consts_batched, data_batched = in_batched
            if any(consts_batched):
                axes = [[0 if b else None for b in group] for group in in_batched]
                mapped = jax.vmap(plain, in_axes=axes, axis_size=axis_size)
                return mapped(consts, data), [True] * len(structs)
            flags, _ = template.fill(data_batched, lambda _: False)
            args, _ = template.fill(as_arrays(data))
            returned = rule(axis_size, flags, *args, **named)
            return _checked_output(where, out_template, structs, axis_size, returned)

        # JAX's `custom_vmap` has no reverse mode; the custom jvp adds it.
        batching = custom_vmap(plain)
        batching.def_vmap(flat_rule)
        flat = filter_custom_jvp(batching)
        flat.def_jvp(lambda primals, tangents: filter_jvp(plain, primals, tangents))
        return out_template.fill(flat(jaxpr.consts, data))


def _checked_output(
    where: str,
    template: Template,
    structs: Sequence[jax.ShapeDtypeStruct],
    axis_size: int,
    returned: Any,
) -> tuple[list[Any], list[bool]]:
    """The arrays that a rule returned, and whether each is batched.

    Without a batch axis, they are like `structs`, which the function returned with the
    static leaves in `template`.

    **Raises:**

    `ValueError` if the rule's output does not match the function's output; `TypeError` if
    it is not a pair.
    """
    out, out_batched = pair_of(returned, where, "(out, out_batched)")
    data, own = take_apart_like(out, template)
    if own != template:
        found = tree_differences("out", template.fill(structs), out, is_array_or_struct)
        raise ValueError(_other_output(where, next(found, None)))
    data = as_arrays(data)
    all_flags = [*spread(out_batched, out, "out_batched", "out", is_leaf=None)]
    for number, flag in all_flags:
        if not isinstance(flag, bool):
            raise ValueError(
                f"{where} must say by `True` or `False` what is batched; "
                f"`{leaf_name(out_batched, number, 'out_batched')}` is {flag!r}."
            )
    flags = [all_flags[i][1] for i in own.places]
    for i, x, struct, flag in zip(own.places, data, structs, flags, strict=True):
        shape = (axis_size, *struct.shape) if flag else struct.shape
        if (x.shape, x.dtype) != (shape, struct.dtype):
            says = f"batched, with {axis_size} along axis 0" if flag else "not batched"
            raise ValueError(
                f"{where} says that `{leaf_name(out, i, 'out')}` is {says}: then it must "
                f"be {struct.dtype}{list(shape)}, since the function returns "
                f"{struct.dtype}{list(struct.shape)}. It is {x.dtype}{list(x.shape)}."
            )
    return data, flags
