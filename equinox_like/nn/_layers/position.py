"""Sines and cosines of positions, which rotate features or are added to them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._errors import ShapeError
from ..._module import Module, field
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.arguments import as_even_size, as_theta
from .._base.init import parameter_dtype
from .._base.inputs import as_array, check_input, jax_array
from .._base.precision import computes
from .._base.sharding import like


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
        frequencies = self.frequencies
        if frequencies is None:
            frequencies = powers(self.embedding_size, self.theta)
        places = row_positions(self, x.shape[0], offset, positions)
        cos, sin = map(_unfused, cos_and_sin(frequencies, places, self.dtype))
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
                f"given an array of dtype {x.dtype}, with `jax_numpy_dtype_promotion` "
                f"set to 'strict'. Build it with `dtype={x.dtype}`, or call it under "
                "`jax.numpy_dtype_promotion('standard')`."
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
        if offset.ndim != 0:
            raise ShapeError(
                f"{type(layer).__name__} takes a scalar as `offset`, the position of the "
                f"first row, but was given shape {offset.shape}. Pass the position of "
                "each row as `positions`."
            )
        # The dtype of the offset may be too small for the sum.
        is_integer = jnp.issubdtype(offset.dtype, jnp.integer)
        dtype = jnp.result_type(int if is_integer else float)
        return jnp.arange(length, dtype=dtype) + offset.astype(dtype)
    if not (isinstance(offset, int) and offset == 0):
        raise ValueError(
            f"{type(layer).__name__} takes `offset` or `positions`, not both."
        )
    positions = as_array(layer, "positions", positions)
    if positions.shape != (length,):
        raise ShapeError(
            f"{type(layer).__name__} takes `positions` of shape ({length},), one for each "
            f"row, but was given shape {positions.shape}."
        )
    return positions
