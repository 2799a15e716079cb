"""The projections of `MultiheadAttention`, from inputs to heads and heads to output."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._call_path import call_part
from ..._errors import ShapeError
from ..._tree import combine, is_array, is_inexact_array, partition
from ..._tree.nodes import describe_node
from ..._typing import DTypeLike
from .._base.arguments import check_dtype, refusal, wrong_type
from .._base.init import dtype_of
from .._base.inputs import check_input, jax_array, parameter_shape
from .._base.sharding import parts, placed
from .._layers.linear import Linear, mapped

HeadsFunction = Callable[[Any, Any, Any], Any]


def projected(
    attention: Any,
    query: Any,
    key: Any,
    value: Any,
    cache: Any,
    process_heads: HeadsFunction | None,
) -> tuple[Any, ...]:
    """The projected queries, keys and values, each `(length, heads, size)`."""
    query, key, value = _checked_inputs(attention, query, key, value, cache)
    q = _project(attention, "query_proj", query, attention.num_heads)
    k = _project(attention, "key_proj", key, attention.num_kv_heads)
    v = _project(attention, "value_proj", value, attention.num_kv_heads)
    if process_heads is not None:
        q, k, v = _processed(process_heads, q, k, v)
    if attention.rotary is not None:
        offset = 0 if cache is None else cache.length
        rotary = functools.partial(attention.rotary, offset=offset)
        q, k = map(jax.vmap(rotary, in_axes=1, out_axes=1), (q, k))
    return q, k, v


def checked_rotary(layer: str, rotary: Any, size: int) -> Any:
    """Returns `rotary` after validating that it rotates heads of this size."""
    fix = f" Write `rotary=eqx.nn.RotaryPositionalEmbedding({size})`."
    if size % 2:
        fix = " Heads of an odd size cannot be rotated: pass an even `qk_size`."
    if rotary is not None and (not callable(rotary) or isinstance(rotary, type)):
        raise wrong_type(layer, "a layer", "rotary", rotary, fix)
    own = getattr(rotary, "embedding_size", size)
    if own != size:
        given = f"one of size {own}"
        wanted = f"a layer for heads of size {size}"
        raise ValueError(refusal(layer, wanted, "rotary", given, fix))
    return rotary


def _checked_inputs(
    attention: Any, query: Any, key: Any, value: Any, cache: Any
) -> list[Array]:
    inputs = ("query", query), ("key_", key), ("value", value)
    for name, x in inputs:
        projection = getattr(attention, f"{name.rstrip('_')}_proj")
        shape = None
        if isinstance(projection, Linear):
            shape = parameter_shape(projection, "weight", 2)
        check_input(attention, x, (None, None if shape is None else shape[1]), name)
    query, key, value = (jax_array(x) for _, x in inputs)
    # Not `len`, which is an error for a symbolic dimension of `jax.export`.
    if key.shape[0] != value.shape[0]:
        raise ShapeError(
            "MultiheadAttention takes as many rows of `key_` as of `value`; got "
            f"{key.shape[0]} and {value.shape[0]}."
        )
    if key.shape[0] == 0 and cache is None:
        raise ShapeError(
            "MultiheadAttention takes at least one row of `key_` and `value`: with "
            "none, there is nothing to average."
        )
    return [query, key, value]


def _project(attention: Any, name: str, x: Array, num_heads: int) -> Array:
    rows = mapped(getattr(attention, name), x)
    return rows.reshape(x.shape[0], num_heads, rows.shape[-1] // num_heads)


def _processed(process_heads: HeadsFunction, *heads: Array) -> tuple[Any, ...]:
    returned = process_heads(*heads)
    try:
        processed = tuple(returned)
    except TypeError:
        raise ShapeError(
            "`process_heads` must return queries, keys and values; it returned "
            f"{describe_node(returned)}."
        ) from None
    before = [head.shape for head in heads]
    after = [jnp.shape(head) for head in processed]
    if before != after:
        raise ShapeError(
            "`process_heads` must return queries, keys and values of the shapes that it "
            f"was given, {before}; it returned {after}."
        )
    return processed


def joined(attention: Any, heads: Array, out_sharding: PartitionSpec | None) -> Array:
    """The output projection of the joined heads, of shape `(length, output_size)`."""
    projection = attention.output_proj
    heads = heads.reshape(heads.shape[0], heads.shape[1] * heads.shape[2])
    if out_sharding is None:
        return mapped(projection, heads)
    arrays, rest = partition(projection, is_array)

    def project(heads: Any, arrays: Any) -> Any:
        layer = combine(arrays, rest)
        return call_part(projection, (), layer, jax.vmap(layer), heads)

    return placed(project, out_sharding, heads, arrays)


def empty_token(
    attention: Any, name: str, in_size: int, size: int, dtype: DTypeLike | None
) -> Array:
    """Zeros of shape `(1, heads, size)`, with the dtype and sharding of projections."""
    projection = getattr(attention, name)
    arrays = [x for x in jax.tree.leaves(projection) if is_inexact_array(x)]
    if dtype is None:
        dtype = dtype_of(projection)
    check_dtype("`init_cache`", "dtype", dtype)
    heads = attention.num_kv_heads
    if not any(any(parts(x)) for x in arrays):
        return jnp.zeros((1, heads, size), dtype)
    # A projection of zeros has the right sharding. Within `jit` the arrays must be
    # used, or the program would not know their devices. XLA removes the product itself.
    x = jnp.zeros((1, in_size), dtype_of(projection))
    token = _project(attention, name, x, heads)
    return jnp.where(jnp.zeros((), bool), token, 0).astype(dtype)
