"""`MultiheadAttention`, and the attention of one head that it is made of.

The layer projects, works out which query may see which key, and joins the heads again.
Between them stands one of two kernels: `_own_kernel`, which is the formula, or
`jax.nn.dot_product_attention`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PRNGKeyArray

from .._errors import ShapeError
from .._module import Module, field
from .._tree import combine, is_array, partition
from ._dropout import Dropout, resolve_inference
from ._init import Init, default_dtype
from ._keys import split_key
from ._kv_cache import (
    KVCache,
    empty_cache,
    extended,
    new_positions,
    refuse_overfull,
)
from ._linear import Linear, mapped
from ._shape import as_size, check_input, parameter_shape, within
from ._sharding import explicit_mesh, parts, placed, whole_along

Implementation = Literal["xla", "cudnn", "auto"] | None
_HeadsFunction = Callable[[Any, Any, Any], Any]


def dot_product_attention_weights(
    query: Array, key: Array, mask: Array | None = None
) -> Array:
    """How much each query attends to each key, in one head.

    `query` has shape `(q, size)`, `key` and `mask` shape `(kv, size)` and `(q, kv)`. The
    result has shape `(q, kv)` and the dtype of the query; its rows sum to 1.
    """
    return _weights(query, key, mask, None)


def dot_product_attention(
    query: Array,
    key_: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Dropout | None = None,
    *,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
) -> Array:
    """Attention of one head: the mean of the values, by those weights.

    `query` has shape `(q, size)`, `key_` shape `(kv, size)`, `value` shape
    `(kv, value_size)`, and the result `(q, value_size)`. `dropout` acts on the weights.
    """
    weights = _weights(query, key_, mask, None)
    if dropout is not None:
        weights = dropout(weights, key=key, inference=inference)
    return jnp.einsum("sS,Sd->sd", weights, value)


class MultiheadAttention(Module):
    r"""Attention of several heads: each query's mean of the values, by how keys match it.

    Each head $i$ has its own projections $Q_i$, $K_i$, $V_i$ of the three inputs, and

    $$\mathrm{head}_i = \mathrm{softmax}\left(\frac{Q_i K_i^T}{\sqrt{d}}\right) V_i,$$

    where $d$ is the size of a row of $Q_i$. The heads are joined and projected once more.
    From [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (Vaswani et al.
    2017). With `num_kv_heads`, several heads share keys and values: [Fast Transformer
    Decoding](https://arxiv.org/abs/1911.02150) (Shazeer 2019), [GQA](
    https://arxiv.org/abs/2305.13245) (Ainslie et al. 2023).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        attention = eqx.nn.MultiheadAttention(2, query_size=8, key=jax.random.key(0))
        x = jnp.ones((5, 8))
        assert attention(x, x, x, is_causal=True).shape == (5, 8)
        assert jax.vmap(attention)(x[None], x[None], x[None]).shape == (1, 5, 8)
        ```
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: Dropout
    num_heads: int = field(static=True)
    query_size: int = field(static=True)
    key_size: int = field(static=True)
    value_size: int = field(static=True)
    output_size: int = field(static=True)
    qk_size: int = field(static=True)
    vo_size: int = field(static=True)
    use_query_bias: bool = field(static=True)
    use_key_bias: bool = field(static=True)
    use_value_bias: bool = field(static=True)
    use_output_bias: bool = field(static=True)
    num_kv_heads: int = field(static=True)
    implementation: Implementation = field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        num_kv_heads: int | None = None,
        implementation: Implementation = None,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `num_heads`: the number of heads.
        - `query_size`, `key_size`, `value_size`: the sizes of the rows of the inputs; by
            default that of the query.
        - `output_size`: the size of the rows of the output; by default that of the query.
        - `qk_size`, `vo_size`: in each head, the size of the rows of queries and keys, and
            of values; by default `query_size // num_heads`, rounded down: 3 heads of a
            `query_size` of 8 have size 2, and are 6 wide together. The output has the
            `output_size` all the same.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: whether the
            projections have biases.
        - `dropout_p`: with what probability each weight is dropped in training.
        - `inference`: of the dropout, see [`equinox_like.nn.Dropout`][].
        - `dtype`: of the parameters; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `key`: for the first values of the parameters.
        - `num_kv_heads`: the number of heads of keys and values; it divides `num_heads`,
            and is as many by default. Head `n` reads head
            `n // (num_heads // num_kv_heads)` of these.
        - `implementation`: of the attention itself. `None`: the formula. `"xla"`,
            `"cudnn"`: `jax.nn.dot_product_attention` with that backend. `"auto"`: the first
            of `"cudnn"`, `"xla"` and `None` that can serve the call. In half precision, JAX
            cannot lower the gradient of `"xla"` under strict dtype promotion.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Linear`][], for each of the
            projections.

        **Raises:**

        `ValueError` for a size that is negative, or a `num_kv_heads` that does not divide
        `num_heads`.
        """
        query_size = as_size(self, "query_size", query_size)
        self.num_heads = as_size(self, "num_heads", num_heads)
        self.query_size = query_size
        self.key_size = query_size if key_size is None else key_size
        self.value_size = query_size if value_size is None else value_size
        self.output_size = query_size if output_size is None else output_size
        per_head = query_size // self.num_heads
        self.qk_size = per_head if qk_size is None else qk_size
        self.vo_size = per_head if vo_size is None else vo_size
        self.use_query_bias = use_query_bias
        self.use_key_bias = use_key_bias
        self.use_value_bias = use_value_bias
        self.use_output_bias = use_output_bias
        self.num_kv_heads = _kv_heads(self.num_heads, num_kv_heads)
        self.implementation = _checked_implementation(implementation)
        self.dropout = Dropout(dropout_p, inference)

        inits: Any = {"weight_init": weight_init, "bias_init": bias_init}
        qk, vo = self.num_heads * self.qk_size, self.num_heads * self.vo_size
        shared_qk, shared_vo = (
            self.num_kv_heads * self.qk_size,
            self.num_kv_heads * self.vo_size,
        )
        keys = split_key(key, 4, self)
        self.query_proj = Linear(
            self.query_size, qk, use_query_bias, dtype, key=keys[0], **inits
        )
        self.key_proj = Linear(
            self.key_size, shared_qk, use_key_bias, dtype, key=keys[1], **inits
        )
        self.value_proj = Linear(
            self.value_size, shared_vo, use_value_bias, dtype, key=keys[2], **inits
        )
        self.output_proj = Linear(
            vo, self.output_size, use_output_bias, dtype, key=keys[3], **inits
        )

    def __call__(
        self,
        query: ArrayLike,
        key_: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: _HeadsFunction | None = None,
        bias: ArrayLike | None = None,
        is_causal: bool = False,
        window: int | None = None,
        cache: KVCache | None = None,
        implementation: Implementation = None,
        return_weights: bool = False,
        out_sharding: PartitionSpec | None = None,
    ) -> Any:
        """**Arguments:**

        - `query`: shape `(q, query_size)`.
        - `key_`: shape `(kv, key_size)`. Named so as not to be the random key.
        - `value`: shape `(kv, value_size)`.
        - `mask`: which query sees which key: `True` or nonzero where it does. Shape
            `(q, kv)`, or `(num_heads, q, kv)`. A query that sees none takes the mean of
            all values.
        - `key`: for the dropout.
        - `inference`: takes the place of the dropout's own, unless it is `None`.
        - `deterministic`: the old name of `inference`. Deprecated.
        - `process_heads`: a function of the projected queries, keys and values, of shape
            `(length, heads, size)` each, that returns three arrays of the same shapes. It
            is the place for positional encodings.
        - `bias`: added to the scaled products before masking. Shape `(q, kv)` or
            `(num_heads, q, kv)`; axes of size 1 are broadcast.
        - `is_causal`: query `i` sees key `j` only if `j <= i`. With a cache, `i` and `j`
            are places in the whole sequence.
        - `window`: a query sees only keys whose place is more than its own less `window`.
            All of `mask`, `is_causal` and `window` must allow a key.
        - `cache`: what was seen before, made by `init_cache`. The queries see its tokens
            and the new ones, in this order, which `mask` and `bias` must have too.
        - `implementation`: takes the place of the layer's own, unless it is `None`.
        - `return_weights`: return the weights of the heads, too.
        - `out_sharding`: how the output of one example is to be split over the explicit
            axes of a mesh; by default its rows as those of `query`, and its columns as
            the rows of the weight of `output_proj`.

        **Returns:**

        An array of shape `(q, output_size)`. With a `cache` or `return_weights`, a tuple:
        that array, then the next cache, then the weights, of shape `(num_heads, q, kv)`
        and after dropout.

        **Raises:**

        [`equinox_like.ShapeError`][] if one of the arrays has another shape. `RuntimeError`
        if the dropout is active and there is no `key`, or if a cache overflows; within a
        compiled function the latter is found by [`equinox_like.error_if`][]. `ValueError`
        if the implementation cannot serve the call.
        """
        inference = resolve_inference("MultiheadAttention", inference, deterministic)
        # Not around the whole call, so that a warning points at the caller.
        with jax.named_scope("eqx.nn.MultiheadAttention"):
            inputs = _checked_inputs(self, query, key_, value, cache)
            q = _project(self, "query_proj", inputs[0], self.num_heads)
            k = _project(self, "key_proj", inputs[1], self.num_kv_heads)
            v = _project(self, "value_proj", inputs[2], self.num_kv_heads)
            if process_heads is not None:
                q, k, v = _processed(process_heads, q, k, v)
            new_cache = None
            lengths = len(q), len(k)
            if cache is not None:
                k, v, new_cache = extended(cache, k, v)
            # A query sees keys of all devices.
            k, v = whole_along(k, 0), whole_along(v, 0)
            mask_array = _checked_mask(self, "mask", mask, (len(q), len(k)))
            bias_array = _checked_mask(self, "bias", bias, (len(q), len(k)))
            visible = _visible(
                mask_array, lengths, is_causal, _window(window, cache), cache
            )

            name = implementation or self.implementation
            obstacle = functools.partial(
                _obstacle, self, q, v, inference, return_weights
            )
            name = _chosen(name, obstacle, q, k, v)
            if name is None:
                keys = None if key is None else jax.random.split(key, self.num_heads)
                heads, weights = _own_kernel(
                    self, q, k, v, visible, bias_array, keys, inference
                )
            else:
                heads, weights = _jax_kernel(name, q, k, v, visible, bias_array), None
            with within("output_proj"):
                out = _joined(self.output_proj, heads, out_sharding)
            if new_cache is not None:
                out = refuse_overfull(new_cache, out)
        more = () if new_cache is None else (new_cache,)
        more += (weights,) if return_weights else ()
        return (out, *more) if more else out

    def init_cache(
        self,
        max_length: int,
        *,
        dtype: DTypeLike | None = None,
        overflow: Literal["error", "ring"] = "error",
    ) -> KVCache:
        """An empty [`equinox_like.nn.KVCache`][] for calls of this layer.

        **Arguments:**

        - `max_length`: for how many tokens there is room.
        - `dtype`: of what is kept; by default that of the arrays of `key_proj`.
        - `overflow`: what happens to the token after those. `"error"`: it is refused.
            `"ring"`: it takes the place of the oldest, so that queries see the last
            `max_length` tokens.
        """
        dtype = dtype or _dtype_of(self.key_proj)
        sizes = self.qk_size, self.vo_size
        return empty_cache(max_length, self.num_kv_heads, sizes, dtype, overflow)


# Building


def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    number = num_heads if num_kv_heads is None else num_kv_heads
    if number < 1 or num_heads % number != 0:
        raise ValueError(
            "MultiheadAttention takes a `num_kv_heads` that divides `num_heads`; got "
            f"{num_kv_heads}, with {num_heads} heads."
        )
    return number


def _checked_implementation(implementation: Implementation) -> Implementation:
    if implementation not in (None, "xla", "cudnn", "auto"):
        raise ValueError(
            "MultiheadAttention takes None, 'xla', 'cudnn' or 'auto' as "
            f"`implementation`; got {implementation!r}."
        )
    return implementation


def _dtype_of(projection: Any) -> DTypeLike:
    """Of the arrays of a projection, which need not be a `Linear`."""
    dtypes = [getattr(x, "dtype", jnp.int32) for x in jax.tree.leaves(projection)]
    dtypes = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes) if dtypes else default_dtype(None)


# From the inputs to the heads


def _checked_inputs(
    attention: MultiheadAttention, query: Any, key: Any, value: Any, cache: Any
) -> list[Array]:
    inputs = ("query", query), ("key_", key), ("value", value)
    for name, x in inputs:
        projection = getattr(attention, f"{name.rstrip('_')}_proj")
        shape = None
        if isinstance(projection, Linear):
            shape = parameter_shape(projection, "weight", 2)
        check_input(attention, x, (None, None if shape is None else shape[1]), name)
    if len(key) != len(value):
        raise ShapeError(
            "MultiheadAttention takes as many rows of `key_` as of `value`; got "
            f"{len(key)} and {len(value)}."
        )
    if len(key) == 0 and cache is None:
        raise ShapeError(
            "MultiheadAttention takes at least one row of `key_` and `value`; there is "
            "no mean of nothing."
        )
    return [jnp.asarray(x) for _, x in inputs]


def _project(attention: Any, name: str, x: Array, num_heads: int) -> Array:
    with within(name):
        rows = mapped(getattr(attention, name), x)
    return rows.reshape(len(x), num_heads, rows.shape[-1] // num_heads)


def _processed(process_heads: _HeadsFunction, *heads: Array) -> tuple[Any, ...]:
    processed = tuple(process_heads(*heads))
    before = [head.shape for head in heads]
    after = [jnp.shape(head) for head in processed]
    if before != after:
        raise ShapeError(
            "`process_heads` must return queries, keys and values of the shapes that it "
            f"was given, {before}; it returned {after}."
        )
    return processed


# Which query may see which key


def _checked_mask(
    attention: MultiheadAttention, name: str, mask: Any, lengths: tuple[int, int]
) -> Array | None:
    if mask is None:
        return None
    if not is_array(mask):
        raise TypeError(
            f"MultiheadAttention takes an array as `{name}`; got a "
            f"{type(mask).__name__}."
        )
    wanted = lengths, (attention.num_heads, *lengths)
    if mask.shape in wanted:
        return jnp.asarray(mask)
    if name == "bias" and any(_broadcasts(mask.shape, shape) for shape in wanted):
        return jnp.asarray(mask)
    raise ShapeError(
        f"MultiheadAttention takes a `{name}` of shape {wanted[0]}, in (queries, keys), or "
        f"{wanted[1]}, with the heads in front, but was given shape {mask.shape}."
    )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) == len(to) and all(
        a in (1, b) for a, b in zip(shape, to, strict=True)
    )


def _places(cache: KVCache | None, queries: int, keys: int) -> tuple[Array, Array]:
    """The places in the sequence of the queries; of all keys, -1 where there is none."""
    if cache is None:
        return jnp.arange(queries), jnp.arange(keys)
    new = new_positions(cache, keys)
    return new_positions(cache, queries), jnp.concatenate([cache.position, new])


def _window(window: int | None, cache: KVCache | None) -> int | None:
    if window is not None and window < 1:
        raise ValueError(f"MultiheadAttention takes a `window` >= 1; got {window}.")
    if cache is None or cache.overflow == "error":
        return window
    # In a ring, a query must not see what a call with fewer tokens would have lost.
    slots = len(cache.key)
    return slots if window is None else min(window, slots)


def _visible(
    mask: Array | None,
    lengths: tuple[int, int],
    is_causal: bool,
    window: int | None,
    cache: KVCache | None,
) -> Array | None:
    """Which keys each query sees: shape `(q, kv)` or `(heads, q, kv)`; `None` is all."""
    conditions = [] if mask is None else [mask.astype(bool)]
    if is_causal or window is not None or cache is not None:
        queries, keys = _places(cache, *lengths)
        queries, keys = queries[:, None], keys[None, :]
        if is_causal:
            conditions.append(keys <= queries)
        if window is not None:
            conditions.append(keys > queries - window)
        if cache is not None:
            conditions.append(
                jnp.broadcast_to(keys >= 0, (len(queries), keys.shape[1]))
            )
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = jnp.logical_and(visible, condition.reshape(_like(condition, visible)))
    return visible


def _like(condition: Array, other: Array) -> tuple[int, ...]:
    return (1,) * (other.ndim - condition.ndim) + condition.shape


# The two kernels


def _weights(query: Array, key: Array, mask: Any, bias: Any) -> Array:
    query = query / math.sqrt(query.shape[-1])
    logits = jnp.einsum("sd,Sd->sS", query, key)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if mask is not None:
        if mask.shape != logits.shape:
            raise ShapeError(
                f"`mask` must have shape {logits.shape}, in (queries, keys); it has shape "
                f"{mask.shape}."
            )
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    with jax.numpy_dtype_promotion("standard"):
        accumulate = jnp.result_type(logits.dtype, jnp.float32)
    return jax.nn.softmax(logits.astype(accumulate)).astype(logits.dtype)


def _own_kernel(
    attention: MultiheadAttention,
    q: Array,
    k: Array,
    v: Array,
    visible: Array | None,
    bias: Array | None,
    keys: Any,
    inference: bool | None,
) -> tuple[Array, Array]:
    """The joined heads `(q, heads * size)` and their weights `(heads, q, kv)`."""

    def head(q, k, v, visible, bias, key):
        weights = _weights(q, k, visible, bias)
        with within("dropout"):
            weights = attention.dropout(weights, key=key, inference=inference)
        return jnp.einsum("sS,Sd->sd", weights, v), weights

    number, shared = attention.num_heads, k.shape[1]
    if bias is not None and bias.ndim == 3 and len(bias) == 1:  # one for all heads
        bias = bias[0]
    axes = [0 if x is not None and x.ndim == 3 else None for x in (visible, bias)]
    axes.append(None if keys is None else 0)
    if shared == number:
        all_heads = jax.vmap(head, in_axes=(1, 1, 1, *axes), out_axes=(1, 0))
        heads, weights = all_heads(q, k, v, visible, bias, keys)
    else:
        # Those of one group share keys and values, which are not repeated for it.
        group = jax.vmap(head, in_axes=(1, None, None, *axes), out_axes=(1, 0))
        groups = jax.vmap(group, in_axes=(1, 1, 1, *axes), out_axes=(1, 0))
        rest = [
            x if axis is None else _in_groups(x, 0, shared)
            for x, axis in zip((visible, bias, keys), axes, strict=True)
        ]
        heads, weights = groups(_in_groups(q, 1, shared), k, v, *rest)
        weights = weights.reshape(number, *weights.shape[2:])
    return heads.reshape(len(q), number * v.shape[2]), weights


def _in_groups(x: Any, axis: int, number: int) -> Any:
    """The axis of the heads as two: one of groups, and one within a group."""
    return x.reshape(*x.shape[:axis], number, -1, *x.shape[axis + 1 :])


def _jax_kernel(
    name: Any, q: Array, k: Array, v: Array, visible: Array | None, bias: Array | None
) -> Array:
    def with_batch(x: Any) -> Any:
        return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)

    # JAX adds the bias, and masks, in float32.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            *(with_batch(x) for x in (q, k, v)),
            bias=with_batch(bias),
            mask=with_batch(visible),
            implementation=name,
        )
    shape = len(q), q.shape[1] * v.shape[2]
    split = None if explicit_mesh(out) is None else PartitionSpec(*parts(out)[1:3])
    return placed(lambda out: out.reshape(shape), split, out)


def _joined(projection: Any, heads: Array, out_sharding: PartitionSpec | None) -> Array:
    if out_sharding is None:
        return mapped(projection, heads)
    arrays, rest = partition(projection, is_array)
    return placed(
        lambda heads, arrays: jax.vmap(combine(arrays, rest))(heads),
        out_sharding,
        heads,
        arrays,
    )


def _chosen(
    name: Implementation, obstacle: Callable[[], str | None], *heads: Array
) -> Literal["xla", "cudnn"] | None:
    """The implementation for a call, or an error that says why it cannot serve it."""
    if _checked_implementation(name) is None:
        return None
    found = obstacle()
    if name == "auto":
        if found is not None:
            return None
        return "cudnn" if _cudnn_serves(*heads) else "xla"
    if found is not None:
        raise ValueError(
            f"The implementation {name!r} of attention cannot serve this call: {found}. "
            "Take `implementation=None`, or 'auto', which chooses for each call."
        )
    return name


def _obstacle(
    attention: MultiheadAttention,
    q: Array,
    v: Array,
    inference: bool | None,
    return_weights: bool,
) -> str | None:
    """Why JAX's own kernels cannot serve a call."""
    if q.shape[2] != v.shape[2]:
        return f"`qk_size` is {q.shape[2]} and `vo_size` is {v.shape[2]}"
    if attention.dropout.is_active(inference):
        return "its dropout is active"
    if return_weights:
        return "it does not return the weights"
    return "there is no query" if len(q) == 0 else None


def _cudnn_serves(q: Array, k: Array, v: Array) -> bool:
    if jax.default_backend() != "gpu":
        return False
    half = all(x.dtype in (jnp.float16, jnp.bfloat16) for x in (q, k, v))
    return half and q.shape[2] % 8 == 0 and q.shape[2] <= 128
