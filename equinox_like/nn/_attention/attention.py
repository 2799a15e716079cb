"""`MultiheadAttention`: attention with projections of its inputs and its output."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._call_path import call_part
from ..._errors import ShapeError
from ..._module import Module, field
from ..._tree import combine, is_array, is_inexact_array, partition
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_array,
    as_divisor,
    as_size,
    check_dtype,
    check_function,
    check_input,
    jax_array,
    parameter_shape,
    refusal,
    wrong_type,
)
from .._base.init import Init, default_dtype, dtype_of, split_key
from .._base.precision import cast_to_precision, computes
from .._base.sharding import parts, placed, split_along
from .._layers.elementwise import Dropout, resolve_inference
from .._layers.linear import Linear, mapped
from .dot_product import (
    Drop,
    Implementation,
    Inputs,
    attend,
    checked_implementation,
    checked_softcap,
)
from .kv_cache import KVCache, check_cache, empty_cache, extended, new_positions
from .masks import Visible, check_window, checked_mask

_NAME = "MultiheadAttention"
HeadsFunction = Callable[[Any, Any, Any], Any]


class _CallOptions(TypedDict, total=False):
    """The keywords of a call on which the type of its result does not depend."""

    key: PRNGKeyArray | None
    inference: bool | None
    deterministic: bool | None
    process_heads: HeadsFunction | None
    bias: ArrayLike | None
    is_causal: bool
    window: int | None
    implementation: Implementation
    out_sharding: PartitionSpec | None


class MultiheadAttention(Module):
    r"""Multi-head attention: for each query, a mean of the values weighted by its match
    with the keys.

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
    rotary: Callable[..., Array] | None = None
    attention: Callable[..., Array] | None = None
    sinks: Array | None = None
    softcap: float | None = field(static=True, default=None)

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
        inference: bool | None = False,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        num_kv_heads: int | None = None,
        implementation: Implementation = None,
        rotary: Callable[..., Array] | None = None,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
        softcap: float | None = None,
        use_sinks: bool = False,
        attention: Callable[..., Array] | None = None,
    ):
        """**Arguments:**

        - `num_heads`: the number of heads.
        - `query_size`, `key_size`, `value_size`: the sizes of the rows of the inputs; by
            default that of the query.
        - `output_size`: the size of the rows of the output; by default that of the query.
        - `qk_size`, `vo_size`: in each head, the size of the rows of queries and keys, and
            of values; by default `query_size // num_heads`, rounded down: for example 2 for
            `query_size=8` and 3 heads, which makes 6 in all. This does not change the size
            of the output.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: whether the
            projections have biases.
        - `dropout_p`: the probability that a weight is dropped in training.
        - `inference`: of the dropout, see [`equinox_like.nn.Dropout`][].
        - `dtype`: of the parameters; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `key`: a PRNG key for parameter initialisation.
        - `num_kv_heads`: the number of heads of keys and values, a divisor of
            `num_heads`; by default `num_heads`. Head `n` of the queries reads head
            `n // (num_heads // num_kv_heads)` of keys and values.
        - `implementation`: how attention is computed. `None`: by the formula. `"xla"`,
            `"cudnn"`: `jax.nn.dot_product_attention` with that backend. `"auto"`: the
            first of `"cudnn"`, `"xla"` and `None` that supports the call; see
            [`equinox_like.nn.dot_product_attention`][]. In float16, a compiled function
            with `"xla"` is an error on CPUs. In bfloat16, JAX cannot lower the
            gradient of `"xla"` under strict dtype promotion. In float64, `"xla"` has the
            accuracy of float32, since JAX computes its softmax in float32; `"auto"` does
            not choose it.
        - `rotary`: rotates the queries and keys of each head by their positions, after
            `process_heads`: a [`equinox_like.nn.RotaryPositionalEmbedding`][] of size
            `qk_size`, or a layer that is called in the same way, with `offset`. With a
            cache, positions start at `cache.length`.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Linear`][], for each of the
            projections.
        - `softcap`: bounds the products of queries and keys, see
            [`equinox_like.nn.dot_product_attention`][].
        - `use_sinks`: whether each head has a trained logit, `sinks`, of shape
            `(num_heads,)`, for a key with a value of zeros. It starts as 0.
        - `attention`: called in place of [`equinox_like.nn.dot_product_attention`][], of
            which it has the signature, for example another kernel. It gets the queries,
            keys and values of all heads, and those options that are not `None` or
            `False`. With a cache, causality, the window and the filled slots are in
            `mask`.

        **Raises:**

        `ValueError` for a size that is negative, a `num_kv_heads` that does not divide
        `num_heads`, a `rotary` of another size, or a `softcap` that is not a positive
        number; or if each head would be of size 0. `ZeroDivisionError` if `num_heads` is
        0. `TypeError` if `rotary` is not a layer, or `attention` not a function.
        """
        query_size = as_size(self, "query_size", query_size)
        self.num_heads = as_divisor(self, "num_heads", num_heads)
        per_head = query_size // self.num_heads
        if per_head == 0 < query_size and None in (qk_size, vo_size):
            raise ValueError(
                "MultiheadAttention takes first `num_heads`, and then a `query_size` at "
                f"least as large, or `qk_size`; got {self.num_heads} and {query_size}."
            )

        def size(name: str, given: int | None, default: int) -> int:
            return default if given is None else as_size(self, name, given)

        self.query_size = query_size
        self.key_size = size("key_size", key_size, query_size)
        self.value_size = size("value_size", value_size, query_size)
        self.output_size = size("output_size", output_size, query_size)
        self.qk_size = size("qk_size", qk_size, per_head)
        self.vo_size = size("vo_size", vo_size, per_head)
        self.use_query_bias = use_query_bias
        self.use_key_bias = use_key_bias
        self.use_value_bias = use_value_bias
        self.use_output_bias = use_output_bias
        self.num_kv_heads = size("num_kv_heads", num_kv_heads, self.num_heads)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads != 0:
            wanted, given = f"a divisor of {self.num_heads} heads", f"{num_kv_heads}"
            raise ValueError(refusal(self, wanted, "num_kv_heads", given))
        self.implementation = checked_implementation(_NAME, implementation)
        self.rotary = _checked_rotary(_NAME, rotary, self.qk_size)
        self.dropout = Dropout(dropout_p, inference)
        self.softcap = checked_softcap(_NAME, softcap)
        if attention is not None:
            check_function(_NAME, "attention", attention)
        self.attention = attention
        self.sinks = None
        if use_sinks:
            self.sinks = jnp.zeros(self.num_heads, default_dtype(dtype))

        linear = functools.partial(
            Linear, dtype=dtype, weight_init=weight_init, bias_init=bias_init
        )
        q, k = self.num_heads * self.qk_size, self.num_kv_heads * self.qk_size
        v, out = self.num_kv_heads * self.vo_size, self.num_heads * self.vo_size
        q_key, k_key, v_key, out_key = split_key(key, 4, self)
        self.query_proj = linear(self.query_size, q, use_query_bias, key=q_key)
        self.key_proj = linear(self.key_size, k, use_key_bias, key=k_key)
        self.value_proj = linear(self.value_size, v, use_value_bias, key=v_key)
        self.output_proj = linear(out, self.output_size, use_output_bias, key=out_key)

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key_: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        cache: None = None,
        return_weights: Literal[False] = False,
        **options: Unpack[_CallOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key_: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        cache: KVCache | None = None,
        return_weights: bool = False,
        **options: Unpack[_CallOptions],
    ) -> Any: ...
    @computes("eqx.nn.MultiheadAttention", "layer")
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
        process_heads: HeadsFunction | None = None,
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
        - `key_`: shape `(kv, key_size)`. Named so to differ from the PRNG key.
        - `value`: shape `(kv, value_size)`.
        - `mask`: which query attends to which key: `True` or nonzero where it does. Pass
            an array of 0 and -inf as `bias`, not as `mask`.
            Shape `(q, kv)`, or `(num_heads, q, kv)`. A query that attends to no key
            returns the mean of all values; with a cache, empty slots count as zeros.
        - `key`: a PRNG key for the dropout.
        - `inference`: overrides the dropout's own, unless it is `None`.
        - `deterministic`: the old name of `inference`. Deprecated.
        - `process_heads`: a function of the projected queries, keys and values, of shape
            `(length, heads, size)` each, that returns three arrays of the same shapes.
            Use it to normalise queries and keys, for example.
        - `bias`: added to the scaled products before masking. Shape `(q, kv)` or
            `(num_heads, q, kv)`; axes of size 1 are broadcast.
        - `is_causal`: if `True`, query `i` attends to key `j` only if `j <= i`. With a
            cache, `i` and `j` are positions in the whole sequence.
        - `window`: query `i` attends to key `j` only if `j > i - window`. All of
            `mask`, `is_causal` and `window` must allow a key.
        - `cache`: keys and values of earlier tokens, made by `init_cache`. The queries
            attend to these and then to the new tokens; `mask` and `bias` must be in
            this order. The positions of all keys are `jnp.concatenate([cache.position,
            cache.length + jnp.arange(kv)])`.
        - `implementation`: overrides the layer's own, unless it is `None`.
        - `return_weights`: whether to return the weights of the heads, too.
        - `out_sharding`: how to split the output of one example over the explicit axes of
            a mesh; by default the rows as those of `query`, and the columns as the rows
            of the weight of `output_proj`.

        **Returns:**

        An array of shape `(q, output_size)`. With a `cache` or `return_weights`, a tuple:
        that array, then the next cache, then the weights, of shape `(num_heads, q, kv)`
        and after dropout.

        **Raises:**

        [`equinox_like.ShapeError`][] if one of the arrays has another shape, or there
        are more tokens at once than the cache has slots. `TypeError` if `cache` is not a
        KVCache, `mask` or `bias` not an array, or `bias` an array of bools.
        [`equinox_like.MissingKeyError`][] if the dropout is active and there is no
        `key`. `RuntimeError` if a cache overflows; within a compiled function it is
        raised by [`equinox_like.error_if`][]. `ValueError` if `window < 1`, if the
        implementation does not support the call, or if the weights are asked of a layer
        with an `attention`; JAX's own `RuntimeError` for `"cudnn"` on a host without it.
        """
        inference = resolve_inference("MultiheadAttention", inference, deterministic)
        inputs, bias = cast_to_precision(((query, key_, value), bias))
        check_cache(_NAME, cache)
        q, k, v = _projected(self, inputs, cache, process_heads)
        new = k.shape[0]
        slots = None if cache is None else cache.key.shape[0]
        in_all = q.shape[0], new + (slots or 0)
        mask = checked_mask(_NAME, "mask", mask, self.num_heads, in_all, slots)
        bias = checked_mask(_NAME, "bias", bias, self.num_heads, in_all, slots)
        positions = seen = None
        if cache is not None:
            seen = extended(cache, k, v)
            k, v = seen.key, seen.value
            mask, bias = (seen.in_this_order(x, new) for x in (mask, bias))
            positions = new_positions(cache, q.shape[0]), seen.position
        check_window(_NAME, window)
        if cache is not None and slots and cache.overflow == "ring":
            # A query must not attend to tokens that would already be overwritten if the
            # tokens were passed one by one.
            window = min(window or slots, slots)
        visible = Visible(mask, is_causal, window, positions)
        keys = None if key is None else split_key(key, self.num_heads, self)
        drop = Drop(self.dropout, keys, inference)
        inputs = Inputs(q, k, v, visible, bias, None, drop, self.softcap, self.sinks)
        how = implementation or self.implementation, return_weights
        heads, weights = _attended(self.attention, inputs, key, *how)
        out = _joined(self, heads, out_sharding)
        more: tuple[Any, ...] = ()
        if seen is not None:
            next_cache, out = seen.checked(out)
            more = (next_cache,)
            weights = seen.slots_first(weights, new) if return_weights else None
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

        - `max_length`: the number of tokens that fit into the cache.
        - `dtype`: of the cached keys and values, floating or complex, or int8 for real
            ones; by default that of the parameters of the projections. If it differs
            from the dtype of a call, keys and values are cast when they are used, so
            outputs have the same dtype as without a cache. In a narrower float, such as
            float8_e4m3fn, a number beyond its range becomes its largest or least
            number. With int8, the key and the value of each head and token have a
            scale, their largest absolute number divided by 127, so each number is
            rounded by at most half of it.
        - `overflow`: what happens to a token beyond `max_length`. `"error"`: an error
            is raised. `"ring"`: it overwrites the oldest one, so that queries attend to
            the last `max_length` tokens.

        **Raises:**

        `ValueError` if `max_length` is not an int of 1 or more, or for another `dtype` or
        `overflow`.
        """
        key = _empty_token(self, "key_proj", self.key_size, self.qk_size, dtype)
        value = _empty_token(self, "value_proj", self.value_size, self.vo_size, dtype)
        return empty_cache(max_length, key, value, overflow)


