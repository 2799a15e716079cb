"""`dot_product_attention`: attention of queries, keys and values without projections.

The function and `MultiheadAttention` both call `attend`. It calls one of three kernels:
the formula, the formula for a single query with a cache, or
`jax.nn.dot_product_attention`.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._compat.tracer import known_array
from .._core.devices import default_device, platform_of
from .._errors import ShapeError
from .._tree import is_array
from .._tree.nodes import describe_node
from .._typing import ArrayLike, PRNGKeyArray
from ._callables import check_function
from ._dropout import Dropout
from ._keys import split_key
from ._masks import Visible, check_window, combine_masks
from ._norm import accumulation_dtype
from ._shape import as_array, within

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
) -> Array:
    r"""Scaled dot-product attention: for each query, a mean of the values weighted by
    its match with the keys.

    $$\mathrm{softmax}\left(s\, Q K^T + b\right) V$$

    for each head, where $s$ is the `scale` and $b$ the `bias`. The softmax is computed in
    float32 at least. From [Attention Is All You Need](https://arxiv.org/abs/1706.03762)
    (Vaswani et al. 2017). It has no parameters; [`equinox_like.nn.MultiheadAttention`][]
    adds the projections. For a batch, wrap it in `jax.vmap`.

    **Arguments:**

    - `query`: shape `(q, heads, size)`, or `(q, size)` for one head.
    - `key_`: shape `(kv, kv_heads, size)`, or `(kv, size)`. Named so to differ from the
        PRNG key. `kv_heads` divides `heads`: head `n` of the queries reads head `n //
        (heads // kv_heads)` of keys and values.
    - `value`: shape `(kv, kv_heads, value_size)`, or `(kv, value_size)`.
    - `mask`: which query attends to which key: `True` or nonzero where it does. Shape
        `(q, kv)` or `(heads, q, kv)`. See [`equinox_like.nn.combine_masks`][].
    - `dropout`: acts on the weights.
    - `key`, `inference`: for `dropout`.
    - `bias`: added to the scaled products before masking. Shape `(q, kv)` or
        `(heads, q, kv)`; axes of size 1 are broadcast.
    - `scale`: a scalar factor for the products; by default $1/\sqrt{\mathrm{size}}$.
    - `is_causal`: query `i` attends to key `j` only if `j <= i`.
    - `window`: query `i` attends to key `j` only if `j > i - window`.
    - `implementation`: `None`: the formula. `"xla"`, `"cudnn"`:
        `jax.nn.dot_product_attention` with that backend. `"auto"`: the first of `"cudnn"`,
        `"xla"` and `None` that can serve the call. cuDNN needs an NVIDIA GPU of compute
        capability 8.0, float16 or bfloat16, even lengths, and a size that 8 divides and
        that is at most 128; `"auto"` chooses it from jax 0.11.1 on. Within a compiled
        function it stores no weights. `is_causal`, and alone with it a `window`, cost no
        memory; a `mask` or a `bias` has as many elements as the weights. A
        program with `"cudnn"` or `"auto"` that was traced on a host with a GPU is exported
        for one platform at a time.

    **Returns:**

    An array of shape `(q, heads, value_size)`, or `(q, value_size)` for one head. The
    result for a query that attends to no key is defined: the mean of all values. (With
    cuDNN it is not, also if `"auto"` chooses that.)

    **Raises:**

    [`equinox_like.ShapeError`][] if the shapes do not fit together. `RuntimeError` if
    `dropout` is active and there is no `key`. `ValueError` if `window < 1`, or if the
    implementation cannot serve the call.

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
        check_function(name, "dropout", dropout, "a Dropout")
    number = q.shape[1]
    lengths = q.shape[0], k.shape[0]
    check_window(name, window)
    mask = checked_mask(name, "mask", mask, number, lengths)
    bias = checked_mask(name, "bias", bias, number, lengths)
    one_head = jnp.ndim(query) == 2
    if key is not None:
        key = key[None] if one_head else split_key(key, number, name)
    heads, _ = attend(
        q,
        k,
        v,
        Visible(mask, is_causal, window),
        bias,
        scale=scale,
        drop=Drop(dropout, key, inference),
        implementation=implementation,
    )
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
    return _weights(query, key, mask, None, None)


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
        with within("dropout"):
            return self.dropout(weights, key=key, inference=self.inference)


def attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Visible,
    bias: Array | None,
    *,
    scale: ArrayLike | None = None,
    drop: Drop,
    implementation: Implementation,
    return_weights: bool = False,
) -> tuple[Array, Array | None]:
    """The heads' outputs `(q, heads, size)`, and weights `(heads, q, kv)` or `None`."""
    obstacle = _obstacle(q, k, v, drop, return_weights)
    name = _chosen(implementation, obstacle, q, k)
    if name == "cudnn":
        heads = functools.partial(_cudnn_kernel, q, k, v, visible, bias, scale)
        if implementation != "auto" or known_array(q) is not None:
            return heads(), None

        # The program may be compiled for another platform than that of new arrays.
        def elsewhere():
            name = "xla" if _xla_serves(q) else None
            options: Any = {"scale": scale, "drop": drop, "implementation": name}
            return attend(q, k, v, visible, bias, **options)[0]

        return lax.platform_dependent(cuda=heads, default=elsewhere), None
    mask = visible.as_mask(q.shape[0], k.shape[0])
    if name == "xla":
        return _xla_kernel(q, k, v, mask, bias, scale), None
    # A cache is usually long.
    cached = visible.positions is not None
    if cached and q.shape[0] == 1:
        return _one_query_kernel(q, k, v, mask, bias, scale, drop)
    return _formula_kernel(q, k, v, mask, bias, scale, drop)


