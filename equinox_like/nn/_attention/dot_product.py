"""`dot_product_attention`, and `attend`, which runs the kernel that a call asks for.

There are four kernels: the formula, the formula for a single query with a cache, and the
two of `jax.nn.dot_product_attention`.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..._compat.arrays import default_device, platform_of
from ..._compat.tracing import known_array
from ..._errors import ShapeError
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.checks import (
    as_array,
    as_number,
    check_layer,
    check_scalar,
    wrong_shape,
    wrong_value,
)
from .._base.init import key_named
from .._base.precision import accumulation_dtype, in_float32, is_half, product_with_rows
from .._base.sharding import explicit_mesh, parts, split_along
from .._layers.elementwise import Dropout
from .masks import Visible, check_window, checked_mask, combine_masks

Implementation = Literal["xla", "cudnn", "auto"] | None


def dot_product_attention(
    query: ArrayLike,
    key_: ArrayLike,
    value: ArrayLike,
    mask: Array | None = None,
    dropout: Dropout | None = None,
    *,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    bias: Array | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    window: int | None = None,
    implementation: Implementation = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
) -> Array:
    r"""Scaled dot-product attention: for each query, a mean of the values weighted by
    its match with the keys.

    Up to the softmax, it is computed in float32 at least. From [Attention Is All You Need](
    https://arxiv.org/abs/1706.03762) (Vaswani et al. 2017). It has no parameters;
    [`equinox_like.nn.MultiheadAttention`][] adds the projections. For a batch, wrap it in
    `jax.vmap`.

    **Arguments:**

    - `query`: shape `(q, heads, size)`, or `(q, size)` for one head.
    - `key_`: shape `(kv, kv_heads, size)`, or `(kv, size)`. Named so to differ from the
        PRNG key. `kv_heads` divides `heads`: head `n` of the queries reads head `n //
        (heads // kv_heads)` of keys and values.
    - `value`: shape `(kv, kv_heads, value_size)`, or `(kv, value_size)`.
    - `mask`: which query attends to which key: `True` or nonzero where it does. Shape
        `(q, kv)` or `(heads, q, kv)`. See [`equinox_like.nn.combine_masks`][].
    - `dropout`: a [`equinox_like.nn.Dropout`][] for the weights.
    - `key`, `inference`: for `dropout`.
    - `bias`: added to the scaled products before masking. Shape `(q, kv)` or
        `(heads, q, kv)`; axes of size 1 are broadcast.
    - `scale`: a scalar factor for the products; by default `1 / sqrt(size)`.
    - `is_causal`: if `True`, query `i` attends to key `j` only if `j <= i`.
    - `window`: query `i` attends to key `j` only if `j > i - window`.
    - `implementation`: `None`: the formula. `"xla"`, `"cudnn"`:
        `jax.nn.dot_product_attention` with that backend. `"auto"`: the first of `"cudnn"`,
        `"xla"` and `None` that supports the call. cuDNN needs an NVIDIA GPU of compute
        capability 8.0, float16 or bfloat16, even lengths, and a size that 8 divides and
        that is at most 128; `"auto"` chooses it from jax 0.11.1 on. Within a compiled
        function it stores no weights. `is_causal`, with or without a `window`, costs no
        memory; a `mask` or a `bias` has as many elements as the weights, and a `bias` is
        added in the dtype of the queries. A program with `"cudnn"` or `"auto"` that was
        traced on a host with a GPU is exported for one platform at a time, and only with
        `disabled_checks`. In float64, `"xla"` has the accuracy of float32, since JAX
        computes its softmax in float32; `"auto"` does not choose it. With a `softcap` or
        `sinks`, only `None` and `"auto"`, which then takes the formula.
    - `softcap`: a positive number $c$ that bounds the scaled products: each product $x$
        becomes $c \tanh(x / c)$, before the bias and the mask. From [Gemma 2](
        https://arxiv.org/abs/2408.00118) (Gemma Team 2024).
    - `sinks`: shape `(heads,)`. For each head, the logit of one more key, which all
        queries attend to, with a value of zeros; so the weights of a query sum to less
        than 1. It is neither scaled, capped nor masked. From [gpt-oss](
        https://arxiv.org/abs/2508.10925) (OpenAI 2025).

    **Returns:**

    An array of shape `(q, heads, value_size)`, or `(q, value_size)` for one head: for each
    head, with $s$ the `scale` and $b$ the `bias`,

    $$\mathrm{softmax}\left(s\, Q K^T + b\right) V.$$

    The result for a query that attends to no key is defined: the mean of all values, or
    zero if there are `sinks`. (With cuDNN it is not, even if `"auto"` chooses it.)

    **Raises:**

    [`equinox_like.ShapeError`][] if the shapes do not fit together. `TypeError` if `mask`
    or `bias` is not an array, or `bias` is an array of bools.
    [`equinox_like.MissingKeyError`][] if `dropout` is active and there is no `key`.
    `ValueError` if `window < 1`, if `softcap` is not a positive number, or if the
    implementation does not support the call, as `"xla"` in a compiled function of float16
    on a CPU; JAX's own `RuntimeError` for `"cudnn"` on a host without it.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        query, key, value = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        mask = eqx.nn.padding_mask(3, 5)
        out = eqx.nn.dot_product_attention(query, key, value, mask, is_causal=True)
        assert out.shape == (5, 2, 4)
        assert jnp.allclose(out[0], value[0])
        ```
    """
    name = "`dot_product_attention`"
    arrays = {"query": query, "key_": key_, "value": value}
    q, k, v = _checked_heads(*(as_array(name, *each) for each in arrays.items()))
    if dropout is not None:
        check_layer(name, "dropout", dropout, "a Dropout")
    if scale is not None:
        check_scalar(name, "scale", scale)
    number = q.shape[1]
    lengths = q.shape[0], k.shape[0]
    check_window(name, window)
    mask = checked_mask(name, "mask", mask, number, lengths)
    bias = checked_mask(name, "bias", bias, number, lengths)
    one_head = jnp.ndim(query) == 2
    if key is not None:
        with key_named(key, name):
            key = key[None] if one_head else jax.random.split(key, number)
    visible, drop = Visible(mask, is_causal, window), Drop(dropout, key, inference)
    softcap = checked_softcap(name, softcap)
    if sinks is not None:
        sinks = as_array(name, "sinks", sinks)
        if sinks.shape != (number,):
            raise wrong_shape(name, f"shape {(number,)}", "sinks", sinks.shape)
    inputs = Inputs(q, k, v, visible, bias, scale, drop, softcap, sinks)
    heads, _ = attend(inputs, implementation)
    return heads[:, 0] if one_head else heads


def dot_product_attention_weights(
    query: Array, key: Array, mask: Array | None = None
) -> Array:
    """How much each query attends to each key, in one head.

    `query` has shape `(q, size)`, `key` and `mask` shape `(kv, size)` and `(q, kv)`. The
    result has shape `(q, kv)` and the dtype of the query; its rows sum to 1.
    """
    lengths = query.shape[0], key.shape[0]
    mask = checked_mask("`dot_product_attention_weights`", "mask", mask, 1, lengths)
    return attention_weights(query, key, None, mask, None, None, None)


# Validation


def _checked_heads(*arrays: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values of shape `(length, heads, size)`."""
    ranks = [x.ndim for x in arrays]
    if ranks not in ([2] * 3, [3] * 3):
        raise ShapeError(
            "`dot_product_attention` takes arrays of shape (length, heads, size), or "
            f"(length, size) for one head; got {', '.join(str(x.shape) for x in arrays)}. "
            "For a batch, wrap it in `jax.vmap`."
        )
    q, k, v = (x[:, None] if x.ndim == 2 else x for x in arrays)
    obstacle = None
    if q.shape[2] != k.shape[2]:
        obstacle = f"queries of size {q.shape[2]} and keys of size {k.shape[2]}"
    elif k.shape[:2] != v.shape[:2]:
        obstacle = f"keys and values of (length, heads) {k.shape[:2]} and {v.shape[:2]}"
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        obstacle = f"{q.shape[1]} heads of queries and {k.shape[1]} of keys"
    elif k.shape[0] == 0:
        obstacle = "no keys, so there is nothing to average"
    if obstacle is not None:
        raise ShapeError(
            "`dot_product_attention` takes `query`, `key_` and `value` that fit together; "
            f"got {obstacle}."
        )
    return q, k, v


def checked_softcap(taker: str, softcap: Any) -> float | None:
    """Returns `softcap` after validating it."""
    if softcap is None:
        return None
    wanted = "a finite number > 0, or None"
    return as_number(taker, "softcap", softcap, wanted, lambda x: 0 < x < math.inf)


class Drop(NamedTuple):
    """The dropout of the attention weights, with a PRNG key for each head."""

    dropout: Dropout | None
    keys: Any
    inference: bool | None

    def is_active(self) -> bool:
        # A function in place of a `Dropout` is always called.
        if self.dropout is None or not hasattr(self.dropout, "is_active"):
            return self.dropout is not None
        return self.dropout.is_active(self.inference)

    def on_head(self, weights: Array, key: Any) -> Array:
        if self.dropout is None:
            return weights
        return self.dropout(weights, key=key, inference=self.inference)


class Inputs(NamedTuple):
    """What attention is computed from."""

    q: Array  # (q, heads, size)
    k: Array  # (kv, kv_heads, size)
    v: Array  # (kv, kv_heads, value_size)
    visible: Visible
    bias: Array | None
    scale: ArrayLike | None
    drop: Drop
    softcap: float | None = None
    sinks: Array | None = None  # (heads,)

    @property
    def mask(self) -> Array | None:
        return self.visible.as_mask(self.q.shape[0], self.k.shape[0])


def attend(
    inputs: Inputs, implementation: Implementation, return_weights: bool = False
) -> tuple[Array, Array | None]:
    """The heads' outputs `(q, heads, size)`, and weights `(heads, q, kv)` or `None`."""
    inputs = _split_alike(inputs)
    q = inputs.q
    name = _chosen(implementation, inputs, return_weights)
    if name == "cudnn":
        heads = functools.partial(_cudnn_kernel, inputs)
        if implementation != "auto" or known_array(q) is not None:
            return heads(), None

        # The program may be compiled for another platform than that of new arrays.
        def elsewhere():
            return attend(inputs, "xla" if _xla_serves(q) else None)[0]

        return lax.platform_dependent(cuda=heads, default=elsewhere), None
    if name == "xla":
        return _xla_kernel(inputs), None
    # A cache is usually long.
    cached = inputs.visible.positions is not None
    if cached and q.shape[0] == 1:
        return _one_query_kernel(inputs)
    return _formula_kernel(inputs)


def _split_alike(inputs: Inputs) -> Inputs:
    """`inputs`, whose heads are split alike over the explicit axes of a mesh, by the
    queries. Otherwise `vmap` over the heads would fail."""
    q, k, v, visible, bias, _, drop, _, sinks = inputs
    if explicit_mesh(q, k, v, visible.mask, bias, sinks) is None:
        return inputs
    heads, shared = parts(q)[1], parts(_in_groups(q, 1, k.shape[1]))[1]

    def each(x: Any) -> Any:
        if x is None or x.ndim == 2 or x.shape[0] == 1:
            return x
        return split_along(x, 0, heads)

    if drop.keys is not None:
        drop = drop._replace(keys=split_along(drop.keys, 0, heads))
    k, v = split_along(k, 1, shared), split_along(v, 1, shared)
    visible = visible._replace(mask=each(visible.mask))
    if sinks is not None:
        sinks = split_along(sinks, 0, heads)
    changed: dict[str, Any] = {"visible": visible, "bias": each(bias), "sinks": sinks}
    return inputs._replace(k=k, v=v, drop=drop, **changed)


# The kernels


def _scaled(x: Array, size: int, scale: ArrayLike | None) -> Array:
    return x / math.sqrt(size) if scale is None else x * jnp.asarray(scale, x.dtype)


def _logits(query: Array, key: Array, scale: Any, product: Any) -> Array:
    size = query.shape[-1]
    if is_half(query, key):  # a scaled query would be rounded
        return _scaled(product(query, key), size, scale)
    return product(_scaled(query, size, scale), key)


def _softmax(
    logits: Array, mask: Any, bias: Any, softcap: float | None, sink: Array | None
) -> Array:
    # Before the bias is added: in half precision, large biases would be rounded.
    logits = logits.astype(accumulation_dtype(logits))
    bias = None if bias is None else bias.astype(logits.dtype)
    if softcap is None and sink is None:
        return jax.nn.softmax(_biased_and_masked(logits, mask, bias))
    sink = jnp.asarray(-jnp.inf if sink is None else sink, logits.dtype)
    return _capped_softmax(softcap, logits, mask, bias, sink)[0]


def _biased_and_masked(logits: Array, mask: Any, bias: Any) -> Array:
    least = jnp.finfo(logits.dtype).min
    if bias is not None:
        # The softmax of a row of -inf would be NaN.
        logits = jnp.maximum(logits + bias, least)
    return logits if mask is None else jnp.where(mask, logits, least)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _capped_softmax(
    softcap: float | None, logits: Array, mask: Any, bias: Any, sink: Array
) -> tuple[Array, Array]:
    """The softmax with a cap and a sink, and the logarithm of each row's sum.

    JAX would keep the capped logits for the derivative. Here it keeps the weights alone,
    as for a softmax without a cap, and computes the logits from them.
    """
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = _biased_and_masked(logits, mask, bias)
    greatest = jnp.maximum(jnp.max(logits, -1, keepdims=True), sink)
    exponentials = jnp.exp(logits - greatest)
    total = jnp.sum(exponentials, -1, keepdims=True) + jnp.exp(sink - greatest)
    return exponentials / total, greatest + jnp.log(total)


@_capped_softmax.defjvp
def _(softcap: float | None, primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, mask, bias, sink = primals
    d_logits, _, d_bias, d_sink = tangents
    weights, norm = _capped_softmax(softcap, *primals)

    # A checkpoint, so that JAX keeps what it takes, and not what is computed from that.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tangent(weights, norm, mask, bias, sink, d_logits, d_bias, d_sink):
        if softcap is not None:
            d_logits = d_logits * _slope(weights, norm, bias, softcap)
        if bias is not None:
            is_finite = bias > jnp.finfo(bias.dtype).min
            d_logits = jnp.where(is_finite, d_logits + d_bias, 0)
        if mask is not None:
            d_logits = jnp.where(mask, d_logits, 0)
        mean = jnp.sum(weights * d_logits, -1, keepdims=True)
        mean = mean + jnp.exp(sink - norm) * d_sink
        return weights * (d_logits - mean), mean

    more = mask, bias, sink, d_logits, d_bias, d_sink
    return (weights, norm), tangent(weights, norm, *more)


def _slope(weights: Array, norm: Array, bias: Any, softcap: float) -> Array:
    """The derivative of the cap, computed from the weights."""
    is_seen = weights > 0
    logits = jnp.log(jnp.where(is_seen, weights, 1)) + norm
    logits = logits if bias is None else logits - bias
    # A row that sees nothing, or has a large bias, does not tell what the logits were.
    tanh = jnp.clip(logits / softcap, -1, 1)
    return jnp.where(is_seen, 1 - jnp.square(tanh), 0)


def attention_weights(query: Array, key: Array, scale: Any, *rest: Any) -> Array:
    """The weights of a head; `rest` are the arguments of `_softmax` after the logits."""
    logits = _logits(query, key, scale, product_with_rows)
    return _softmax(logits, *rest).astype(jnp.result_type(query, key))


def _formula_kernel(inputs: Inputs) -> tuple[Array, Array]:
    q, k, v, _, bias, scale, drop, softcap, sinks = inputs

    def head(q, k, v, mask, bias, key, sink):
        weights = attention_weights(q, k, scale, mask, bias, softcap, sink)
        weights = drop.on_head(weights, key)
        return jnp.einsum("sS,Sd->sd", weights, v), weights

    number, shared, mask = q.shape[1], k.shape[1], inputs.mask
    if bias is not None and bias.ndim == 3 and bias.shape[0] == 1:  # one for all heads
        bias = bias[0]
    more = mask, bias, drop.keys, sinks
    axes = [0 if x is not None and x.ndim == 3 else None for x in (mask, bias)]
    axes += [None if x is None else 0 for x in (drop.keys, sinks)]
    if shared == number:
        all_heads = jax.vmap(head, in_axes=(1, 1, 1, *axes), out_axes=(1, 0))
        return all_heads(q, k, v, *more)
    # The heads of a group share keys and values; nested `vmap`s do not repeat these.
    group = jax.vmap(head, in_axes=(1, None, None, *axes), out_axes=(1, 0))
    groups = jax.vmap(group, in_axes=(1, 1, 1, *axes), out_axes=(1, 0))
    more = [
        x if axis is None else _in_groups(x, 0, shared)
        for x, axis in zip(more, axes, strict=True)
    ]
    heads, weights = groups(_in_groups(q, 1, shared), k, v, *more)
    weights = weights.reshape(number, *weights.shape[2:])
    return heads.reshape(q.shape[0], number, v.shape[2]), weights


def _in_groups(x: Any, axis: int, number: int) -> Any:
    """Splits the axis of heads into two: the groups, and the heads of each group."""
    # Not -1, which is ambiguous if there are no queries.
    of_each = x.shape[axis] // number
    return x.reshape(*x.shape[:axis], number, of_each, *x.shape[axis + 1 :])


def _one_query_kernel(inputs: Inputs) -> tuple[Array, Array]:
    """The formula for one query, by elementwise products and sums.

    On a CPU, a matrix product would first copy the whole cache, to move the heads to the
    front. On a GPU the two take about the same time.
    """
    q, k, v, _, bias, scale, drop, softcap, sinks = inputs
    number, shared, mask = q.shape[1], k.shape[1], inputs.mask

    def summed(a, b, axis):
        accumulate = accumulation_dtype(a, b)
        return jnp.sum(a.astype(accumulate) * b.astype(accumulate), axis)

    def product(q, k):
        return summed(_in_groups(q, 1, shared), k[:, :, None], -1)

    logits = _logits(q, k, scale, product)
    logits = logits.reshape(k.shape[0], number).T[:, None]  # (heads, 1, kv)
    mask, bias = (x[None] if x is not None and x.ndim == 2 else x for x in (mask, bias))
    sinks = None if sinks is None else sinks[:, None, None]
    # The dtypes are those of the products in `_formula_kernel`.
    weights = _softmax(logits, mask, bias, softcap, sinks)
    weights = weights.astype(jnp.result_type(q.dtype, k.dtype))
    axes = 0, None if drop.keys is None else 0
    weights = jax.vmap(drop.on_head, axes)(weights, drop.keys)
    shares = _in_groups(weights[:, 0].T, 1, shared)[..., None]
    heads = summed(shares, v[:, :, None], 0)
    heads = heads.astype(jnp.result_type(weights.dtype, v.dtype))
    return heads.reshape(1, number, v.shape[2]), weights


def _xla_kernel(inputs: Inputs) -> Array:
    mask, bias = inputs.mask, inputs.bias
    if bias is not None:
        # JAX would return NaN for a query whose row is -inf throughout.
        is_masked = jnp.isneginf(bias)
        mask = combine_masks(mask, ~is_masked)
        bias = jnp.where(is_masked, 0, bias)
    return _jax_kernel("xla", inputs, mask, bias)


def _cudnn_kernel(inputs: Inputs) -> Array:
    q, visible, bias, window = inputs.q, inputs.visible, inputs.bias, None
    shape = q.shape[1], q.shape[0], inputs.k.shape[0]
    # Causality and a window of its own need no memory, whereas a mask has as many elements
    # as the weights. It has a window only without a mask or bias, and for as many keys as
    # queries.
    is_causal = visible.is_causal and visible.positions is None
    if is_causal:
        if visible.mask is None and bias is None and shape[1] == shape[2]:
            window, visible = visible.window, visible._replace(window=None)
        visible = visible._replace(is_causal=False)
    # Its rules for `jax.vmap` do not broadcast over the heads.
    mask, bias = (
        None if x is None else jnp.broadcast_to(x, shape)
        for x in (visible.as_mask(*shape[1:]), bias)
    )
    bias = None if bias is None else bias.astype(q.dtype)
    size = None if window is None else (window - 1, 0)
    options: dict[str, Any] = {"is_causal": is_causal, "local_window_size": size}
    return _jax_kernel("cudnn", inputs, mask, bias, **options)


def _jax_kernel(
    name: Any, inputs: Inputs, mask: Array | None, bias: Array | None, **options: Any
) -> Array:
    q, scale = inputs.q, inputs.scale

    def with_batch(x: Any) -> Any:
        return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)

    if scale is not None:  # JAX only takes a Python number, but this may be traced
        q = in_float32(lambda q: _scaled(q, q.shape[-1], scale), q)
    # JAX's function mixes dtypes, which would fail under "strict" dtype promotion.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            *(with_batch(x) for x in (q, inputs.k, inputs.v)),
            bias=with_batch(bias),
            mask=with_batch(mask),
            scale=None if scale is None else 1.0,
            implementation=name,
            **options,
        )
    return out.reshape(out.shape[1:])


# The implementation


def checked_implementation(layer: str, implementation: Any) -> Implementation:
    """Returns `implementation` after validating it."""
    if implementation not in (None, "xla", "cudnn", "auto"):
        wanted = "None, 'xla', 'cudnn' or 'auto'"
        raise wrong_value(layer, wanted, "implementation", implementation)
    return implementation


def _chosen(
    name: Implementation, inputs: Inputs, return_weights: bool
) -> Literal["xla", "cudnn"] | None:
    """The implementation for a call; `None` is the formula."""
    checked_implementation("Attention", name)
    obstacle = _obstacle(inputs, return_weights)
    if name == "auto":
        if obstacle is not None:
            return None
        if _cudnn_serves(inputs):
            return "cudnn"
        return "xla" if _xla_serves(inputs.q) else None
    if name is not None and obstacle is not None:
        raise ValueError(
            f"The implementation {name!r} of attention cannot be used for this call: "
            f"{obstacle}. Use `implementation=None`, or 'auto'."
        )
    return name


def _obstacle(inputs: Inputs, return_weights: bool) -> str | None:
    """Why JAX's own kernels cannot be used for a call."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.shape[2] != v.shape[2]:
        return f"its queries have size {q.shape[2]} and its values size {v.shape[2]}"
    if not q.dtype == k.dtype == v.dtype:
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        return f"its queries, keys and values have the dtypes {dtypes}"
    if inputs.drop.is_active():
        return "its dropout is active"
    if return_weights:
        return "it does not return the weights"
    if inputs.softcap is not None:
        return "it has a softcap"
    if inputs.sinks is not None:
        return "it has sinks"
    return "there is no query" if q.shape[0] == 0 else None


# Before jax 0.11.1, `jax.vmap` over only some of the arrays fails with cuDNN.
_CAN_BE_MAPPED = jax.__version_info__ >= (0, 11, 1)


def _cudnn_serves(inputs: Inputs) -> bool:
    q, k = inputs.q, inputs.k
    known = known_array(q)
    device = default_device() if known is None else next(iter(known.devices()))
    if platform_of(device) != "cuda" or float(device.compute_capability) < 8:
        return False
    if q.dtype not in (jnp.float16, jnp.bfloat16) or not _CAN_BE_MAPPED:
        return False
    # With jax 0.10 to 0.12, it has no gradient for odd lengths.
    lengths_are_even = q.shape[0] % 2 == 0 and k.shape[0] % 2 == 0
    return lengths_are_even and q.shape[2] % 8 == 0 and q.shape[2] <= 128


def _xla_serves(q: Array) -> bool:
    # In double precision, it would compute the softmax in float32. In float16, with jax
    # 0.10 to 0.12, it asks for products that only some GPUs have, and not in all shapes.
    # In bfloat16, its gradient mixes dtypes, also if the call is under "standard".
    promotion = jax.config.jax_numpy_dtype_promotion  # pyright: ignore[reportAttributeAccessIssue]
    if promotion == "strict" and q.dtype == jnp.bfloat16:
        return False
    return q.dtype not in (jnp.float16, jnp.float64)
