"""`filter_custom_jvp`: forward-mode derivatives given by the user; helpers for custom
rules.

All arrays are passed to JAX as inputs and never closed over, because JAX may run a rule
long after the call. The differentiable arrays come first. All other arrays are *held*:
they are inputs too, but it is an error if they have a tangent.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .._call_path import call_rebuilt
from .._compat.primitives import batch_size, identity
from .._compat.tracing import Tracer
from .._core.base import Transformed, frames_hidden, name_of, require_callable
from .._core.context import in_context_of_now
from .._core.difference import ARRAY_TYPE, STATIC_VALUE, tree_differences
from .._core.flat_call import as_arrays, pair_of, take_apart, unpack
from .._errors import warn
from .._module.fields import field
from .._tree.arrays import describe_type, reusable
from .._tree.filters import (
    is_array,
    is_array_or_struct,
    is_inexact_array,
    is_inexact_array_like,
    is_none,
    is_number,
)
from .._tree.match import leaf_name
from .jvp_vjp import check_only_arrays, is_zero, shape_and_dtype, watch

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


class WithRules(Transformed[_P, _T], Generic[_P, _T]):
    """A function with rules by the user."""

    _rules: Rules = field(static=True)

    def __init__(self, fun: Any):
        super().__init__(fun)
        self._rules = Rules()


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
    return CustomJVP(fn)


class CustomJVP(WithRules[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_custom_jvp`][]."""

    _transformation_ = "filter_custom_jvp"

    def __init__(self, fun: Any):
        super().__init__(fun)

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
            check_output(out, flat, (data, held), rule_name, type_of)
            return batched_in_front((out, _output_tangent(out, tangent_out, rule_name)))

        # `flat_rule` refers to the plain `flat`. If it referred to `flat_with_rule`,
        # the two would form a reference cycle.
        flat_with_rule = jax.custom_jvp(flat)
        flat_with_rule.defjvp(in_context_of_now(flat_rule), symbolic_zeros=True)
        message = _KEYWORD_TANGENT.format(name=name)
        return flat_with_rule(data, hold(held, lambda _: ValueError(message)))


_KEYWORD_TANGENT = (
    "`filter_custom_jvp` of `{name}` received a keyword tangent: arguments passed by "
    "keyword, and the arrays of the function itself, cannot be differentiated. Pass them "
    "by position."
)


def _output_tangent(out: Any, tangent_out: Any, rule: str) -> Any:
    """The tangent of `out` for JAX, with symbolic zeros."""
    leaves, treedef = jtu.tree_flatten(out, is_none)
    tangents, tangent_treedef = jtu.tree_flatten(tangent_out, is_none)
    if treedef != tangent_treedef:
        raise ValueError(
            f"{rule} must return a tangent with the structure of the output, with `None` "
            f"for zero. The output has\n    {treedef}\nand the tangent\n    "
            f"{tangent_treedef}"
        )
    # JAX's own zeros, of `zero_from_primal`, may stand in place of `None`.
    tangents = [None if type(t) is SymbolicZero else t for t in tangents]
    for i, (x, t) in enumerate(zip(leaves, tangents, strict=True)):
        if t is None or x is None:
            continue
        shape, dtype = shape_and_dtype(x)
        given_shape, given_dtype = shape_and_dtype(t)
        tangent_dtype = dtype if is_inexact_array_like(x) else jax.dtypes.float0
        if (shape, tangent_dtype) != (given_shape, given_dtype):
            raise TypeError(
                f"{rule} must produce a tangent of the shape and dtype of the output, or "
                "`None` if the output is not floating or complex, but "
                f"`{leaf_name(out, i, 'output', is_none)}` has shape {shape}, dtype "
                f"{dtype}, and its tangent has shape {given_shape}, dtype {given_dtype}."
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
    data, template = take_apart(out, _may_be_batched)
    given = [reusable(x) for x in jtu.tree_leaves(inputs) if is_array(x)]
    if any(isinstance(x, Tracer) for x in [*data, *given]):
        data = _in_front.bind(*data, *given)[: len(data)]
    return template.fill(data)


def _may_be_batched(x: Any) -> bool:
    return is_array(x) and x.dtype != jax.dtypes.float0


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


def type_of(x: Any) -> str:
    shape, dtype = shape_and_dtype(x)
    return f"an array {describe_type(dtype, shape)}"
