"""`filter_invertible`: a chain of invertible blocks whose gradient needs constant memory.

The backward pass recomputes each value between the blocks from the next one.

Gomez et al., "The Reversible Residual Network", 2017, https://arxiv.org/abs/1707.04585

There is one rule for a whole chain, because a rule for each block would keep the values
between them. If `vmap` is applied directly, the batch is moved into the blocks: otherwise
each element of the batch would have gradients of its own, kept for all blocks, before they
are summed. `custom_vmap` has no reverse mode, so it is called only where a `vmap` uses its
rule immediately (`_compat/tracing.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.custom_batching import custom_vmap

from .._call_path import call_part
from .._compat.errors import is_forward_mode
from .._compat.tracing import Tracer, mapped_at_once
from .._core.base import frames_hidden, name_of, require_callable
from .._core.difference import tree_differences
from .._core.flat_call import take_apart
from .._module.fields import field
from .._tree.arrays import is_typed_key, reusable
from .._tree.filters import is_array, is_inexact_array
from .._tree.nodes import children_of, describe_node, path_str
from .._tree.partitioning import combine, filter, map_arrays, partition
from .._typing import NOT_GIVEN
from .arguments import WithOptions, applied
from .custom_rules import filter_custom_vjp, hold
from .inverse import check_inverse, derived_inverse
from .jvp_vjp import filter_vjp
from .vmap import filter_vmap, if_array

_B = TypeVar("_B")
_X = TypeVar("_X")


@overload
def filter_invertible(
    fun: Callable[[_B, _X], _X],
    *,
    inverse: Callable[[_B, _X], _X] | None = None,
    check: bool = False,
) -> "Invertible[_B, _X]": ...
@overload
def filter_invertible(
    *, inverse: Callable[[Any, Any], Any] | None = None, check: bool = False
) -> Callable[[Callable[[_B, _X], _X]], "Invertible[_B, _X]"]: ...
def filter_invertible(
    fun: Any = NOT_GIVEN,
    *,
    inverse: Callable[[Any, Any], Any] | None = None,
    check: bool = False,
) -> Any:
    """A chain of invertible blocks, whose gradient needs constant memory.

    Reverse mode needs the input of each block. It is usually stored. Here it is
    computed from the output, so the memory does not grow with the number of blocks. The
    cost is one more evaluation of each block.

    **Arguments:**

    - `fun`: a function `fun(block, x) -> y` that can be solved for `x`. `x` is any
        pytree, and `y` has its structure, shapes and dtypes. Put the `vmap` over a batch
        into `fun`, or directly around the chain: with a `jit` between them, or a named
        axis, the gradients of the blocks are stored for each element of the batch.
    - `inverse`: `inverse(block, y) -> x`. Without it the inverse is derived from `fun`,
        if that consists of steps such as `y1 = x1 + f(x2)`, whatever `f` is. Sums,
        products of floats, many functions of one number, reshaping, splitting and joining
        can be undone.
    - `check`: whether to compare `inverse(block, fun(block, x))` with `x` in each
        block, in every call; for tests.

    **Returns:**

    `g(blocks, x)`, which applies `fun` for each of the blocks. The blocks are a list or
    tuple, or one Module whose arrays hold all blocks along their first axis, as
    `filter_vmap` makes it. Gradients flow to `x` and to every floating or complex array
    of the blocks, but not to arrays of `fun` itself. Because of rounding they differ from
    the gradients with stored values, by about 1e-6 in float32. Forward mode is not
    supported.

    **Raises:**

    [`equinox_like.NotInvertibleError`][], a `ValueError`: by the gradient if no inverse
    can be derived, naming the step that stops it; or if `check` finds a wrong inverse,
    with the largest error. Within `jax.jit`, unlike `filter_jit`, the latter is an error
    of JAX with the same text. `TypeError` in forward mode. `ValueError` if `y` is not
    like `x`, or if the arrays of stacked blocks differ in the size of the first axis.
    `RuntimeError` if an array of `fun` itself is differentiated, and JAX's
    `UnexpectedTracerError` if `fun` closes over it.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        @eqx.filter_invertible
        def chain(block, x):
            x1, x2 = x
            y1 = x1 + jnp.tanh(block["f"] @ x2)
            return y1, x2 + jnp.tanh(block["g"] @ y1)

        blocks = [{"f": jnp.eye(3), "g": jnp.eye(3)}] * 10
        x = jnp.ones(3), jnp.zeros(3)
        grads = jax.grad(lambda blocks: chain(blocks, x)[0].sum())(blocks)
        assert grads[0]["f"].shape == (3, 3)
        ```
    """
    if inverse is not None:
        require_callable(inverse, "filter_invertible(inverse=...)")
    return applied(Invertible, fun, _inverse=inverse, _check=check)


class Invertible(WithOptions[..., _X], Generic[_B, _X]):
    """The result of [`equinox_like.filter_invertible`][]."""

    _transformation_ = "filter_invertible"

    _inverse: Callable[[Any, Any], Any] | None = field(static=True)
    _check: bool = field(static=True)

    @frames_hidden
    def __call__(self, blocks: _B | Sequence[_B], x: _X, /) -> _X:
        fun = self.__wrapped__
        arrays, template = take_apart(fun)
        if arrays:
            message = (
                f"The arrays of `{name_of(fun)}` itself, which `filter_invertible` wraps, "
                "cannot be autodifferentiated. Pass them within each block, or use "
                "`jax.lax.stop_gradient`."
            )
            fun = template.fill(hold(arrays, lambda _: RuntimeError(message)))
        if self._check:
            x = _verified(fun, self._inverse, blocks, x)
        try:
            return _run(fun, self._inverse, blocks, x)
        except TypeError as e:
            if not is_forward_mode(e):
                raise
            raise TypeError(
                f"`filter_invertible` of `{name_of(fun)}` has no forward-mode autodiff "
                "(`jax.jvp`, `jax.jacfwd`, `jax.hessian`). Apply the blocks in a loop; "
                "for `nn.ReversibleSequential`, pass `memory_efficient=False`."
            ) from None


def _run(fun: Any, inverse: Any, blocks: Any, x: Any) -> Any:
    """Applies the chain; under `vmap`, as one chain of batched steps.

    Otherwise JAX would compute the gradients of the blocks for each batch element, and
    keep the gradients of all stacked blocks until it sums them.
    """
    data, template = take_apart((blocks, x))

    def per_example(data):
        rebuilt = template.fill(data)
        out = call_part((blocks, x), (), rebuilt, _chain, rebuilt, fun, inverse)
        return take_apart(out)[0]

    if not mapped_at_once(data) or _has_arrays(fun, inverse, per_example, data):
        return _chain((blocks, x), fun, inverse)

    @custom_vmap
    def flat(data):
        # Only traced for its output type, which is the type of `x`.
        return take_apart(template.fill(data)[1])[0]

    @flat.def_vmap
    def rule(size, in_batched, data):
        (flags,) = in_batched
        batched = template.fill(flags, lambda _: False)
        out = _run_batch(fun, inverse, size, template.fill(data), batched)
        leaves = take_apart(out)[0]
        return leaves, [True] * len(leaves)

    return take_apart(x)[1].fill(flat(data))


def _run_batch(fun: Any, inverse: Any, size: int, arguments: Any, batched: Any) -> Any:
    """Applies the chain with batched steps; axis 0 of `batched` arrays is the batch."""
    blocks, x = arguments
    of_blocks, of_x = batched

    def of_batch(fun):
        def call(block, x):
            axes = jtu.tree_map(lambda b: 0 if b else None, block["batched"])
            mapped = filter_vmap(fun, in_axes=(axes, if_array(0)), axis_size=size)
            return mapped(block["block"], x)

        return call

    if isinstance(blocks, list | tuple):
        blocks = [
            {"block": block, "batched": b}
            for block, b in zip(blocks, of_blocks, strict=True)
        ]
    else:
        rows_first = jtu.tree_map(
            lambda a, b: reusable(jnp.moveaxis(a, 0, 1)) if b else a, blocks, of_blocks
        )
        blocks = {"block": rows_first, "batched": of_blocks}
    x = jtu.tree_map(
        lambda a, b: (
            a if b or not is_array(a) else jnp.broadcast_to(a, (size, *a.shape))
        ),
        x,
        of_x,
    )
    undo = inverse or derived_inverse(fun)
    return _run(of_batch(fun), of_batch(undo), blocks, x)


def _has_arrays(fun: Any, inverse: Any, traced: Any, data: Any) -> bool:
    """Whether the functions hold arrays or close over tracers, which JAX must map."""
    if any(map(is_array, jtu.tree_leaves((fun, inverse)))):
        return True
    return any(isinstance(c, Tracer) for c in jax.make_jaxpr(traced)(data).consts)


@filter_custom_vjp
def _chain(arguments: Any, fun: Any, inverse: Any) -> Any:
    blocks, x = arguments

    def step(x, block):
        return _like_input(fun(block, x), x, fun), None

    return _scan(step, x, blocks)[0]


@_chain.def_fwd
def _forward(perturbed: Any, arguments: Any, fun: Any, inverse: Any) -> Any:
    y = _chain(arguments, fun, inverse)
    return y, y


# `_forward` returns the output of `_chain`, so it need not be traced again to check it.
_chain._rules.may_change_output = False


@_chain.def_bwd
def _backward(y, cotangent, perturbed, arguments, fun, inverse) -> Any:
    blocks, _ = arguments
    undo = inverse or derived_inverse(fun)

    def step(carry, block):
        y, cotangent = carry
        x = _like_input(undo(_again(block), y), y, undo)
        _, pull_back = filter_vjp(fun, _again(block), x)
        gradient, cotangent = pull_back(cotangent)
        return (x, cotangent), gradient

    zeros = jtu.tree_map(jnp.zeros_like, filter(y, is_inexact_array))
    (_, cotangent), gradients = _scan(
        step, (y, combine(cotangent, zeros)), blocks, reverse=True
    )
    return gradients, cotangent


def _again(block: Any) -> Any:
    """A block that is evaluated once more, with the same PRNG keys."""
    return jtu.tree_map(reusable, block)


def _scan(step: Any, carry: Any, blocks: Any, reverse: bool = False) -> tuple[Any, Any]:
    """`jax.lax.scan` for any pytrees, over a sequence of blocks or stacked blocks."""
    if isinstance(blocks, list | tuple):
        outs: list[Any] = [None] * len(blocks)
        for i in reversed(range(len(blocks))) if reverse else range(len(blocks)):
            carry, outs[i] = step(carry, blocks[i])
            if reverse:
                x, cotangent = carry
                carry = _after(x, (cotangent, outs[i])), cotangent
        # A list, a tuple, or a named tuple.
        return carry, children_of(blocks)[1].unflatten(outs)
    arrays, others = partition(blocks, is_array)
    _require_stacked(arrays)
    held, rest = partition(carry, is_array)

    def flat_step(held, arrays):
        block = combine(arrays, others)
        carry, out = call_part(blocks, (), block, step, combine(held, rest), block)
        return filter(carry, is_array), out

    held, outs = jax.lax.scan(flat_step, held, arrays, reverse=reverse)
    return combine(held, rest), outs


def _after(x: Any, done: Any) -> Any:
    """`x`, with a data dependency on `done`, so that XLA computes `done` first.

    XLA may otherwise postpone gradients, and keep all values they are computed from.
    `jax.lax.optimization_barrier` does not prevent this: on CPU, jax 0.10 removes it
    before it schedules. So a zero computed from `done` is added to `x`.
    """
    zero = jnp.zeros(())
    for a in jtu.tree_leaves(filter(done, is_inexact_array)):
        if a.size:
            # An array sharded over explicit axes cannot be indexed here.
            is_split = any(jax.typeof(a).sharding.spec)
            first = jnp.sum(a) if is_split else a[(0,) * a.ndim]
            first = jnp.real(first).astype(zero.dtype)
            zero = zero + 0 * jnp.nan_to_num(first)
    return jtu.tree_map(
        lambda a: a + zero.astype(a.dtype) if is_inexact_array(a) else a, x
    )


def _require_stacked(arrays: Any) -> None:
    alike: dict[tuple[int, ...], str] = {}  # by the size of the first axis, if any
    for path, x in jtu.tree_flatten_with_path(arrays)[0]:
        alike.setdefault(
            x.shape[:1], f"`{path_str(path, 'blocks')}` of shape {x.shape}"
        )
    if len(alike) != 1 or () in alike:
        raise ValueError(
            "The arrays of stacked blocks must have a first axis of the same size, the "
            f"number of blocks; there are {', '.join(alike.values()) or 'no arrays'}. "
            "Stack blocks with `filter_vmap`, or pass a list of them."
        )


def _like_input(y: Any, x: Any, fun: Any) -> Any:
    """Returns `y`; raises if it differs from `x` in more than the values of arrays."""
    for found in tree_differences("x", x, y, is_array, describe_node):
        text = (
            f"`{name_of(fun)}` must return a tree like its second argument, except for "
            f"the values of arrays: {found} {found.fix}"
        )
        raise ValueError(text.rstrip())
    return jtu.tree_map(_without_weak_type, x, y)


def _without_weak_type(old: Any, new: Any) -> Any:
    """`new`, or `old` if that is static."""
    if is_array(old):
        return new if is_typed_key(new) else new.astype(old.dtype)
    return old


def _verified(fun: Any, inverse: Any, blocks: Any, x: Any) -> Any:
    """Returns `x`, with a runtime check of the inverse."""
    undo = inverse or derived_inverse(fun)
    held, start = map_arrays(jax.lax.stop_gradient, (blocks, x))

    def step(x, block):
        y = _like_input(fun(block, x), x, fun)
        errors = [jnp.zeros(2)]
        rebuilt = jtu.tree_leaves(filter(undo(block, y), is_inexact_array))
        for old, new in zip(
            jtu.tree_leaves(filter(x, is_inexact_array)), rebuilt, strict=True
        ):
            # The relative error, in units of the error that rounding may cause, and
            # the absolute error.
            unit = np.sqrt(jnp.finfo(old.dtype).eps) * (1 + jnp.abs(old))
            error = jnp.abs(old - new)
            largest = [jnp.max(e, initial=0.0) for e in (error / unit, error)]
            errors.append(jnp.stack(largest).astype(float))
        return y, jnp.max(jnp.stack(errors), 0)

    _, errors = _scan(step, start, held)
    leaves = jtu.tree_leaves(errors)
    if not leaves:
        return x
    largest = jnp.max(jnp.vstack(leaves), 0)
    return check_inverse(largest, x, name_of(fun))
