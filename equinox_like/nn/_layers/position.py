"""Positional embeddings that are added: a learned table, or sines and cosines."""

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
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_even_size,
    as_size,
    as_theta,
    check_input,
    jax_array,
    parameter_shape,
)
from .._base.init import Init, first_value, key_named
from .._base.precision import cast_to_precision, in_float32, summed_in_float32
from .._base.sharding import explicit_mesh, like, parts, placed
from .rope import cos_and_sin, powers, row_positions

_STANDARD_DEVIATION = 0.02


class LearnedPositionalEmbedding(Module):
    r"""Adds to each row a vector that is learned for its position: $y_i = x_i + W_{p_i}$.

    From [Convolutional Sequence to Sequence Learning](https://arxiv.org/abs/1705.03122)
    (Gehring et al. 2017). The weight starts normal with a standard deviation of 0.02, as in
    [BERT](https://arxiv.org/abs/1810.04805) (Devlin et al. 2018).

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
            weight_init = jax.nn.initializers.normal(_STANDARD_DEVIATION)
        with key_named(key, self):
            self.weight = first_value(self, "weight", weight_init, key, shape, dtype)

    @jax.named_scope("eqx.nn.LearnedPositionalEmbedding")
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
        shape = parameter_shape(self, "weight", 2) or (
            self.max_length,
            self.embedding_size,
        )
        check_input(self, x, (None, shape[1]))
        x = cast_to_precision(jax_array(x))
        # A NumPy array cannot be indexed by a tracer.
        weight = jax_array(self.weight)
        length = x.shape[0]
        if positions is None and length > shape[0]:
            raise ShapeError(
                f"{type(self).__name__} has {shape[0]} positions, but was given an `x` "
                f"of {length} rows. Build it with a larger `max_length`."
            )
        if isinstance(offset, int) and positions is None:
            if offset < 0 or offset > shape[0] - length:
                _check_range(self, np.arange(offset, offset + length), shape[0])
            rows = cast_to_precision(_slice(weight, offset, length))
            return in_float32(jnp.add, x, like(rows, x))
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
            _check_range(self, known, shape[0])
        elif self.check_bounds:
            places = error_if(
                places,
                (places < 0) | (places >= shape[0]),
                f"{type(self).__name__} has {shape[0]} positions, but was given one "
                "out of range.",
            )
        rows = cast_to_precision(_rows(weight, places))
        return in_float32(jnp.add, x, like(rows, x))


class SinusoidalPositionalEmbedding(Module):
    r"""Adds to each row sines and cosines of its position.

    With $d$ the size of a row, $p_i$ the position of row $i$, and $j < d / 2$,

    $$y_{i, 2j} = x_{i, 2j} + \sin(p_i\, \theta^{-2j / d}), \qquad
    y_{i, 2j + 1} = x_{i, 2j + 1} + \cos(p_i\, \theta^{-2j / d}).$$

    From [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (Vaswani et al.
    2017). It has no parameters, and the positions are not bounded.

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
        r"""**Arguments:**

        - `embedding_size`: the size of a row, which must be even.
        - `theta`: $\theta$ above.

        **Raises:**

        `ValueError` if `embedding_size` is negative or odd, or `theta` is not a number
        above 0.
        """
        self.embedding_size = as_even_size(self, "embedding_size", embedding_size)
        self.theta = as_theta(self, theta)

    @jax.named_scope("eqx.nn.SinusoidalPositionalEmbedding")
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


def _slice(table: Any, start: int, length: int) -> Array:
    where = None
    if explicit_mesh(table) is not None and parts(table)[0] is not None:
        where = PartitionSpec(None, parts(table)[1])
    return placed(lambda table: table[start : start + length], where, table)


def _rows(table: Array, positions: Array) -> Array:
    if explicit_mesh(table, positions) is None:
        return _gather(table, positions)
    return placed(_gather, PartitionSpec(None, parts(table)[1]), table, positions)


@summed_in_float32
def _gather(table: Array, positions: Array) -> Array:
    # Clipped, because JAX would count negative positions from the end.
    return table[jnp.clip(positions, 0, len(table) - 1)]