def _attended(
    fun: Any, inputs: Inputs, key: Any, implementation: Any, return_weights: bool
) -> tuple[Array, Array | None]:
    """The heads' outputs and weights, as `attend` returns them."""
    q, k, v, visible, bias, _, drop, softcap, sinks = inputs
    if fun is None:
        # Gathered, because a query attends to the keys of all devices.
        k, v = split_along(k, 0, None), split_along(v, 0, None)
        return attend(inputs._replace(k=k, v=v), implementation, return_weights)
    if return_weights:
        raise ValueError(
            "MultiheadAttention with an `attention` of your own cannot return the weights."
        )
    if visible.positions is not None:
        visible = Visible(inputs.mask, False, None)
    options = {"mask": visible.mask, "bias": bias, "softcap": softcap, "sinks": sinks}
    options |= {"is_causal": visible.is_causal, "window": visible.window}
    options |= {"implementation": implementation}
    if drop.is_active():
        options |= {"dropout": drop.dropout, "key": key, "inference": drop.inference}
    given = {n: x for n, x in options.items() if x is not None and x is not False}
    heads = as_array(_NAME, "attention(query, key_, value)", fun(q, k, v, **given))
    wanted = (*q.shape[:2], v.shape[2])
    if heads.shape != wanted:
        raise ShapeError(
            "MultiheadAttention takes an `attention` that returns an array of shape "
            f"{wanted}, in (queries, heads, size); it returned shape {heads.shape}."
        )
    return heads, None


