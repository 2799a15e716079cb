"""The context behind `precision`, the dtype in which layers compute, and casts of trees.

The decorator `computes` on the call of a layer applies the context to it.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._call_path import add_note_on_path, call_part, leave_out_this_frame
from ..._compat.tracing import scope_type
from ..._core.context import Context
from ..._tree import is_array
from ..._tree.deleted import raise_if_deleted_here
from ..._typing import DTypeLike
from .checks import check_dtype, jax_array
from .state import explain_wrong_call

_T = TypeVar("_T")
_Tree = TypeVar("_Tree")

compute_dtype: Final[Context[Any]] = Context(None, name="precision")


def computes(
    name: str | None, casts: Literal["all", "layer", "nothing"] = "all"
) -> Callable[[_T], _T]:
    """Decorates the call of a layer: a scope of this name, in the context's dtype.

    Without a name, neither of these. `casts`: what is cast, all arguments or only the layer
    itself. Errors name the layer, and those of wrong calls say what to write.
    """

    def decorate(call):
        scope: Any = name and scope_type(name)
        own_dtype, is_call = casts == "nothing", call.__name__ == "__call__"

        # With `self` among `args`, which takes half the time: 0.1 us for each call.
        @functools.wraps(call)
        def call_layer(*args, **kwargs):
            try:
                if name is None:
                    return call(*args, **kwargs)
                with scope(name):
                    dtype = None if own_dtype else compute_dtype.value
                    if dtype is None:
                        return call(*args, **kwargs)
                    layer, rest, named = cast(args[0], dtype), args[1:], kwargs
                    if casts == "all":
                        rest, named = cast((rest, named), dtype)
                    return call_part(args[0], (), layer, call, layer, *rest, **named)
            except Exception as error:
                add_note_on_path(error)
                leave_out_this_frame(error)
                raise_if_deleted_here(error, call, args, kwargs)
                if is_call and args and isinstance(error, TypeError):
                    explain_wrong_call(error, args[0], args[1:], kwargs)
                raise

        return call_layer

    return decorate  # pyright: ignore[reportReturnType]


def cast_to_precision(tree: _Tree) -> _Tree:
    """Casts to the dtype of [`equinox_like.nn.precision`][]: for layers of your own.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    `tree` with its real floating arrays in the dtype of the innermost
    [`equinox_like.nn.precision`][], except those in a [`equinox_like.nn.State`][],
    [`equinox_like.nn.StateIndex`][] or [`equinox_like.nn.KVCache`][]. Without a
    context, `tree` itself.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Scale(eqx.Module):
            weight: jax.Array

            def __call__(self, x):
                weight, x = eqx.nn.cast_to_precision((self.weight, x))
                return weight * x

        with eqx.nn.precision("bfloat16"):
            assert Scale(jnp.ones(3))(jnp.ones(3)).dtype == jnp.bfloat16
        ```
    """
    return cast(tree, compute_dtype.value)


def cast(tree: _Tree, dtype: Any, keep: tuple[type, ...] = ()) -> _Tree:
    """`tree` with its real floating arrays in `dtype`."""
    if dtype is None:
        return tree

    def each(node: Any) -> Any:
        if not isinstance(node, keep) and hasattr(type(node), "_in_dtype"):
            return node._in_dtype(dtype)
        return to_dtype(node, dtype) if is_real(node) and node.dtype != dtype else node

    def is_cast_as_one(node: Any) -> bool:
        return isinstance(node, keep) or hasattr(type(node), "_in_dtype")

    return jax.tree.map(each, tree, is_leaf=is_cast_as_one)


def to_dtype(x: Any, dtype: Any) -> Any:
    """`x.astype(dtype)`, which saturates if the dtype is a float of at most 8 bits.

    Such a float may have no infinity. One of 16 bits has: it shows a loss scale, or the
    user, that a number was too large.
    """
    is_small = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8
    return saturated(x, dtype) if is_small else x.astype(dtype)


def saturated(x: Any, dtype: Any) -> Any:
    """`x` in another dtype, in which it is stored. Numbers beyond the range of a narrower
    float become its largest or least one, and NaN stays NaN."""
    if not (is_real(x) and jnp.issubdtype(dtype, jnp.floating)):
        return x.astype(dtype)
    low, high = float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)
    if high >= float(jnp.finfo(x.dtype).max):
        return x.astype(dtype)
    # The largest number of float16 is not one of bfloat16.
    wide = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
    return jnp.clip(wide, low, high).astype(dtype)


def is_real(node: Any) -> bool:
    return is_array(node) and jnp.issubdtype(node.dtype, jnp.floating)


def is_half(*nodes: Any) -> bool:
    """Whether these are arrays that promote to a real dtype of less than 32 bits."""
    smallest = 4
    for x in nodes:
        if not is_array(x):
            return False
        smallest = min(smallest, x.dtype.itemsize)
    if smallest == 4:
        return False  # arrays of 4 bytes promote to none of fewer
    dtype = jnp.result_type(*nodes)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def accumulation_dtype(*arrays: Array) -> np.dtype:
    """The dtype to which the arrays promote, of at least single precision."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*(x.dtype for x in arrays), jnp.float32)


def in_float32(fun: Callable[..., Array], *arrays: Any) -> Array:
    """Computes `fun(*arrays)` in float32 if the arrays are in half precision: for layers of
    your own.

    The gradient of a parameter that is broadcast, such as a bias or a scale, is a sum over
    all positions and examples. JAX sums in the dtype in which the parameter is
    broadcast, and in bfloat16 a sum of ones stops at 256. Here it is summed in float32.

    **Arguments:**

    - `fun`: a function of arrays, such as `jnp.add`, that returns an array.
    - `*arrays`: its arguments, arrays or numbers.

    **Returns:**

    What `fun` returns. If the arrays promote to a real dtype of less than 32 bits, `fun`
    gets them in float32, and its result is cast to that dtype.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Scale(eqx.Module):
            weight: jax.Array

            def __call__(self, x):
                return eqx.nn.in_float32(jnp.multiply, self.weight, x)

        scale, x = Scale(jnp.ones(3, jnp.bfloat16)), jnp.ones((1000, 3), jnp.bfloat16)
        grads = eqx.filter_grad(lambda scale: jax.vmap(scale)(x).sum())(scale)
        assert grads.weight.tolist() == [1000, 1000, 1000]
        ```
    """
    arrays = tuple(map(jax_array, arrays))
    if not is_half(*arrays):
        return fun(*arrays)
    dtype = jnp.result_type(*arrays)
    return to_dtype(fun(*cast(arrays, jnp.float32)), dtype)


def summed_in_float32(
    gather: Callable[[Array, Any], Array],
) -> Callable[[Array, Any], Array]:
    """`gather(table, index)`, whose gradient is summed in float32 at least.

    A row that is used often gets many gradients. In bfloat16, a sum of ones stops at 256.
    """
    rule = jax.custom_jvp(gather)

    @rule.defjvp
    def _(primals, tangents):
        table, index = primals
        tangent = gather(tangents[0].astype(jnp.float32), index)
        return rule(table, index), tangent.astype(table.dtype)

    @functools.wraps(gather)
    def call(table, index):
        return (rule if is_half(table) else gather)(table, index)

    return call


def product_with_rows(x: Array, rows: Array) -> Array:
    """`x @ rows.T`, in float32 if the arrays are in half precision."""
    return (_half_product if is_half(x, rows) else _product)(x, rows)


_product = functools.partial(jnp.einsum, "...d,vd->...v")


@jax.custom_jvp
def _half_product(x: Array, rows: Array) -> Array:
    # In half precision the differences of large logits would be lost, or infinite.
    return _product(x, rows, preferred_element_type=jnp.float32)


@_half_product.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # The products of the backward pass take half precision, too, for their speed.
    (x, rows), (dx, d_rows) = primals, tangents
    tangent = _product(dx, rows) + _product(x, d_rows)
    return _half_product(x, rows), tangent.astype(jnp.float32)


_SHORT = {"half": "float16", "f16": "float16", "bf16": "bfloat16"}
_SHORT |= {"f32": "float32", "f64": "float64"}


def floating(taker: str, name: str, dtype: DTypeLike | None) -> Any:
    """`dtype`, which may have a short name, as a NumPy dtype, after validating that it is
    real floating or `None`."""
    if dtype is None:
        return None
    if isinstance(dtype, str):
        dtype = _SHORT.get(dtype, dtype)
    check_dtype(taker, name, dtype, jnp.floating)
    return np.dtype(dtype)
