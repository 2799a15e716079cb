"""Identities that raise under a transformation of JAX: `nontraceable` and others.

A guard is one primitive applied to all arrays of a tree. It stays in the jaxpr until
that is compiled, so any transformation before then reaches it. It compiles to nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import zero_from_primal

from .._compat.primitives import Tangents, identity
from .._core.flat_call import take_apart
from .._transforms.custom_rules import hold
from .._tree.arrays import with_key, without_key
from .._tree.filters import is_array_like
from .._tree.nodes import path_str
from .error_if import error_if, may_depend

_T = TypeVar("_T")


def nontraceable(x: _T, *, name: str = "nontraceable operation") -> _T:
    """Returns `x`. It can be compiled, but not differentiated or batched.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged.
    - `name`: the name of the operation in the error.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays.

    **Raises:**

    `RuntimeError` if an array of `x` is differentiated, transposed or batched.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def solve(x):
            return 2 * eqx.internal.nontraceable(x, name="solve")

        assert jax.jit(solve)(jnp.asarray(1.0)) == 2
        try:
            jax.grad(solve)(jnp.asarray(1.0))
        except RuntimeError as e:
            assert str(e) == "Detected differentiation of solve"
        ```
    """
    return _guarded(x, functools.partial(nontraceable_p.bind, name=name))


def nondifferentiable(x: _T, *, name: str | None = None, msg: str | None = None) -> _T:
    """Returns `x`. It cannot be differentiated, in forward or reverse mode.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged, and so are
        arrays without a tangent, such as those under `jax.lax.stop_gradient`.
    - `name`: the name of the operation in the error; by default "This operation".
    - `msg`: the whole text of the error, in place of one with `name`.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays.

    **Raises:**

    `RuntimeError` if an array of `x` has a tangent. Without `msg` it names the array, if
    `x` has several.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def f(x, y):
            return x * eqx.internal.nondifferentiable(y, name="`y`")

        assert jax.grad(f, argnums=0)(1.0, jnp.asarray(3.0)) == 3
        try:
            jax.grad(f, argnums=1)(1.0, jnp.asarray(3.0))
        except RuntimeError as e:
            assert "`y` cannot be autodifferentiated" in str(e)
        ```
    """
    operation = name or "This operation"
    text = f"Unexpected tangent. {operation} cannot be autodifferentiated."

    def guard(*arrays, messages):
        return hold(arrays, lambda i: RuntimeError(messages[i]))

    return _guarded(x, guard, text, msg)


def nondifferentiable_backward(
    x: _T, name: str | None = None, msg: str | None = None, symbolic: bool = True
) -> _T:
    """Returns `x`. It can be differentiated in forward mode only.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged.
    - `name`: the name of the operation in the error; by default "This operation".
    - `msg`: the whole text of the error, in place of one with `name`.
    - `symbolic`: whether to raise for any cotangent that is not a symbolic zero.
        Otherwise the values of cotangents are checked when the program runs.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays.

    **Raises:**

    `RuntimeError` if an array of `x` has a cotangent; without `msg` it names the array,
    if `x` has several.
    With `symbolic=False` it is raised as by [`equinox_like.error_if`][].

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def f(x):
            return 2 * eqx.internal.nondifferentiable_backward(x)

        x = jnp.asarray(1.0)
        assert jax.jvp(f, (x,), (x,)) == (2, 2)
        try:
            jax.grad(f)(x)
        except RuntimeError as e:
            assert "Unexpected cotangent" in str(e)
        ```
    """
    operation = name or "This operation"
    text = (
        f"Unexpected cotangent. {operation} cannot be reverse-mode autodifferentiated."
    )
    guard = functools.partial(nondifferentiable_backward_p.bind, symbolic=symbolic)
    return _guarded(x, guard, text, msg)


def nonbatchable(
    x: _T,
    *,
    name: str | None = None,
    msg: str | None = None,
    allow_constant_across_batch: bool = False,
) -> _T:
    """Returns `x`. It cannot be batched by `jax.vmap`.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged, and so are
        arrays without a batch axis.
    - `name`: the name of the operation in the error; by default "This operation".
    - `msg`: the whole text of the error, in place of one with `name`.
    - `allow_constant_across_batch`: whether an array may be batched if all elements of
        the batch are equal. This is checked when the program runs, and the returned
        array has no batch axis. Two NaNs count as equal.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays. It is differentiated as the identity, and its
    tangents may be batched.

    **Raises:**

    `ValueError` if an array of `x` is batched; without `msg` it names the array, if `x`
    has several. With `allow_constant_across_batch=True`, [`equinox_like.error_if`][]
    raises instead, if the elements differ.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def f(x, step):
            return x + eqx.internal.nonbatchable(step, name="`step`")

        assert jax.vmap(f, in_axes=(0, None))(jnp.ones(2), 1).tolist() == [2, 2]
        try:
            jax.vmap(f)(jnp.ones(2), jnp.ones(2))
        except ValueError as e:
            assert "`step` cannot be vmap'd" in str(e)
        ```
    """
    is_allowed = allow_constant_across_batch
    what = "Nonconstant batch" if is_allowed else "Unexpected batch tracer"
    text = f"{what}. {name or 'This operation'} cannot be vmap'd."
    guard = functools.partial(nonbatchable_p.bind, allow_constant=is_allowed)
    return _guarded(x, guard, text, msg)


def materialise_zeros(primal: Any, tangent: Any, allow_struct: bool = False) -> Any:
    """The zeros that a tangent of `None` represents.

    **Arguments:**

    - `primal`: the primal value of the tangent.
    - `tangent`: an array, or `None`.
    - `allow_struct`: whether `primal` may be a `jax.ShapeDtypeStruct`.

    **Returns:**

    `tangent` if it is not `None`, or if `primal` is not an array or a number. Otherwise
    zeros of the shape of `primal`, and of its dtype if that is a floating or complex one;
    else of JAX's dtype `float0`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.internal.materialise_zeros(jnp.ones(2), None).tolist() == [0, 0]
        assert eqx.internal.materialise_zeros("text", None) is None
        ```
    """
    is_struct = allow_struct and isinstance(primal, jax.ShapeDtypeStruct)
    if tangent is not None or not (is_struct or is_array_like(primal)):
        return tangent
    if is_struct:
        primal = jax.eval_shape(lambda: jnp.zeros(primal.shape, primal.dtype))
    return zero_from_primal(primal)


def _guarded(x: Any, guard: Any, text: str = "", msg: str | None = None) -> Any:
    """The tree, with its arrays replaced by `guard(*arrays, messages=messages)`; without
    messages if there is no `text`.

    The message for an array is `msg`, or else `text`, which names it if there are several.
    """
    arrays, rest = take_apart(x, may_depend)
    if not arrays:
        return x
    arrays = [*map(jnp.asarray, arrays)]
    if not text:
        return rest.fill(guard(*arrays))
    messages = (text if msg is None else msg,) * len(arrays)
    if msg is None and len(arrays) > 1:
        items = jtu.tree_leaves_with_path(x)
        paths = (path_str(path, "x") for path, leaf in items if may_depend(leaf))
        messages = tuple(f"{text} ({path})" for path in paths)
    return rest.fill(guard(*arrays, messages=messages))


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, name: str) -> Any:
        raise RuntimeError(f"Detected {what} of {name}")

    return refuse


nontraceable_p = identity(
    "nontraceable",
    jvp=_refusing("differentiation"),
    transpose=_refusing("transposition"),
    batch=_refusing("batching"),
)
"""The primitive of [`equinox_like.internal.nontraceable`][], of any number of arrays."""


def _jvp_of_forward(primals, tangents, messages, symbolic) -> Any:
    bind = nondifferentiable_backward_p.bind
    out = bind(*primals, messages=messages, symbolic=symbolic)
    some = tuple(messages[i] for i in tangents)
    found = bind(*tangents.values(), messages=some, symbolic=symbolic)
    return out, dict(zip(tangents, found, strict=True))


def _check_no_cotangents(cotangents, messages, symbolic) -> Tangents:
    if symbolic:
        raise RuntimeError(messages[min(cotangents)])
    return {i: error_if(x, jnp.any(x != 0), messages[i]) for i, x in cotangents.items()}


nondifferentiable_backward_p = identity(
    "nondifferentiable_backward", jvp=_jvp_of_forward, transpose=_check_no_cotangents
)
"""The primitive of [`equinox_like.internal.nondifferentiable_backward`][]."""


def _check_not_batched(arrays, axes, messages, allow_constant) -> Any:
    batched = [i for i, axis in enumerate(axes) if axis is not None]
    if not allow_constant:
        raise ValueError(messages[batched[0]])
    arrays = list(arrays)
    for i in batched:
        arrays[i] = _element(jnp.moveaxis(arrays[i], axes[i], 0), messages[i])
    # There may be another `jax.vmap` around this one.
    out = nonbatchable_p.bind(*arrays, messages=messages, allow_constant=True)
    return out, [None] * len(out)


def _element(batch: jax.Array, message: str) -> jax.Array:
    """The element that a constant batch repeats; checks at run time that it does."""
    all_data = without_key(batch)
    if not len(batch):
        return with_key(jnp.zeros(all_data.shape[1:], all_data.dtype), batch)
    first = batch[0]
    first_data = without_key(first)[None]  # `jax.numpy_rank_promotion` may refuse less
    differs = all_data != first_data
    if jnp.issubdtype(all_data.dtype, jnp.inexact):
        differs &= ~(jnp.isnan(all_data) & jnp.isnan(first_data))
    return error_if(first, jnp.any(differs), message)


nonbatchable_p = identity("nonbatchable", batch=_check_not_batched)
"""The primitive of [`equinox_like.internal.nonbatchable`][], of any number of arrays."""