# Validation


def _checked_heads(*arrays: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values of shape `(length, heads, size)`."""
    ranks = [x.ndim for x in arrays]
    if ranks not in ([2] * 3, [3] * 3):
        raise ShapeError(
            "`dot_product_attention` takes arrays of shape (length, heads, size), or "
            "(length, size) for one head; got "
            + ", ".join(str(x.shape) for x in arrays)
            + ". For a batch, wrap it in `jax.vmap`."
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


def checked_mask(
    layer: str, name: str, mask: Any, heads: int, lengths: tuple[int, int]
) -> Array | None:
    """A mask or a bias as a JAX array, after validating its type and shape."""
    if mask is None:
        return None
    if not is_array(mask):
        raise TypeError(
            f"{layer} takes an array as `{name}`; got {describe_node(mask)}."
        )
    if name == "bias" and mask.dtype == bool:
        raise TypeError(
            f"{layer} takes numbers as `bias`, which are added; got "
            f"{describe_node(mask)}. Pass it as `mask=`."
        )
    wanted = lengths, (heads, *lengths)
    if mask.shape in wanted:
        return jnp.asarray(mask)
    if name == "bias" and any(_broadcasts(mask.shape, shape) for shape in wanted):
        return jnp.asarray(mask)
    raise ShapeError(
        f"{layer} takes a `{name}` of shape {wanted[0]}, in (queries, keys), or "
        f"{wanted[1]}, with the heads in front, but was given shape {mask.shape}."
    )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) == len(to) and all(
        a in (1, b) for a, b in zip(shape, to, strict=True)
    )


# The kernels


def _scaled(query: Array, scale: ArrayLike | None) -> Array:
    if scale is None:
        return query / math.sqrt(query.shape[-1])
    return query * jnp.asarray(scale, query.dtype)


def _softmax(logits: Array, mask: Array | None, bias: Array | None) -> Array:
    least = jnp.finfo(logits.dtype).min
    if bias is not None:
        # The softmax of a row of -inf would be NaN.
        logits = jnp.maximum(logits + bias.astype(logits.dtype), least)
    if mask is not None:
        logits = jnp.where(mask, logits, least)
    return jax.nn.softmax(logits.astype(accumulation_dtype(logits)))


def _weights(query: Array, key: Array, mask: Any, bias: Any, scale: Any) -> Array:
    logits = jnp.einsum("sd,Sd->sS", _scaled(query, scale), key)
    return _softmax(logits, mask, bias).astype(logits.dtype)


def _formula_kernel(
    q: Array,
    k: Array,
    v: Array,
    visible: Array | None,
    bias: Array | None,
    scale: ArrayLike | None,
    drop: Drop,
) -> tuple[Array, Array]:
    def head(q, k, v, visible, bias, key):
        weights = drop.on_head(_weights(q, k, visible, bias, scale), key)
        return jnp.einsum("sS,Sd->sd", weights, v), weights

    number, shared = q.shape[1], k.shape[1]
    if bias is not None and bias.ndim == 3 and bias.shape[0] == 1:  # one for all heads
        bias = bias[0]
    axes = [0 if x is not None and x.ndim == 3 else None for x in (visible, bias)]
    axes.append(None if drop.keys is None else 0)
    if shared == number:
        all_heads = jax.vmap(head, in_axes=(1, 1, 1, *axes), out_axes=(1, 0))
        return all_heads(q, k, v, visible, bias, drop.keys)
    # The heads of a group share keys and values; nested `vmap`s do not repeat these.
    group = jax.vmap(head, in_axes=(1, None, None, *axes), out_axes=(1, 0))
    groups = jax.vmap(group, in_axes=(1, 1, 1, *axes), out_axes=(1, 0))
    rest = [
        x if axis is None else _in_groups(x, 0, shared)
        for x, axis in zip((visible, bias, drop.keys), axes, strict=True)
    ]
    heads, weights = groups(_in_groups(q, 1, shared), k, v, *rest)
    weights = weights.reshape(number, *weights.shape[2:])
    return heads.reshape(q.shape[0], number, v.shape[2]), weights


def _in_groups(x: Any, axis: int, number: int) -> Any:
    """Splits the axis of heads into two: the groups, and the heads of each group."""
    # Not -1, which is ambiguous if there are no queries.
    of_each = x.shape[axis] // number
    return x.reshape(*x.shape[:axis], number, of_each, *x.shape[axis + 1 :])


def _one_query_kernel(
    q: Array,
    k: Array,
    v: Array,
    visible: Array | None,
    bias: Array | None,
    scale: ArrayLike | None,
    drop: Drop,
) -> tuple[Array, Array]:
    """The formula for one query, by elementwise products and sums.

    A matrix product would first copy the whole cache, to move the heads to the front.
    """
    number, shared = q.shape[1], k.shape[1]

    def summed(a, b, axis):
        with jax.numpy_dtype_promotion("standard"):
            accumulate = jnp.result_type(a.dtype, b.dtype, jnp.float32)
        return jnp.sum(a.astype(accumulate) * b.astype(accumulate), axis)

    query = _in_groups(_scaled(q, scale), 1, shared)
    logits = summed(query, k[:, :, None], -1)
    logits = logits.reshape(k.shape[0], number).T[:, None]  # (heads, 1, kv)
    visible, bias = (
        x[None] if x is not None and x.ndim == 2 else x for x in (visible, bias)
    )
    # The dtypes are those of the products in `_formula_kernel`.
    weights = _softmax(logits, visible, bias)
    weights = weights.astype(jnp.result_type(q.dtype, k.dtype))
    axes = 0, None if drop.keys is None else 0
    weights = jax.vmap(drop.on_head, axes)(weights, drop.keys)
    shares = _in_groups(weights[:, 0].T, 1, shared)[..., None]
    heads = summed(shares, v[:, :, None], 0)
    heads = heads.astype(jnp.result_type(weights.dtype, v.dtype))
    return heads.reshape(1, number, v.shape[2]), weights


def _xla_kernel(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    bias: Array | None,
    scale: ArrayLike | None,
) -> Array:
    if bias is not None:
        # JAX would return NaN for a query whose row is -inf throughout.
        is_masked = jnp.isneginf(bias)
        mask = combine_masks(mask, ~is_masked)
        bias = jnp.where(is_masked, 0, bias)
    return _jax_kernel("xla", q, k, v, scale, mask=mask, bias=bias)


def _cudnn_kernel(
    q: Array,
    k: Array,
    v: Array,
    visible: Visible,
    bias: Array | None,
    scale: ArrayLike | None,
) -> Array:
    shape = q.shape[1], q.shape[0], k.shape[0]
    causal, window, rest = _for_cudnn(visible, bias, *shape[1:])
    # Its rules for `jax.vmap` do not broadcast over the heads.
    mask, bias = (
        None if x is None else jnp.broadcast_to(x, shape)
        for x in (rest.as_mask(*shape[1:]), bias)
    )
    return _jax_kernel(
        "cudnn",
        q,
        k,
        v,
        scale,
        mask=mask,
        bias=None if bias is None else bias.astype(q.dtype),
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
    )


def _for_cudnn(
    visible: Visible, bias: Array | None, queries: int, keys: int
) -> tuple[bool, int | None, Visible]:
    """The causality and window that cuDNN applies itself, and the rest, for a mask.

    Its own need no memory, whereas a mask has as many elements as the weights.
    """
    if not visible.is_causal or visible.positions is not None:
        return False, None, visible
    rest = visible._replace(is_causal=False)
    # Only without a mask or bias, and for as many keys as queries, is a window its own.
    if visible.mask is None and bias is None and queries == keys:
        return True, visible.window, rest._replace(window=None)
    return True, None, rest


def _jax_kernel(
    name: Any,
    q: Array,
    k: Array,
    v: Array,
    scale: ArrayLike | None,
    *,
    mask: Array | None,
    bias: Array | None,
    **options: Any,
) -> Array:
    def with_batch(x: Any) -> Any:
        return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)

    if scale is not None:  # JAX only takes a Python number, but this may be traced
        q = _scaled(q, scale)
    # JAX's function mixes dtypes, which would fail under "strict" dtype promotion.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            *(with_batch(x) for x in (q, k, v)),
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
        raise ValueError(
            f"{layer} takes None, 'xla', 'cudnn' or 'auto' as `implementation`; got "
            f"{implementation!r}."
        )
    return implementation


def _chosen(
    name: Implementation,
    obstacle: str | None,
    q: Array,
    k: Array,
) -> Literal["xla", "cudnn"] | None:
    """The implementation for a call; `None` is the formula."""
    checked_implementation("Attention", name)
    if name == "auto":
        if obstacle is not None:
            return None
        if _cudnn_serves(q, k):
            return "cudnn"
        return "xla" if _xla_serves(q) else None
    if name is not None and obstacle is not None:
        raise ValueError(
            f"The implementation {name!r} of attention cannot be used for this call: "
            f"{obstacle}. Use `implementation=None`, or 'auto', which chooses for each "
            "call."
        )
    return name


def _obstacle(
    q: Array, k: Array, v: Array, drop: Drop, return_weights: bool
) -> str | None:
    """Why JAX's own kernels cannot be used for a call."""
    if q.shape[2] != v.shape[2]:
        return f"its queries have size {q.shape[2]} and its values size {v.shape[2]}"
    if not q.dtype == k.dtype == v.dtype:
        return (
            f"its queries, keys and values have the dtypes {q.dtype}, {k.dtype} and "
            f"{v.dtype}"
        )
    if drop.is_active():
        return "its dropout is active"
    if return_weights:
        return "it does not return the weights"
    return "there is no query" if q.shape[0] == 0 else None


def _cudnn_serves(q: Array, k: Array) -> bool:
    known = known_array(q)
    device = default_device() if known is None else next(iter(known.devices()))
    if platform_of(device) != "cuda" or float(device.compute_capability) < 8:
        return False
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return False
    # Before jax 0.11.1, `jax.vmap` over some of the arrays fails.
    if jax.__version_info__ < (0, 11, 1):
        return False
    # With jax 0.10 to 0.12, it has no gradient for odd lengths.
    lengths_are_even = q.shape[0] % 2 == 0 and k.shape[0] % 2 == 0
    return lengths_are_even and q.shape[2] % 8 == 0 and q.shape[2] <= 128


def _xla_serves(q: Array) -> bool:
    # In double precision, it would compute the softmax in float32. In float16, with jax
    # 0.10 to 0.12, it asks for products that only some GPUs have, and not in all shapes.
    return q.dtype not in (jnp.float16, jnp.float64)
