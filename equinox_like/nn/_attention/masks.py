"""Attention masks, and functions that combine them.

A mask is a boolean array of shape `(queries, keys)` or `(heads, queries, keys)`. It is
`True` where the query attends to the key.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..._errors import ShapeError
from ..._tree import is_array
from ..._typing import ArrayLike
from .._base.checks import as_size, check_integer, check_scalar, wrong_type


def causal_mask(
    query_length: int,
    key_length: int | None = None,
    *,
    offset: ArrayLike = 0,
    window: int | None = None,
) -> Bool[Array, "queries keys"]:
    """A mask by which no query attends to a later key.

    Query `i` attends to key `j` if `j <= i + offset`. With a `window`, it must also hold
    that `j > i + offset - window`.

    **Arguments:**

    - `query_length`: the number of queries, which may be a symbolic dimension of
        `jax.export`.
    - `key_length`: the number of keys; by default that of the queries.
    - `offset`: the position of the first query among the keys: an integer, which may be
        traced.
    - `window`: the largest number of keys that a query attends to; not limited by
        default.

    **Returns:**

    A boolean array of shape `(query_length, key_length)`.

    **Raises:**

    `ValueError` if a length is negative or not an integer, or if `window < 1`.
    [`equinox_like.ShapeError`][] if `offset` is not a scalar, `TypeError` if it is not an
    integer.

    !!! example

        ```python
        import equinox_like as eqx

        assert eqx.nn.causal_mask(2, 3).tolist() == [
            [True, False, False],
            [True, True, False],
        ]
        ```
    """
    queries = _length("causal_mask", "query_length", query_length)
    key_length = queries if key_length is None else key_length
    keys = _length("causal_mask", "key_length", key_length)
    check_window("causal_mask", window)
    _check_one_integer("causal_mask", "offset", offset, "causal_mask(8, offset=n)")
    rows = jnp.arange(queries, dtype=jnp.int32) + jnp.asarray(offset, jnp.int32)
    rows = rows[:, None]
    columns = jnp.arange(keys, dtype=jnp.int32)[None, :]
    mask = columns <= rows
    return mask if window is None else mask & (columns > rows - window)


def padding_mask(
    length: ArrayLike, key_length: int, query_length: int | None = None
) -> Bool[Array, "queries keys"]:
    """A mask by which no query attends to the padding after the first `length` keys.

    **Arguments:**

    - `length`: the number of keys that are not padding: an integer, which may be traced.
        For a batch, map this function:
        `jax.vmap(lambda n: eqx.nn.padding_mask(n, 8))(lengths)`.
    - `key_length`: the number of keys with padding.
    - `query_length`: the number of queries; by default that of the keys. All rows are
        equal, even those of padding.

    **Returns:**

    A boolean array of shape `(query_length, key_length)`.

    **Raises:**

    `ValueError` if `key_length` or `query_length` is negative or not an integer.
    [`equinox_like.ShapeError`][] if `length` is not a scalar, `TypeError` if it is not an
    integer.

    !!! example

        ```python
        import equinox_like as eqx

        assert eqx.nn.padding_mask(2, 3, query_length=1).tolist() == [[True, True, False]]
        ```
    """
    keys = _length("padding_mask", "key_length", key_length)
    query_length = keys if query_length is None else query_length
    queries = _length("padding_mask", "query_length", query_length)
    _check_one_integer("padding_mask", "length", length, "padding_mask(n, 8)")
    places = jnp.arange(keys)
    is_token = places < jnp.asarray(length).astype(places.dtype)
    return jnp.broadcast_to(is_token, (queries, keys))


def combine_masks(*masks: Any) -> Bool[Array, "..."] | None:
    """Combines masks: a query attends to the keys that all masks allow.

    **Arguments:**

    - `masks`: boolean arrays, or arrays of numbers, where nonzero counts as `True`. Their
        shapes are broadcast against each other, so a mask of shape `(queries, keys)`
        combines with one of shape `(heads, queries, keys)`. `None` allows everything.

    **Returns:**

    A boolean array of the shape to which all are broadcast; `None` if all are `None`.

    **Raises:**

    [`equinox_like.ShapeError`][] if the shapes cannot be broadcast. `TypeError` for a mask
    that is not an array.

    !!! example

        ```python
        import equinox_like as eqx

        mask = eqx.nn.combine_masks(eqx.nn.causal_mask(2), None, eqx.nn.padding_mask(1, 2))
        assert mask.tolist() == [[True, False], [True, False]]
        ```
    """
    given = [mask for mask in masks if mask is not None]
    for i, mask in enumerate(masks):
        if mask is not None and not is_array(mask):
            raise wrong_type(
                "`combine_masks`", "an array or `None`", f"masks[{i}]", mask
            )
    if not given:
        return None
    try:
        shape = jnp.broadcast_shapes(*(mask.shape for mask in given))
    except ValueError:
        shapes = ", ".join(str(mask.shape) for mask in given)
        raise ShapeError(
            "`combine_masks` takes masks whose shapes can be broadcast against each other, "
            f"such as (queries, keys) and (heads, queries, keys); got {shapes}."
        ) from None
    # Broadcast explicitly, because `jax_numpy_rank_promotion` may be "raise".
    spread = (jnp.broadcast_to(mask.astype(bool), shape) for mask in given)
    return functools.reduce(jnp.logical_and, spread)


class Visible(NamedTuple):
    """Which query attends to which key: where all of these allow it.

    `positions` are those of queries and keys in the sequence. `None`: both are counted
    from 0. Given positions are those of a cache, whose empty slots have negative ones.
    """

    mask: Array | None
    is_causal: bool
    window: int | None
    positions: tuple[Array, Array] | None = None

    def as_mask(self, queries: int, keys: int) -> Array | None:
        """The combined mask, `(q, kv)` or `(heads, q, kv)`; `None` if it is all true."""
        positions = self.positions or (jnp.arange(queries), jnp.arange(keys))
        of_query, of_key = positions[0][:, None], positions[1][None, :]
        conditions = [self.mask]
        if self.is_causal:
            conditions.append(of_key <= of_query)
        if self.window is not None:
            conditions.append(of_key > of_query - self.window)
        if self.positions is not None:
            conditions.append(jnp.broadcast_to(of_key >= 0, (queries, keys)))
        return combine_masks(*conditions)


def checked_mask(
    layer: str,
    name: str,
    mask: Any,
    heads: int,
    lengths: tuple[int, int],
    slots: int | None = None,
) -> Array | None:
    """A mask or a bias as a JAX array, after validating its type and shape.

    With a cache, the first `slots` keys are in it.
    """
    if mask is None:
        return None
    if not is_array(mask):
        raise wrong_type(layer, "an array", name, mask)
    if name == "bias" and mask.dtype == bool:
        fix = " Pass bools as `mask=`."
        raise wrong_type(layer, "numbers, which are added,", "bias", mask, fix)
    wanted = lengths, (heads, *lengths)
    broadcasts = name == "bias" and any(_broadcasts(mask.shape, to) for to in wanted)
    if mask.shape in wanted or broadcasts:
        return jnp.asarray(mask)
    cached = ""
    if slots is not None:
        cached = (
            f" With a cache the keys are its {slots} slots, whose positions are "
            f"`cache.position`, and then the {lengths[1] - slots} new tokens."
        )
    raise ShapeError(
        f"{layer} takes a `{name}` of shape {wanted[0]}, in (queries, keys), or "
        f"{wanted[1]}, with the heads in front, but was given shape {mask.shape}."
        f"{cached}"
    )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) == len(to) and all(
        a in (1, b) for a, b in zip(shape, to, strict=True)
    )


def check_window(name: str, window: int | None) -> None:
    if window is not None:
        as_size(name, "window", window, 1)


def _check_one_integer(function: str, name: str, value: Any, of_row: str) -> None:
    """Raises an error unless `value` is one integer."""
    fix = f" For a batch, wrap it: `jax.vmap(lambda n: {of_row})({name})`."
    check_scalar(f"`{function}`", name, value, fix)
    if not jax.export.is_symbolic_dim(value):
        check_integer(f"`{function}`", name, value)


def _length(function: str, name: str, value: Any) -> Any:
    if jax.export.is_symbolic_dim(value):
        return value
    return as_size(f"`{function}`", name, value)
