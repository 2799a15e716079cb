"""Tables of vectors: `Embedding` by index, `LearnedPositionalEmbedding` by position."""

import operator
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
from .._base.arguments import as_size
from .._base.init import Init, draw, first_value, key_named, parameter_dtype
from .._base.inputs import check_columns, check_input, jax_array, parameter_shape
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
from .position import row_positions


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
            sizes = num_embeddings, embedding_size
            if None in sizes or key is None:
                raise ValueError(
                    "Embedding takes either a `weight`, or all of `num_embeddings`, "
                    "`embedding_size` and `key`."
                )
            named = zip(("num_embeddings", "embedding_size"), sizes, strict=True)
            shape = tuple(as_size(self, *each) for each in named)
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
            x = _within_bounds(self, jax_array(x))
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
        if not jnp.issubdtype(places.dtype, jnp.integer):
            raise TypeError(
                f"{type(self).__name__} takes integers as positions; got {places.dtype}."
            )
        if jnp.iinfo(places.dtype).bits < 32:
            # The number of rows may not fit into a small dtype.
            places = places.astype(jnp.int32)
        known = _known(places, offset, positions)
        if known is not None:
            _check_range(self, known, number)
        elif self.check_bounds:
            places = error_if(
                places,
                (places < 0) | (places >= number),
                f"{type(self).__name__} has {number} positions, but was given one "
                "out of range.",
            )
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
    if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        raise TypeError(
            f"Embedding takes an integer as its index; got one of dtype "
            f"{jnp.result_type(x)}. Convert it with `.astype(int)`."
        )
    if rows is not None and not isinstance(x, jax.Array):
        # Reading a Python or NumPy number does not wait for a device.
        number: Any = x
        if not -rows[0] <= operator.index(number) < rows[0]:
            raise IndexError(
                f"Embedding has {rows[0]} rows, but was given the index {x}."
            )


def _within_bounds(embedding: Embedding, x: Array) -> Array:
    """`x`, with an error at run time if it is out of bounds."""
    sizes = embedding.num_embeddings, embedding.embedding_size
    rows, _ = parameter_shape(embedding, "weight", 2) or sizes
    # Limited to the range of the index's dtype.
    info = jnp.iinfo(x.dtype)
    lowest, highest = max(-rows, info.min), min(rows - 1, info.max)
    return error_if(
        x,
        (x < lowest) | (x > highest),
        f"Embedding has {rows} rows, but was given an index out of range.",
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
