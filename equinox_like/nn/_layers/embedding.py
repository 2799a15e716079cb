"""Embeddings of indices and of positions: tables of vectors, sines and cosines."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._compat.tracing import Tracer
from ..._errors import ShapeError
from ..._module import Module, field
from ..._runtime.error_if import error_if
from ..._tree.arrays import is_concrete
from ..._tree.filters import is_array, is_number
from ..._tree.nodes import describe_node
from ..._tree.require import may_be_key
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_array,
    as_even_size,
    as_size,
    as_theta,
    check_columns,
    check_input,
    check_integer,
    check_scalar,
    jax_array,
    parameter_shape,
)
from .._base.init import Init, draw, first_value, key_named, parameter_dtype
from .._base.precision import cast_to_precision, computes, in_float32, summed_in_float32
from .._base.sharding import (
    explicit_mesh,
    like,
    matvec,
    parts,
    placed,
    split_as,
    thawed,
)


class Embedding(Module):
    """A table of vectors: index `i` returns row `i` of the weight.

    The weight starts standard normal.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        embedding = eqx.nn.Embedding(100, 8, key=jax.random.key(0))
        assert embedding(3).shape == (8,)
        assert jax.vmap(embedding)(jnp.array([3, 5])).shape == (2, 8)
        ```
    """

    num_embeddings: int = field(static=True)
    embedding_size: int = field(static=True)
    weight: Any
    check_bounds: bool = field(static=True, default=False)

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_size: int | None = None,
        weight: Any = None,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray | None = None,
        weight_init: Init | None = None,
        check_bounds: bool = False,
    ):
        """**Arguments:**

        - `num_embeddings`, `embedding_size`: the number of vectors, and their size.
        - `weight`: the table, of shape `(num_embeddings, embedding_size)`, taken as it is.
            Without it, both sizes and `key` must be given.
        - `dtype`: of the weight that is drawn; by default float32, or float64 if
            `jax_enable_x64` is on.
        - `key`: a PRNG key for parameter initialisation.
        - `weight_init`: as for [`equinox_like.nn.Linear`][], with the shape of the table.
        - `check_bounds`: whether a JAX array out of range is an error at run time,
            raised by [`equinox_like.error_if`][].

        **Raises:**

        `ValueError` if something is missing, a size is negative, or `weight` has another
        shape.
        """
        if weight is None:
            if num_embeddings is None or embedding_size is None or key is None:
                raise ValueError(
                    "Embedding takes either a `weight`, or all of `num_embeddings`, "
                    "`embedding_size` and `key`."
                )
            rows = as_size(self, "num_embeddings", num_embeddings)
            shape = rows, as_size(self, "embedding_size", embedding_size)
            with key_named(key, self):
                if weight_init is None:
                    own_dtype = parameter_dtype(self, dtype)
                    weight = draw(jax.random.normal, key, shape, own_dtype)
                else:
                    weight = first_value(self, "weight", weight_init, key, shape, dtype)
        _check_sizes(weight, num_embeddings, embedding_size)
        self.num_embeddings, self.embedding_size = weight.shape
        self.weight = weight
        self.check_bounds = check_bounds

    @computes("eqx.nn.Embedding", "nothing")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        out_sharding: PartitionSpec | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: an integer, of shape `()`. A negative integer counts from the end. A JAX
            array out of range is clamped, as in JAX, unless `check_bounds` is set:
            inspecting its value would make the program wait for the device.
        - `key`: ignored.
        - `out_sharding`: how to split the result for one index over the explicit axes of
            a mesh; by default as the rows of the weight are.

        **Returns:**

        An array of shape `(embedding_size,)`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` is not a scalar. `TypeError` for floats and
        bools. `IndexError` for a Python or NumPy integer out of range. With
        `check_bounds` [`equinox_like.EquinoxRuntimeError`][] for a JAX array out of
        range.
        """
        _check_index(self, x)
        if self.check_bounds:
            rows, *_ = parameter_shape(self, "weight", 2) or [self.num_embeddings]
            x = _bounded(self, jax_array(x), -rows, rows, "rows")
        # A NumPy array cannot be indexed by a tracer. An object in place of an array
        # only needs to support indexing, as that of `LoRA`, or to convert to an array.
        table = thawed(self.weight)
        if is_array(table) or not hasattr(table, "__getitem__"):
            table = jax_array(table)
        # The row of a known number is a static slice, which takes an eager call a third
        # of the time.
        x = x if isinstance(x, jax.Array) else operator.index(x)  # pyright: ignore[reportArgumentType]
        if out_sharding is None and is_array(table) and explicit_mesh(table, x):
            # Also if the table is not split, because a batch of indices may be.
            out_sharding = PartitionSpec(parts(table)[1])
        if out_sharding is None:
            row = indexed(table, x)
        else:
            row = placed(_row, out_sharding, table, jax_array(x))
        return cast_to_precision(row)  # which is smaller than the table

    @computes("eqx.nn.Embedding.attend")
    def attend(self, x: ArrayLike) -> Array:
        """The product of the table with a vector: an output layer with tied weights.

        **Arguments:**

        - `x`: shape `(embedding_size,)`.

        **Returns:**

        An array of shape `(num_embeddings,)`: how well each row agrees with `x`.
        """
        check_columns(self, x)
        return matvec(self.weight, jax_array(x))


class LearnedPositionalEmbedding(Module):
    """Adds to each row a vector that is learned for its position.

    Row `i`, at position `p`, becomes `x[i] + weight[p]`. From [Convolutional Sequence to
    Sequence Learning](https://arxiv.org/abs/1705.03122) (Gehring et al. 2017). The weight
    starts normal with a standard deviation of 0.02, as in [BERT](
    https://arxiv.org/abs/1810.04805) (Devlin et al. 2018).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        embed = eqx.nn.LearnedPositionalEmbedding(100, 8, key=jax.random.key(0))
        x = jnp.zeros((5, 8))
        assert (embed(x) == embed.weight[:5]).all()
        assert (embed(x, offset=20) == embed.weight[20:25]).all()
        ```
    """

    max_length: int = field(static=True)
    embedding_size: int = field(static=True)
    weight: Array
    check_bounds: bool = field(static=True)

    def __init__(
        self,
        max_length: int,
        embedding_size: int,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        weight_init: Init | None = None,
        check_bounds: bool = False,
    ):
        """**Arguments:**

        - `max_length`: the number of positions.
        - `embedding_size`: the size of the vector of a position.
        - `dtype`: of the weight; by default float32, or float64 if `jax_enable_x64` is on.
        - `key`: a PRNG key for parameter initialisation.
        - `weight_init`: as for [`equinox_like.nn.Linear`][], with the shape of the weight,
            `(max_length, embedding_size)`.
        - `check_bounds`: whether a traced position out of range is an error at run
            time, raised by [`equinox_like.error_if`][].

        **Raises:**

        `ValueError` if a size is negative.
        """
        self.max_length = as_size(self, "max_length", max_length)
        self.embedding_size = as_size(self, "embedding_size", embedding_size)
        self.check_bounds = check_bounds
        shape = self.max_length, self.embedding_size
        if weight_init is None:
            weight_init = jax.nn.initializers.normal(0.02)
        with key_named(key, self):
            self.weight = first_value(self, "weight", weight_init, key, shape, dtype)

    @computes("eqx.nn.LearnedPositionalEmbedding", "nothing")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        offset: ArrayLike = 0,
        positions: ArrayLike | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: shape `(sequence, embedding_size)`.
        - `key`: ignored.
        - `offset`: the position of the first row. It may be traced.
        - `positions`: integers of shape `(sequence,)`, the position of each row, in
            place of `offset`.

        **Returns:**

        An array of the shape of `x`, of the dtype to which JAX promotes those of `x`
        and the weight. A traced position out of range is clamped to the nearest valid
        one, unless `check_bounds` is set, since a check in a compiled program has a
        cost.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x`, `offset` or `positions` has another shape, or
        `x` more rows than there are positions. `IndexError` for a position out of range
        that is not traced, `TypeError` for one that is not an integer. `ValueError` if
        both `offset` and `positions` are given.
        """
        sizes = self.max_length, self.embedding_size
        number, size = parameter_shape(self, "weight", 2) or sizes
        check_input(self, x, (None, size))
        x = cast_to_precision(jax_array(x))
        # A NumPy array cannot be indexed by a tracer.
        weight = jax_array(self.weight)
        length = x.shape[0]
        if positions is None and length > number:
            raise ShapeError(
                f"{type(self).__name__} has {number} positions, but was given an `x` "
                f"of {length} rows. Build it with a larger `max_length`."
            )
        if isinstance(offset, int) and positions is None:
            if offset < 0 or offset > number - length:
                _check_range(self, np.arange(offset, offset + length), number)
            rows, columns = parts(weight)
            where = None if rows is None else PartitionSpec(None, columns)
            rows = placed(lambda table: table[offset : offset + length], where, weight)
            return _plus(x, rows)
        places = row_positions(self, length, offset, positions)
        check_integer(self, "positions", places)
        if jnp.iinfo(places.dtype).bits < 32:
            # The number of rows may not fit into a small dtype.
            places = places.astype(jnp.int32)
        known = _known(places, offset, positions)
        if known is not None:
            _check_range(self, known, number)
        elif self.check_bounds:
            places = _bounded(self, places, 0, number, "positions")
        return _plus(x, split_as(_gather, (None, parts(weight)[1]), weight, places))


def _check_sizes(weight: Any, number: int | None, size: int | None) -> None:
    shape = getattr(weight, "shape", None)
    if shape is None or len(shape) != 2:
        by_name = " Pass the PRNG key by name: `key=key`." * may_be_key(weight)
        raise ValueError(
            "Embedding takes a `weight` of shape (num_embeddings, embedding_size); got "
            f"{f'shape {shape}' if shape is not None else describe_node(weight)}.{by_name}"
        )
    given = ("num_embeddings", number), ("embedding_size", size)
    for (name, wanted), found in zip(given, shape, strict=True):
        if wanted is not None and wanted != found:
            raise ValueError(
                f"Embedding was given {name}={wanted} and a `weight` of shape {shape}. "
                "Leave the sizes out, or pass those of the weight."
            )


@summed_in_float32
def indexed(table: Any, index: Any) -> Array:
    return table[index]


@summed_in_float32
def _row(table: Any, index: Array) -> Array:
    # For a scalar index, XLA would use a slice, and gather the whole table first.
    return table[index[None]][0]


def _check_index(embedding: Embedding, x: Any) -> None:
    if not (is_array(x) or is_number(x)):
        raise ValueError(
            "Embedding takes one integer, of shape (); got "
            f"{describe_node(x)}. Use `jax.vmap(embedding)` on an array of them."
        )
    check_input(embedding, x, ())
    rows = parameter_shape(embedding, "weight", 2)
    check_integer(embedding, "x", x, " Convert it with `.astype(int)`.")
    if rows is not None and not isinstance(x, jax.Array):
        # Reading a Python or NumPy number does not wait for a device.
        number: Any = x
        if not -rows[0] <= operator.index(number) < rows[0]:
            raise IndexError(
                f"Embedding has {rows[0]} rows, but was given the index {x}."
            )


def _bounded(layer: Any, x: Array, least: int, number: int, what: str) -> Array:
    """`x`, with an error at run time if it is not from `least` to below `number`."""
    # Limited to the range of the dtype of `x`.
    info, name = jnp.iinfo(x.dtype), type(layer).__name__
    is_out = (x < max(least, info.min)) | (x > min(number - 1, info.max))
    return error_if(
        x, is_out, f"{name} has {number} {what}, but was given one out of range."
    )


def _plus(x: Array, rows: Array) -> Array:
    return in_float32(jnp.add, x, like(cast_to_precision(rows), x))


def _known(places: Array, offset: Any, positions: Any) -> np.ndarray | None:
    """The positions, unless they depend on a traced value."""
    if not isinstance(places, Tracer):
        return jax.device_get(places)  # an explicit transfer
    # Within a trace, what JAX computes from known values is a tracer, too.
    given = offset if positions is None else positions
    if not (isinstance(given, np.ndarray | np.generic) or is_concrete(given)):
        return None
    given = np.asarray(jax.device_get(given))
    return given.astype(int) + np.arange(len(places)) if positions is None else given


def _check_range(embedding: Any, positions: np.ndarray, number: int) -> None:
    out_of_range = positions[(positions < 0) | (positions >= number)]
    if out_of_range.size > 0:
        raise IndexError(
            f"{type(embedding).__name__} has {number} positions, counted from 0, but "
            f"was given position {out_of_range[0]}."
        )


@summed_in_float32
def _gather(table: Array, positions: Array) -> Array:
    # Clipped, because JAX would count negative positions from the end.
    return table[jnp.clip(positions, 0, len(table) - 1)]


class RotaryPositionalEmbedding(Module):
    r"""Rotates pairs of features by angles that grow with the position.

    With $d$ the size of the embedding, and $j < d / 2$, the features $j$ and $j + d/2$ of
    row $i$ are rotated by the angle $i\, \theta^{-2 j / d}$:

    $$y_{i, j} = x_{i, j} \cos - x_{i, j + d/2} \sin, \qquad
    y_{i, j + d/2} = x_{i, j + d/2} \cos + x_{i, j} \sin.$$

    The product of a rotated query and a rotated key then depends on the difference of
    their positions. From [RoFormer](https://arxiv.org/abs/2104.09864) (Su et al. 2021),
    which pairs the features $2j$ and $2j + 1$: that is `interleaved=True`. Models that were
    extended to longer sequences, such as Llama 3.1, have other `frequencies` in place of
    $\theta^{-2 j / d}$; see [YaRN](https://arxiv.org/abs/2309.00071) (Peng et al. 2023).

    [`equinox_like.nn.MultiheadAttention`][] applies it to queries and keys, if it is built
    with `rotary=`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        rope = eqx.nn.RotaryPositionalEmbedding(4)
        x = jnp.ones((5, 8))
        assert jnp.allclose(rope(x[:, :4])[3:], rope(x[3:, :4], offset=3), atol=1e-6)

        key = jax.random.key(0)
        attention = eqx.nn.MultiheadAttention(2, 8, rotary=rope, key=key)
        assert attention(x, x, x, is_causal=True).shape == (5, 8)
        ```
    """

    embedding_size: int = field(static=True)
    theta: float = field(static=True)
    dtype: Any = field(static=True)
    interleaved: bool = field(static=True, default=False)
    frequencies: tuple[float, ...] | None = field(static=True, default=None)

    def __init__(
        self,
        embedding_size: int,
        theta: float = 10_000.0,
        dtype: DTypeLike | None = None,
        *,
        interleaved: bool = False,
        frequencies: Sequence[float | int] | np.ndarray | Array | None = None,
    ):
        """**Arguments:**

        - `embedding_size`: the number of features, which must be even.
        - `theta`: the base of the frequencies: pair `j` rotates by `theta ** (-2 * j /
            embedding_size)` at position 1.
        - `dtype`: of the cosines and sines; by default float32, or float64 if
            `jax_enable_x64` is on.
        - `interleaved`: if `True`, pair the features `2 * j` and `2 * j + 1`.
        - `frequencies`: the angle of each pair at position 1, in place of those of
            `theta`: `embedding_size // 2` numbers, which are static.

        **Raises:**

        `ValueError` if `embedding_size` is negative or odd, `theta` is not a number
        above 0, `dtype` is not floating or complex, or `frequencies` has another length.
        """
        self.embedding_size = as_even_size(self, "embedding_size", embedding_size)
        self.theta = as_theta(self, theta)
        self.dtype = np.dtype(parameter_dtype(self, dtype))
        self.interleaved = interleaved
        self.frequencies = _as_frequencies(frequencies, self.embedding_size // 2)

    @computes("eqx.nn.RotaryPositionalEmbedding", "nothing")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        offset: ArrayLike = 0,
        positions: ArrayLike | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: shape `(sequence, embedding_size)`.
        - `key`: ignored.
        - `offset`: the position of the first row. It may be traced.
        - `positions`: shape `(sequence,)`, the position of each row, in place of
            `offset`.

        **Returns:**

        An array of the shape and dtype of `x`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x`, `offset` or `positions` has another shape.
        `ValueError` if both `offset` and `positions` are given.
        """
        check_input(self, x, (None, self.embedding_size))
        x = jax_array(x)
        places = row_positions(self, x.shape[0], offset, positions)
        static = self.frequencies, self.embedding_size, self.theta, self.dtype
        cos, sin = _of_pairs(*static, places)
        if self.interleaved:
            # Not -1, which is ambiguous if there are no rows.
            pairs = x.reshape(*x.shape[:-1], self.embedding_size // 2, 2)
            first, second = pairs[..., 0], pairs[..., 1]
        else:
            first, second = jnp.split(x, 2, axis=-1)
        try:
            rotated = first * cos - second * sin, second * cos + first * sin
        except jax.dtypes.TypePromotionError as error:
            raise type(error)(
                f"RotaryPositionalEmbedding has cosines of dtype {self.dtype}, but was "
                f"given an array of dtype {x.dtype}. Build it with `dtype={x.dtype}`, or "
                "call it under `jax.numpy_dtype_promotion('standard')`."
            ) from error
        if self.interleaved:
            out = jnp.stack(rotated, axis=-1).reshape(x.shape)
        else:
            out = jnp.concatenate(rotated, axis=-1)
        return out.astype(x.dtype)

    @staticmethod
    def rotate_half(x: Array) -> Array:
        """Swaps the halves of the last axis, and negates the new first half."""
        half = x.shape[-1] // 2
        return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)

    @staticmethod
    def precompute_freqs_cis(
        embedding_size: int, end: int, theta: float, dtype: DTypeLike
    ) -> tuple[Array, Array]:
        """The cosines and sines of the positions below `end`.

        Each has shape `(end, embedding_size // 2)`.
        """
        positions = jnp.arange(end, dtype=float)
        return cos_and_sin(powers(embedding_size, theta), positions, dtype)


class SinusoidalPositionalEmbedding(Module):
    r"""Adds to each row sines and cosines of its position.

    It has no parameters, and the positions are not bounded. From [Attention Is All You
    Need](https://arxiv.org/abs/1706.03762) (Vaswani et al. 2017). With $d$ the size of a
    row, $p_i$ the position of row $i$, and $j < d / 2$,

    $$y_{i, 2j} = x_{i, 2j} + \sin(p_i\, \theta^{-2j / d}), \qquad
    y_{i, 2j + 1} = x_{i, 2j + 1} + \cos(p_i\, \theta^{-2j / d}).$$

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        embed = eqx.nn.SinusoidalPositionalEmbedding(4)
        y = embed(jnp.zeros((3, 4)))
        assert (y[0] == jnp.array([0, 1, 0, 1])).all()
        assert jnp.allclose(embed(jnp.zeros((1, 4)), offset=2), y[2:])
        ```
    """

    embedding_size: int = field(static=True)
    theta: float = field(static=True)

    def __init__(self, embedding_size: int, theta: float = 10_000.0):
        """**Arguments:**

        - `embedding_size`: the size of a row, which must be even.
        - `theta`: the base of the frequencies: those of pair `j` are `theta ** (-2 * j /
            embedding_size)`.

        **Raises:**

        `ValueError` if `embedding_size` is negative or odd, or `theta` is not a number
        above 0.
        """
        self.embedding_size = as_even_size(self, "embedding_size", embedding_size)
        self.theta = as_theta(self, theta)

    @computes("eqx.nn.SinusoidalPositionalEmbedding", "nothing")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        offset: ArrayLike = 0,
        positions: ArrayLike | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: shape `(sequence, embedding_size)`.
        - `key`: ignored.
        - `offset`: the position of the first row. It may be traced, and negative.
        - `positions`: shape `(sequence,)`, the position of each row, in place of
            `offset`. They need not be integers; they may be times, for example.

        **Returns:**

        An array of the shape and dtype of `x`; integers become floats. Sines and cosines
        are computed in JAX's default float, and then cast.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x`, `offset` or `positions` has another shape.
        `ValueError` if both `offset` and `positions` are given.
        """
        check_input(self, x, (None, self.embedding_size))
        x = jax_array(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.astype(jnp.result_type(float))
        places = row_positions(self, x.shape[0], offset, positions)
        frequencies = powers(self.embedding_size, self.theta)
        cos, sin = cos_and_sin(frequencies, places, x.dtype)
        both = jnp.stack([sin, cos], axis=-1).reshape(x.shape)
        return x + like(both, x)


def _as_frequencies(value: Any, number: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    frequencies = np.asarray(value, float)
    if frequencies.shape != (number,) or not np.isfinite(frequencies).all():
        raise ValueError(
            f"RotaryPositionalEmbedding takes {number} finite numbers as `frequencies`, "
            f"one for each pair of features; got {value!r}."
        )
    return tuple(frequencies.tolist())


def powers(size: int, theta: float) -> Array:
    return 1.0 / theta ** (jnp.arange(0, size, 2, dtype=float) / max(size, 1))


def cos_and_sin(
    frequencies: Array | tuple[float, ...], positions: Array, dtype: DTypeLike
) -> tuple[Array, Array]:
    # In half precision, the angles of large positions would have no correct digits.
    positions = positions.astype(jnp.result_type(float))
    angles = positions[:, None] * jnp.asarray(frequencies, float)[None, :]
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _of_pairs(
    frequencies: Any, size: int, theta: float, dtype: DTypeLike, positions: Array
) -> list[Array]:
    """The cosines and sines of an embedding. JAX's cache keeps none of its objects."""
    if frequencies is None:
        frequencies = powers(size, theta)
    return [_unfused(x) for x in cos_and_sin(frequencies, positions, dtype)]


def _unfused(x: Array) -> Array:
    """`x`, which XLA then computes before it computes the layer.

    It would fuse cosines into the layer, and compute each of them again for every head
    and every element of a batch. It does not repeat divisions, and cannot know that the
    divisor is 1. With jax 0.10, `jax.lax.optimization_barrier` would not help on CPU.
    """
    return x / (1 + 0 * x)


def row_positions(layer: Any, length: int, offset: Any, positions: Any) -> Array:
    """The position of each row, from the arguments of a call."""
    if positions is None:
        offset = as_array(layer, "offset", offset)
        fix = " Pass the position of each row as `positions`."
        check_scalar(layer, "offset", offset, fix)
        # The dtype of the offset may be too small for the sum.
        is_integer = jnp.issubdtype(offset.dtype, jnp.integer)
        dtype = jnp.result_type(int if is_integer else float)
        return jnp.arange(length, dtype=dtype) + offset.astype(dtype)
    if not (isinstance(offset, int) and offset == 0):
        raise ValueError(
            f"{type(layer).__name__} takes `offset` or `positions`, not both."
        )
    positions = as_array(layer, "positions", positions)
    check_input(layer, positions, (length,), "positions")
    return positions
