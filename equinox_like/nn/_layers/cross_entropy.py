"""`linear_cross_entropy`: the loss of a linear output layer, block by block.

A scan goes over blocks of the vocabulary. It carries the logsumexp of the logits so far,
and the logit of the label. Its step is checkpointed, so the backward pass computes the
logits of a block again, and no more than a block of them is stored. The scan as a whole
has no rule of its own, so it can be transformed as a layer can: under `jax.vmap` over `x`,
the gradient of the weight is summed in a matrix product.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._errors import ShapeError
from ..._typing import ArrayLike
from .._base.checks import as_array, as_number, as_size, wrong_type
from .._base.precision import accumulation_dtype, cast_to_precision, product_with_rows
from .._base.sharding import parts, split_as, varying_as

_NAME = "`linear_cross_entropy`"


@jax.named_scope("eqx.nn.linear_cross_entropy")
def linear_cross_entropy(
    x: ArrayLike,
    weight: Any,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    block: int = 2048,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array:
    r"""The cross-entropy of a linear output layer, for each token, without its logits.

    For a large vocabulary, the logits of a batch need more memory than all else. Here they
    are computed for one block of words after the other, and again in the backward pass.
    Apart from rounding, this is
    `optax.softmax_cross_entropy_with_integer_labels(x @ weight.T + bias, labels)`.

    **Arguments:**

    - `x`: the input of the output layer, of shape `(..., size)`. There may be any number of
        batch axes, also none.
    - `weight`: shape `(vocabulary, size)`, as the `weight` of [`equinox_like.nn.Linear`][]
        and of [`equinox_like.nn.Embedding`][].
    - `labels`: the right word for each token: integers of shape `(...)`.
    - `bias`: shape `(vocabulary,)`. `-inf` excludes a word; with `label_smoothing`, losses
        are infinite then.
    - `where`: bools of shape `(...)`. Where it is `False`, the loss is 0 and so are its
        derivatives, whatever `x` and the label are. A loss that ignores tokens is
        `losses.sum() / where.sum()`.
    - `block`: how many words have their logits in memory at once. If the vocabulary has no
        divisor near `vocabulary / block`, the weight is copied, to pad it.
    - `label_smoothing`: the share of the target probability, from 0 to 1, that is spread
        evenly over all words. From [Rethinking the Inception Architecture](
        https://arxiv.org/abs/1512.00567) (Szegedy et al. 2015).
    - `z_loss`: a number, 0 or more. `z_loss * logsumexp(logits) ** 2` is added to each
        loss, which keeps the logits small. From [PaLM](https://arxiv.org/abs/2204.02311)
        (Chowdhery et al. 2022).

    In half precision, only the matrix products are computed. Their results, the sums over
    the vocabulary and those of the gradient of `x` over the blocks are in float32. Within
    [`equinox_like.nn.precision`][] the products are computed in its dtype.

    It has derivatives of all orders with respect to `x`, `weight` and `bias`, in forward
    mode too, and none with respect to `labels` and `where`. `label_smoothing` and `z_loss`
    are Python numbers. On a mesh, the tokens and the vocabulary may be split: see
    [The loss of a large vocabulary](../../recipes/large-vocabulary.md#on-a-mesh).

    **Returns:**

    The losses in nats, of shape `(...)`, in float32, or in float64 if `x` or `weight` is.
    They are not averaged, because the number of tokens to divide by may be a sum over
    devices or micro-batches. A label out of range has an infinite loss and no gradient: a
    check in a compiled program has a cost.

    **Raises:**

    [`equinox_like.ShapeError`][] if the shapes do not fit together. `TypeError` if `x`,
    `weight` or `bias` is not an array of real floating numbers, `labels` not one of
    integers, or `where` not one of bools. `ValueError` for a `block`, a `label_smoothing`
    or a `z_loss` out of range.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        embedding = eqx.nn.Embedding(1000, 8, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (2, 5, 8))
        labels = jnp.full((2, 5), 3)
        losses = eqx.nn.linear_cross_entropy(x, embedding.weight, labels, block=250)
        logits = x @ embedding.weight.T
        expected = jax.nn.logsumexp(logits, axis=-1) - logits[..., 3]
        assert jnp.allclose(losses, expected, rtol=1e-5)
        ```
    """
    block = as_size(_NAME, "block", block, 1)
    wanted = "a number in [0, 1]"
    smoothing = as_number(
        _NAME, "label_smoothing", label_smoothing, wanted, lambda a: 0 <= a <= 1
    )
    z_loss = as_number(_NAME, "z_loss", z_loss, "a number >= 0", lambda a: a >= 0)
    given = {"x": x, "weight": weight, "labels": labels, "bias": bias, "where": where}
    arrays = {
        name: as_array(_NAME, name, array)
        for name, array in given.items()
        if array is not None or name not in ("bias", "where")
    }
    _check(arrays)
    arrays = cast_to_precision(arrays)
    options = _groups(arrays["weight"]), block, smoothing, z_loss
    values = [arrays.get(name) for name in given]
    return split_as(partial(_losses, options), parts(arrays["x"])[:-1], *values)


def _check(arrays: dict[str, Array]) -> None:
    batch = arrays["x"].shape[:-1]
    words, size = (*arrays["weight"].shape, 0, 0)[:2]
    wanted: dict[str, Any] = {
        "x": (jnp.floating, (*batch, size)),
        "weight": (jnp.floating, (max(words, 1), size)),
        "labels": (jnp.integer, batch),
        "bias": (jnp.floating, (words,)),
        "where": (jnp.bool_, batch),
    }
    for name, array in arrays.items():
        kind, shape = wanted[name]
        if not jnp.issubdtype(array.dtype, kind):
            raise wrong_type(_NAME, f"an array of {kind.__name__} dtype", name, array)
        if array.shape != shape:
            given = [f"`{name}` {array.shape}" for name, array in arrays.items()]
            raise ShapeError(
                f"{_NAME} takes `x` of shape (..., size), `weight` (vocabulary, size), "
                "which is not empty, `bias` (vocabulary,), and `labels` and `where` (...); "
                f"got shapes {', '.join(given)}."
            )


def _groups(weight: Array) -> int:
    """Into how many parts of equal size a mesh may split the vocabulary.

    How automatic axes split an array is known to the compiler only.
    """
    mesh, rows = jax.typeof(weight).sharding.mesh, parts(weight)[0]
    names = {*mesh.auto_axes, *(rows if isinstance(rows, tuple) else [rows])} - {None}
    return math.gcd(len(weight), math.prod(mesh.shape[name] for name in names))


def _losses(
    options: Any, x: Array, weight: Array, labels: Array, bias: Any, where: Any
) -> Array:
    groups, block, smoothing, z_loss = options
    words, batch, in_group = len(weight), labels.shape, len(weight) // groups
    steps = _number_of_blocks(in_group, max(block // groups, 1))
    length = math.ceil(in_group / steps)
    padding = steps * length - in_group
    dtype, wide = jnp.result_type(x, weight), accumulation_dtype(x, weight)
    x = x.astype(wide)  # its gradient is a sum over the blocks
    labels = labels.astype(jnp.int32)  # `words` may be too large for a small dtype
    if where is not None:  # or a NaN that is left out would make gradients NaN
        x = jnp.where(where[..., None], x, 0)
    if len(batch) > 1 and jax.typeof(x).sharding.mesh.empty:
        # A CPU would transpose logits of more axes. But a mesh may split two of them.
        x, labels = x.reshape(labels.size, x.shape[-1]), labels.reshape(labels.size)

    def in_blocks(rows: Array, fill: float) -> Array:
        """Of shape `(steps, groups * length, size)`: some rows of each group."""
        rows = rows.reshape(groups, in_group, -1)
        rows = jnp.pad(rows, ((0, 0), (0, padding), (0, 0)), constant_values=fill)
        rows = rows.reshape(groups, steps, length, -1).swapaxes(0, 1)
        return rows.reshape(steps, groups * length, -1)

    group, row = jnp.divmod(labels, in_group)
    step_of_label, row = jnp.divmod(row, length)

    # In a scan, XLA cannot keep the logits instead of computing them again.
    @partial(jax.checkpoint, prevent_cse=False)
    def step(carry: Any, block: Any) -> Any:
        (lse, target), (i, weight, bias) = carry, block
        logits = product_with_rows(x.astype(dtype), weight)
        if bias is not None:
            logits = logits + bias.reshape(*(1,) * labels.ndim, -1)
        place = jnp.where(step_of_label == i, group * length + row, -1)
        lse, at_label = _with_block(lse, logits, place)
        target = target + (1 - smoothing) * at_label
        if smoothing:
            target = target + smoothing / words * (x @ jnp.sum(weight, 0, wide))
        return (lse, target), None

    mean = 0.0
    if bias is None and padding:
        bias = jnp.zeros(words, wide)
    if bias is not None:
        mean = jnp.mean(bias, dtype=wide) if smoothing else mean
        bias = in_blocks(bias.astype(wide), -jnp.inf)
    # With -inf, derivatives would be NaN if all logits of the first block are -inf.
    start = jnp.finfo(wide).min, smoothing * mean
    start = tuple(jnp.full(labels.shape, each, wide) for each in start)
    start = varying_as((x, weight, labels, bias), start)
    blocks = jnp.arange(steps, dtype=jnp.int32), in_blocks(weight, 0.0), bias
    (lse, target), _ = jax.lax.scan(step, start, blocks)
    is_word = (labels >= 0) & (labels < words)
    losses = jnp.where(is_word, lse - target + z_loss * lse**2, jnp.inf).reshape(batch)
    return losses if where is None else jnp.where(where, losses, 0)


def _number_of_blocks(words: int, most: int) -> int:
    """How many blocks have at most `most` words.

    A few more may have equal lengths. Then nothing is padded, which copies the weight.
    """
    least = math.ceil(words / most)
    return next((n for n in range(least, 2 * least + 1) if words % n == 0), least)


@jax.custom_jvp
def _with_block(lse: Array, logits: Array, place: Array) -> Any:
    """The logsumexp of what `lse` is that of and these logits; and the logit at `place`,
    or 0 if that is -1."""
    found = jnp.take_along_axis(logits, place[..., None], -1, mode="clip")[..., 0]
    lse = jnp.logaddexp(lse, jax.nn.logsumexp(logits, -1))
    return lse, jnp.where(place < 0, 0, found)


@_with_block.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # Its transpose needs one array of the size of the logits; that of JAX's needs three.
    (lse, logits, place), (d_lse, d_logits, _) = primals, tangents
    out = _with_block(*primals)
    share = jnp.exp(logits - out[0][..., None])
    d_lse = jnp.exp(lse - out[0]) * d_lse + jnp.sum(share * d_logits, -1)
    is_here = jax.nn.one_hot(place, logits.shape[-1], dtype=bool)
    return out, (d_lse, jnp.sum(jnp.where(is_here, d_logits, 0), -1))