def _projected(
    attention: Any, inputs: Any, cache: Any, process_heads: HeadsFunction | None
) -> tuple[Any, ...]:
    """The projected queries, keys and values, each `(length, heads, size)`."""
    query, key, value = _checked_inputs(attention, inputs, cache)
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


def _checked_rotary(layer: str, rotary: Any, size: int) -> Any:
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


def _checked_inputs(attention: Any, inputs: Any, cache: Any) -> list[Array]:
    for name, x in zip(("query", "key_", "value"), inputs, strict=True):
        projection = getattr(attention, f"{name.rstrip('_')}_proj")
        shape = None
        if isinstance(projection, Linear):
            shape = parameter_shape(projection, "weight", 2)
        check_input(attention, x, (None, None if shape is None else shape[1]), name)
    query, key, value = map(jax_array, inputs)
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
    processed, before = process_heads(*heads), [head.shape for head in heads]
    is_many = isinstance(processed, tuple | list)
    after = list(map(jnp.shape, processed)) if is_many else describe_node(processed)
    if before != after:
        raise ShapeError(
            "`process_heads` must return queries, keys and values of the shapes that it "
            f"was given, {before}; it returned {after}."
        )
    return tuple(processed)


def _joined(attention: Any, heads: Array, out_sharding: PartitionSpec | None) -> Array:
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


def _empty_token(
    attention: Any, name: str, in_size: int, size: int, dtype: DTypeLike | None
) -> Array:
    """Zeros of shape `(1, heads, size)`, with the dtype and sharding of projections."""
    projection = getattr(attention, name)
    arrays = [x for x in jax.tree.leaves(projection) if is_inexact_array(x)]
    if dtype is None:
        dtype = dtype_of(projection)
    if dtype not in ("int8", jnp.int8):
        check_dtype("`init_cache`", "dtype", dtype)
    heads = attention.num_kv_heads
    if not any(any(parts(x)) for x in arrays):
        return jnp.zeros((1, heads, size), dtype)
    # A projection of zeros has the right sharding. Within `jit` the arrays must be
    # used, or the program would not know their devices. XLA removes the product itself.
    x = jnp.zeros((1, in_size), dtype_of(projection))
    token = _project(attention, name, x, heads)
    return jnp.where(jnp.zeros((), bool), token, 0).astype(dtype)
