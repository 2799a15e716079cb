"""`KVCache`: the keys and values of the tokens that attention has seen so far.

A call first writes its tokens to their slots, and then attends to the slots, so that a
compiled loop updates the cache in place. The exception is a call with several tokens
and a ring: it may overwrite tokens that its first queries still attend to. Then old and
new tokens are concatenated.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.lax as lax
import jax.numpy as jnp
from jaxtyping import Array

from ..._compat.tracing import Tracer
from ..._errors import ShapeError
from ..._module import Module, field
from ..._runtime.error_if import error_if
from ..._typing import ArrayLike
from .._base.checks import as_size, jax_array, wrong_type, wrong_value
from .._base.precision import accumulation_dtype, saturated
from .._base.sharding import parts, split_as
from .._base.state import unchanged


class KVCache(Module):
    """Keys and values of earlier tokens, for [`equinox_like.nn.MultiheadAttention`][].

    `attention.init_cache(...)` makes an empty one. Each call takes a cache and returns
    the next. Shapes and dtypes never change, so it is a carry of `jax.lax.scan`. A loop
    in a compiled function writes each token in place. A single call does so if the cache
    is donated.

    **Fields:**

    - `key`: shape `(max_length, kv_heads, qk_size)`. The keys, one row for each slot, after
        `process_heads` and `rotary`.
    - `value`: shape `(max_length, kv_heads, vo_size)`. The values.
    - `position`: int32, shape `(max_length,)`. The position in the sequence of the token in
        each slot, from 0; -1 if the slot is empty. The token at position `p` is in slot
        `p % max_length`.
    - `length`: int32, shape `()`. The number of tokens seen, which is the position of the
        next one: the `offset` of a positional encoding.
    - `overflow`: static. `"error"`, or `"ring"`, see `init_cache`.
    - `key_scale`, `value_scale`: bfloat16, shape `(max_length, kv_heads)`, if `key` and
        `value` are int8, which are multiplied by them; else `None`.

    None of the arrays is trainable. A batch of sequences has a cache with a leading axis on
    all arrays, made by `jax.vmap(lambda _: attention.init_cache(n))(jnp.arange(batch))`
    and passed to the layer under `jax.vmap`; each has a length of its own. The layers of
    an [`equinox_like.nn.Stacked`][] have one with a leading axis of the depth, made by
    `jax.vmap(lambda _: stacked.layers.attention.init_cache(n))(jnp.arange(depth))` and
    passed as `xs`, which the scan reads and writes in place.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))

        def step(cache, token):
            token = token[None]
            out, cache = attention(token, token, token, is_causal=True, cache=cache)
            return cache, out[0]

        tokens = jax.random.normal(jax.random.key(1), (5, 8))
        _, outs = jax.lax.scan(step, attention.init_cache(max_length=5), tokens)
        at_once = attention(tokens, tokens, tokens, is_causal=True)
        assert jnp.allclose(outs, at_once, atol=1e-5)
        ```
    """

    key: Array = field(trainable=False)
    value: Array = field(trainable=False)
    position: Array = field(trainable=False)
    length: Array = field(trainable=False)
    overflow: Literal["error", "ring"] = field(static=True, default="error")
    key_scale: Array | None = field(trainable=False, default=None)
    value_scale: Array | None = field(trainable=False, default=None)

    _in_dtype = unchanged  # in another `precision`

    def truncate(self, n: ArrayLike) -> "KVCache":
        """The cache as it was after the first `n` tokens, without the later ones.

        Prompts of different lengths are padded at the end to one length, passed to the
        layer at once, and the padding is truncated. Setting `length` alone is not
        enough: queries would still attend to the slots of the padding.

        **Arguments:**

        - `n`: the number of tokens to keep, of all seen so far: an integer from 0 to
            `length`. It may be traced. If the arrays have leading axes, of a batch or of
            the layers of an [`equinox_like.nn.Stacked`][], `n` is broadcast to them.

        **Returns:**

        A cache of the same shapes.

        **Raises:**

        [`equinox_like.ShapeError`][] if `n` cannot be broadcast; `TypeError` if it is not
        an integer. If `n` is out of range, or if a ring has overwritten tokens that the
        next query would attend to, the error is that of [`equinox_like.error_if`][],
        also within a compiled function.

        !!! example

            ```python
            import equinox_like as eqx
            import jax
            import jax.numpy as jnp

            attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
            x = jnp.ones((5, 8))  # the last two rows are padding
            _, cache = attention(x, x, x, is_causal=True, cache=attention.init_cache(8))
            cache = cache.truncate(3)
            assert cache.length == 3
            assert cache.position.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
            ```
        """
        n = _broadcast_count(n, self.length.shape)
        slots = self.position.shape[-1]
        length = error_if(
            self.length,
            (n < 0) | (n > self.length),
            "`KVCache.truncate` takes an `n` from 0 to the `length` of the cache.",
        )
        n = jnp.minimum(n, length)
        # The next query attends to the last `slots` tokens, including its own.
        needed = jnp.maximum(n + 1 - slots, 0)
        place = self.position
        is_needed = (needed[..., None] <= place) & (place < n[..., None])
        n = error_if(
            n,
            is_needed.sum(-1) < n - needed,
            "A KVCache with `overflow='ring'` cannot be truncated to tokens that it "
            "has overwritten. Make a longer one with `init_cache`.",
        )
        return cut(self, n)


def is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def caches_in(tree: Any) -> list[KVCache]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_cache) if is_cache(x)]


def empty_cache(
    max_length: int, key: Array, value: Array, overflow: Literal["error", "ring"]
) -> KVCache:
    """An empty cache. `key` and `value`, `(1, heads, size)`, fill its empty slots."""
    if overflow not in ("error", "ring"):
        raise wrong_value("KVCache", "'error' or 'ring'", "overflow", overflow)
    max_length = as_size(KVCache, "max_length", max_length, 1)
    # Under `jit`, for a batch that is split over explicit axes, JAX 0.10 to 0.12 does not
    # split a scalar constant like other arrays.
    length = jnp.squeeze(jnp.zeros((1,), jnp.int32))
    tokens = {"key": key, "value": value}
    if key.dtype == jnp.int8:
        scales = (x.max(-1).astype(jnp.bfloat16) for x in (key, value))
        tokens |= zip(("key_scale", "value_scale"), scales, strict=True)
    slots = {
        n: jnp.broadcast_to(x, (max_length, *x.shape[1:])) for n, x in tokens.items()
    }
    position = jnp.full((max_length,), -1, jnp.int32)
    return KVCache(**slots, position=position, length=length, overflow=overflow)


class Rows:
    """The caches of all layers of a `Stacked`, while one of the layers is traced.

    The layer gets its row. Attention writes new tokens into the arrays of all layers, and
    reads its row from these. If it wrote into the row, XLA would copy the row out of these
    arrays and back. An array is known to be a row because it is the identical object.
    Within a `vmap` or `jit` of the layer it is another one, and the row is written back
    as a whole.
    """

    def __init__(self, index: Array):
        self.index = index
        # From the id of a row to the row, all rows, and all rows before the layer.
        self._known: dict[int, tuple[Array, Array, Array]] = {}

    def row(self, all_rows: Array, before: Array | None = None) -> Array:
        row = lax.dynamic_index_in_dim(all_rows, self.index, 0, False)
        before = all_rows if before is None else before
        self._known[id(row)] = row, all_rows, before
        return row

    def __contains__(self, row: Array) -> bool:
        return id(row) in self._known

    def written(self, row: Array, tokens: Array, start: ArrayLike) -> Array:
        """`row` with `tokens` from slot `start` on."""
        known = self._known[id(row)]
        place = self.index, start, *[0] * (tokens.ndim - 1)
        place = [jnp.asarray(i, jnp.int32) for i in place]  # JAX wants one dtype
        all_rows = lax.dynamic_update_slice(known[1], tokens[None], place)
        # Or XLA computes the update again where the row is read, and so copies all rows.
        return self.row(lax.optimization_barrier(all_rows), known[2])

    def after(self, before: Array, row: Array) -> Array:
        """All rows, which were `before`, with the one that the layer returned."""
        if row in self and self._known[id(row)][2] is before:
            return self._known[id(row)][1]
        return lax.dynamic_update_index_in_dim(before, row, self.index, 0)


_rows: contextvars.ContextVar[Rows | None] = contextvars.ContextVar(
    "rows", default=None
)


@contextlib.contextmanager
def writing_into(rows: Rows) -> Iterator[None]:
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


class Seen(NamedTuple):
    """The keys and values that the queries of a call attend to.

    They are the slots of the cache; or the slots, followed by the new tokens.
    """

    key: Array
    value: Array
    position: Array
    # The index of the first new token in these arrays.
    start: Array | int
    next_cache: KVCache

    def in_this_order(self, mask: Array | None, new: int) -> Array | None:
        """Reorders a mask or bias for slots and `new` tokens to the order of `key`."""
        extra = 0 if mask is None else mask.shape[-1] - len(self.key)
        if mask is None or extra <= 0:
            return mask
        slots, tokens = jnp.split(mask, [mask.shape[-1] - new], -1)
        return lax.dynamic_update_slice_in_dim(slots, tokens, self.start, -1)

    def slots_first(self, weights: Any, new: int) -> Array:
        """Reorders weights from the order of `key` to all slots, then `new` tokens."""
        if len(self.key) > len(self.next_cache.key):
            return weights
        tokens = lax.dynamic_slice_in_dim(weights, self.start, new, -1)
        zeros = jnp.zeros_like(tokens)
        slots = lax.dynamic_update_slice_in_dim(weights, zeros, self.start, -1)
        return jnp.concatenate([slots, tokens], -1)

    def checked(self, out: Array) -> tuple[KVCache, Array]:
        """The next cache and `out`, with an error at run time for too many tokens.

        Both the output and the length depend on the check, so that JAX keeps it in a
        program that uses only one of them.
        """
        cache = self.next_cache
        slots = cache.key.shape[0]
        length, out = error_if(
            (cache.length, out),
            cache.overflow == "error" and cache.length > slots,
            f"The KVCache has slots for {slots} tokens, but was given more. Make a longer "
            "one with `init_cache`, or one with `overflow='ring'`.",
        )
        return dataclasses.replace(cache, length=length), out


def extended(cache: KVCache, key: Array, value: Array) -> Seen:
    """The cached tokens with the new ones, in the dtypes of `key` and `value`."""
    _check_new(cache, key, value)
    number, slots = key.shape[0], cache.key.shape[0]
    position = new_positions(cache, number)
    new: dict[str, Any] = {"position": position}
    new["key"], new["key_scale"] = _narrowed(key, cache.key.dtype)
    new["value"], new["value_scale"] = _narrowed(value, cache.value.dtype)
    old = {name: jax.tree.map(jax_array, getattr(cache, name)) for name in new}
    if cache.overflow == "error" or number == 1:
        start = cache.length if cache.overflow == "error" else cache.length % slots
        update = functools.partial(_updated, start=start)
        seen = updated = jax.tree.map(update, old, new)
    else:
        # If there are more tokens than slots, only the last ones are kept.
        kept = slice(max(number - slots, 0), None)
        start, indices = slots, position[kept] % slots
        updated = jax.tree.map(lambda a, b: _written(a, indices, b[kept]), old, new)
        seen = jax.tree.map(lambda *pair: jnp.concatenate(pair), old, new)
    length = jax_array(cache.length) + number
    next_cache = dataclasses.replace(cache, **updated, length=length)
    keys = _widened(seen["key"], seen["key_scale"], key.dtype)
    values = _widened(seen["value"], seen["value_scale"], value.dtype)
    return Seen(keys, values, seen["position"], start, next_cache)


def _narrowed(x: Array, dtype: Any) -> tuple[Array, Array | None]:
    """Keys or values as a cache stores them, and their scale for each token and head."""
    if dtype != jnp.int8:
        return saturated(x, dtype), None
    single = jnp.finfo(jnp.float32)
    bound = min(float(single.max), float(jnp.finfo(x.dtype).max))
    x = jnp.clip(x.astype(accumulation_dtype(x)), -bound, bound).astype(jnp.float32)
    # At least a normal number: XLA would take a subnormal one for zero.
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1) / 127, 2 * single.tiny)
    scale = scale.astype(jnp.bfloat16)
    steps = jnp.round(x / scale.astype(jnp.float32)[..., None])
    return jnp.clip(steps, -127, 127).astype(jnp.int8), scale


def _widened(x: Array, scale: Array | None, dtype: Any) -> Array:
    if scale is None:
        return x.astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    x = x.astype(wide) * scale.astype(wide)[..., None]
    # The scale may have been rounded up.
    bounds = jnp.finfo(dtype)
    return jnp.clip(x, float(bounds.min), float(bounds.max)).astype(dtype)


def _updated(slots: Array, tokens: Array, start: ArrayLike) -> Array:
    rows = _rows.get()
    if rows is not None and slots in rows:
        return rows.written(slots, tokens, start)
    return lax.dynamic_update_slice_in_dim(slots, tokens, start, 0)


def _written(slots: Array, indices: Array, tokens: Array) -> Array:
    def write(slots, indices, tokens):
        return slots.at[indices].set(tokens)

    # JAX cannot derive the sharding if the tokens are a split batch and the slots not.
    return split_as(write, parts(slots), slots, indices, tokens)


def cut(cache: KVCache, n: Array) -> KVCache:
    """`cache.truncate(n)` without its checks."""
    position = jnp.where(cache.position < n[..., None], cache.position, -1)
    return dataclasses.replace(cache, position=position, length=n)


def new_positions(cache: KVCache, number: int) -> Array:
    """The positions of the next `number` tokens in the sequence."""
    return cache.length + jnp.arange(number, dtype=jnp.int32)


def check_cache(layer: str, cache: Any) -> None:
    """Raises `TypeError` unless `cache` is a `KVCache`, or `None`."""
    if cache is not None and not isinstance(cache, KVCache):
        fix = " Make one with the `init_cache` of this layer."
        raise wrong_type(layer, "a KVCache", "cache", cache, fix)


def _check_new(cache: KVCache, key: Array, value: Array) -> None:
    for name, new, old in ("key", key, cache.key), ("value", value, cache.value):
        if new.shape[1:] != old.shape[1:]:
            raise ShapeError(
                f"The KVCache holds a `{name}` of shape {old.shape[1:]} per token, not "
                f"{new.shape[1:]}. Make the cache with the `init_cache` of this layer."
            )
    if cache.overflow == "ring":
        return
    slots, number, held = cache.key.shape[0], key.shape[0], 0
    if not isinstance(cache.length, Tracer):
        # An explicit transfer; and within a trace, JAX would trace the sum.
        held = int(jax.device_get(cache.length))
    if held + number > slots:
        holds = f"holds {held} and " if held else ""
        error = ShapeError if number > slots else RuntimeError
        raise error(
            f"The KVCache has slots for {slots} tokens, {holds}was given {number} more. "
            "Make a longer one with `init_cache`, or one with `overflow='ring'`."
        )


def _broadcast_count(n: ArrayLike, shape: tuple[int, ...]) -> Array:
    n = jnp.asarray(n)
    if not jnp.issubdtype(n.dtype, jnp.integer):
        raise TypeError(f"`KVCache.truncate` takes an integer as `n`; got {n.dtype}.")
    try:
        return jnp.broadcast_to(n, shape).astype(jnp.int32)
    except ValueError:
        raise ShapeError(
            f"`KVCache.truncate` takes an `n` that can be broadcast to shape {shape}, that "
            f"of `length`; got shape {n.shape}."
        ) from None
