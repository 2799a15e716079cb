"""`dot_product_attention`: attention of queries, keys and values without projections.

The function and `MultiheadAttention` both call `attend`, in `_attend.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._errors import ShapeError
from ..._tree import is_array
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.arguments import check_layer, check_scalar, wrong_type
from .._base.init import key_named
from .._base.inputs import as_array
from .._layers.elementwise import Dropout
from .attend import Drop, Implementation, Inputs, attend, attention_weights
from .masks import Visible, check_window


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
        computes its softmax in float32; `"auto"` does not choose it.

    **Returns:**

    An array of shape `(q, heads, value_size)`, or `(q, value_size)` for one head: for each
    head, with $s$ the `scale` and $b$ the `bias`,

    $$\mathrm{softmax}\left(s\, Q K^T + b\right) V.$$

    The result for a query that attends to no key is defined: the mean of all values. (With
    cuDNN it is not, even if `"auto"` chooses it.)

    **Raises:**

    [`equinox_like.ShapeError`][] if the shapes do not fit together. `TypeError` if `mask`
    or `bias` is not an array, or `bias` is an array of bools.
    [`equinox_like.MissingKeyError`][] if `dropout` is active and there is no `key`.
    `ValueError` if `window < 1`, or if the implementation does not support the call, as
    `"xla"` in a compiled function of float16 on a CPU; JAX's own `RuntimeError` for
    `"cudnn"` on a host without it.

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
    heads, _ = attend(Inputs(q, k, v, visible, bias, scale, drop), implementation)
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
    return attention_weights(query, key, mask, None, None)


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
        given = f"{describe_node(mask)}. Pass bools as `mask=`."
        raise TypeError(
            f"{layer} takes numbers as `bias`, which are added; got {given}"
        )
    wanted = lengths, (heads, *lengths)
    if mask.shape in wanted:
        return jnp.asarray(mask)
    if name == "bias" and any(_broadcasts(mask.shape, shape) for shape in wanted):
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
