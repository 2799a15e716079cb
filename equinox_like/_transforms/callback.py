"""`filter_pure_callback` and `filter_io_callback`: calling Python from compiled code."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.experimental import io_callback

from .._compat.tracing import at_top_level
from .._core.base import name_of, require_callable
from .._core.flat_call import FlatCall, take_apart
from .._tree.arrays import is_typed_key, struct_of, with_key, without_key
from .._tree.deleted import deleted_named
from .._tree.equal import tree_equal
from .._tree.filters import is_array
from .._tree.match import leaf_name, pair_leaves
from .._tree.nodes import describe_node, path_str


@deleted_named
def filter_pure_callback(
    callback: Callable[..., Any],
    /,
    *args: Any,
    result_shape_dtypes: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`jax.pure_callback` for functions of any pytrees.

    **Arguments:**

    - `callback`: `callback(*args, **kwargs)` runs in Python while the compiled program
        runs. It must be pure: it may be left out, or run more than once. It cannot be
        differentiated.
    - `*args`, `**kwargs`: arrays reach it as `jax.Array`s, typed PRNG keys as their
        numbers (`jax.random.key_data`), and everything else as it is.
    - `result_shape_dtypes`: the form of what `callback` returns: a tree with a
        `jax.ShapeDtypeStruct`, or anything else with a `shape` and a `dtype`, for each
        array. For a typed key it may return the key, or its numbers. All other leaves are
        the values that it must return there.
    - `sharding`, `vmap_method`: as for `jax.pure_callback`. Without a `vmap_method` it
        cannot be used under `vmap`.
    - `vectorized`: removed; use `vmap_method`.

    **Returns:**

    What `callback` returned.

    **Raises:**

    `TypeError` if `result_shape_dtypes` is not given, or is only a shape or a dtype;
    `ValueError` if it has a dtype of 64 bits without `jax_enable_x64`. When it runs,
    `jax.errors.JaxRuntimeError` if what `callback` returns does not match
    `result_shape_dtypes`; the message names what differs.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp
        import numpy as np

        def on_host(x, name):
            return np.asarray(x) + 1, name

        @eqx.filter_jit
        def f(x):
            return eqx.filter_pure_callback(
                on_host, x, "first", result_shape_dtypes=(x, "first")
            )

        out, name = f(jnp.ones(2))
        assert out.tolist() == [2, 2] and name == "first"
        ```
    """
    if vectorized is not None:
        raise TypeError(
            "JAX no longer has `vectorized` for callbacks: use `vmap_method`, for example "
            "`vmap_method='expand_dims'` for a callback that takes a batch, "
            "`'sequential'` for one that does not."
        )
    described = jtu.tree_leaves(result_shape_dtypes)
    if described and all(
        type(x) is int or isinstance(x, type | np.dtype) for x in described
    ):
        # JAX leaves out a pure callback that returns no array.
        raise TypeError(
            f"`result_shape_dtypes` describes no array: it is {result_shape_dtypes!r}. "
            "Pass `jax.ShapeDtypeStruct(shape, dtype)` for each array."
        )
    bind = functools.partial(
        jax.pure_callback, sharding=sharding, vmap_method=vmap_method
    )
    name = "filter_pure_callback"
    return _call_back(name, bind, callback, args, kwargs, result_shape_dtypes)


@deleted_named
def filter_io_callback(
    callback: Callable[..., Any],
    /,
    *args: Any,
    result_shape_dtypes: Any,
    sharding: Any = None,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """`jax.experimental.io_callback` for functions of any pytrees.

    Like [`equinox_like.filter_pure_callback`][] for callbacks with side effects, such as
    writing to a file: each runs exactly as often as the program says. Call
    `jax.effects_barrier()` to wait for all of them.

    **Arguments:**

    - `callback`, `*args`, `**kwargs`, `result_shape_dtypes`, `sharding`: as for
        `filter_pure_callback`.
    - `ordered`: whether callbacks run in the order of the program. Ordered ones cannot be
        used under `vmap`.

    **Returns:**

    What `callback` returned.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        lines = []

        @eqx.filter_jit
        def f(x):
            eqx.filter_io_callback(lambda name, x: lines.append((name, float(x))), "x", x,
                                   result_shape_dtypes=None, ordered=True)

        f(jnp.asarray(1.0))
        jax.effects_barrier()
        assert lines == [("x", 1.0)]
        ```
    """
    bind = functools.partial(io_callback, sharding=sharding, ordered=ordered)
    name = "filter_io_callback"
    return _call_back(name, bind, callback, args, kwargs, result_shape_dtypes)


def _call_back(transformation, bind, callback, args, kwargs, described) -> Any:
    """What the callback returns, for `bind(function, structs, data)` of JAX."""
    require_callable(callback, transformation)
    data, call = FlatCall.of(callback, args, kwargs)
    data = [*map(without_key, data)]
    structs, result = take_apart(
        described, lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
    )
    structs = [*map(struct_of, structs)]
    for i, x in enumerate(structs):
        if jax.dtypes.canonicalize_dtype(x.dtype, True) != x.dtype:
            raise ValueError(
                f"`{leaf_name(result.alone(structs), i, 'result_shape_dtypes')}` has the "
                f"dtype {x.dtype}, which JAX has under `jax_enable_x64` only."
            )
    where = f"`{transformation}` of `{name_of(callback)}`"
    ndims = [x.ndim for x in data]

    def on_host(data: list[Any]) -> list[Any]:
        # How many axes `vmap` has added in front, by this `vmap_method`.
        added = max((x.ndim - n for x, n in zip(data, ndims, strict=True)), default=0)
        out = call.run(data)
        message = f"{where} did not return the structure of `result_shape_dtypes`."
        pairs = pair_leaves(result.fill(structs), out, message, "result")
        for path, wanted, leaf in pairs:
            _check(where, leaf, wanted, path_str(path, "result"), added)
        return [without_key(pairs[i][2]) for i in result.places]

    bound = functools.partial(bind, on_host, [*map(_passed, structs)])
    # Outside `jax.jit`, JAX would keep the callback, and what it refers to, forever.
    run = jax.jit(bound) if at_top_level() else bound
    return result.fill(map(with_key, run(data), structs))


def _check(where: str, leaf: Any, wanted: Any, name: str, added: int) -> None:
    if is_typed_key(wanted) and is_array(leaf) and not is_typed_key(leaf):
        wanted = _passed(wanted)
    found = there = ""
    if not isinstance(wanted, jax.ShapeDtypeStruct):
        if not tree_equal(leaf, wanted):
            found, there = repr(leaf), f"{wanted!r} there."
    elif not is_array(leaf):
        found = describe_node(leaf)
        there = "an array there. Return it as `np.asarray(...)`."
    elif jax.dtypes.canonicalize_dtype(leaf.dtype, True) != wanted.dtype:
        found, there = f"an array of dtype {leaf.dtype}", f"{wanted.dtype} there."
    elif leaf.shape[added:] != wanted.shape:
        of_each = ", for each element of the batch" if added else ""
        found = f"an array of shape {leaf.shape}"
        there = f"{wanted.shape} there{of_each}."
    if found:
        raise ValueError(
            f"{where} returned {found} as `{name}`, but `result_shape_dtypes` has {there}"
        )


def _passed(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What JAX passes from or to a callback: for typed keys, their numbers."""
    # Abstractly, because a callback of a running program must not run another one.
    return jax.eval_shape(without_key, struct) if is_typed_key(struct) else struct
