"""`Pool`, and maximum and average pooling over one to three spatial axes."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._module import Module, field
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.arguments import (
    as_padding,
    as_size,
    check_function,
    check_length,
    per_axis,
)
from .._base.inputs import check_input, check_windows, jax_array
from .._base.precision import accumulation_dtype, computes

_Padding = int | Sequence[int] | Sequence[tuple[int, int]]


class Pool(Module):
    r"""Reduces each window of each channel to one number, for example to its maximum.

    $$y_{c, i} = \bigoplus_{j < k} x_{c, s i + j}$$

    Here $\oplus$ is the operation, $s$ the stride, $k$ the kernel size, and $x$ is padded
    already, with `init`. An axis of size $n$ becomes one of size
    $\lfloor (n + p_0 + p_1 - k) / s \rfloor + 1$ for a padding $(p_0, p_1)$.

    Gradients exist for the pairs (`init`, operation) that JAX knows: $-\infty$ and
    `jax.lax.max`, $\infty$ and `jax.lax.min`, 0 and `jax.lax.add`. `init` and `operation`
    are leaves of the tree.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        pool = eqx.nn.Pool(jnp.inf, jax.lax.min, 1, kernel_size=2, stride=2)
        assert (pool(jnp.arange(6.0)[None]) == jnp.array([[0.0, 2.0, 4.0]])).all()
        ```
    """

    init: ArrayLike
    operation: Callable[[Any, Any], Any]
    num_spatial_dims: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: tuple[tuple[int, int], ...] = field(static=True)
    use_ceil: bool = field(static=True)

    def __init__(
        self,
        init: ArrayLike,
        operation: Callable[[Any, Any], Any],
        num_spatial_dims: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: _Padding = 0,
        use_ceil: bool = False,
    ):
        """**Arguments:**

        - `init`: the initial value of the reduction.
        - `operation`: an associative and commutative function of two numbers that returns
            one.
        - `num_spatial_dims`: the number of spatial axes.
        - `kernel_size`, `stride`: each an int, or one for each spatial axis. The default
            stride is 1.
        - `padding`: how much of `init` to add to the spatial axes: an int, an int for each
            axis, or a pair (before, after) for each axis; at most the kernel size.
        - `use_ceil`: whether to round the size of the output up. This adds no window that
            would hold only padding.

        **Raises:**

        `ValueError` if one of the sizes is neither an int nor a sequence of ints, or if
        there is not one `padding` for each axis.
        """
        n = as_size(self, "num_spatial_dims", num_spatial_dims)
        self.init = init
        check_function(type(self).__name__, "operation", operation)
        self.operation = operation
        self.num_spatial_dims = n
        self.kernel_size = per_axis(self, "kernel_size", kernel_size, n)
        self.stride = per_axis(self, "stride", stride, n)
        self.padding = as_padding(self, padding, n)
        self.use_ceil = use_ceil

    @computes("eqx.nn.Pool", "nothing")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: shape `(channels, size_1, ..., size_n)`.
        - `key`: ignored.

        **Returns:**

        An array of shape `(channels, new_size_1, ..., new_size_n)`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another rank, if a spatial axis is empty or
        the kernel does not fit into the padded input, or if `kernel_size` or `stride` has
        another length. `RuntimeError` if the padding is larger than the kernel.
        """
        n = self.num_spatial_dims
        check_length(self, "kernel_size", self.kernel_size, n)
        check_length(self, "stride", self.stride, n)
        check_input(self, x, (None,) * (n + 1))
        _check_padding(self)
        x = jax_array(x)
        sizes, padding = x.shape[1:], self.padding
        if self.use_ceil:
            axes = zip(sizes, self.kernel_size, self.stride, padding, strict=True)
            padding = tuple(_up_to_last_window(*axis) for axis in axes)
        check_windows(self, x.shape, sizes, padding, self.kernel_size)
        return jax.lax.reduce_window(
            x,
            _as_dtype(self.init, x.dtype),
            self.operation,
            window_dimensions=(1, *self.kernel_size),
            window_strides=(1, *self.stride),
            padding=((0, 0), *padding),
        )


class _PoolNd(Pool):
    """Base class of those with a fixed operation and number of spatial axes."""

    _num_spatial_dims = 0
    _reduction: ClassVar[tuple[Any, Any]] = (-jnp.inf, jax.lax.max)

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: _Padding = 0,
        use_ceil: bool = False,
    ):
        """**Arguments:**

        - `kernel_size`, `stride`: each an int, or one for each spatial axis. The default
            stride is 1.
        - `padding`: how much to add to the spatial axes: an int, an int for each axis, or a
            pair (before, after) for each axis; at most the kernel size.
        - `use_ceil`: whether to round the size of the output up. This adds no window that
            would hold only padding.

        **Raises:**

        `ValueError` if one of the sizes is neither an int nor a sequence of ints, or if
        there is not one `padding` for each axis.
        """
        n = self._num_spatial_dims
        super().__init__(*self._reduction, n, kernel_size, stride, padding, use_ceil)


class MaxPool1d(_PoolNd, init=False):
    """The maximum of each window, along one spatial axis.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.MaxPool1d(kernel_size=2, stride=2)
        assert pool(jnp.arange(6.0)[None]).shape == (1, 3)
        ```
    """

    _num_spatial_dims = 1


class MaxPool2d(_PoolNd, init=False):
    """The maximum of each window, along two spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.MaxPool2d(kernel_size=2, stride=2)
        assert pool(jnp.ones((3, 8, 8))).shape == (3, 4, 4)
        ```
    """

    _num_spatial_dims = 2


class MaxPool3d(_PoolNd, init=False):
    """The maximum of each window, along three spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.MaxPool3d(kernel_size=2, stride=2)
        assert pool(jnp.ones((3, 8, 8, 8))).shape == (3, 4, 4, 4)
        ```
    """

    _num_spatial_dims = 3


class _AvgPool(_PoolNd, init=False):
    _reduction = (0, jax.lax.add)

    @computes(None)
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """As for [`equinox_like.nn.Pool`][]; integers and bools are averaged to floats.

        Numbers in half precision are summed in float32, integers as `jnp.sum` does.
        """
        n = self.num_spatial_dims
        with jax.named_scope(f"eqx.nn.AvgPool{n}d"):
            check_input(self, x, (None,) * (n + 1))
            x, number = jax_array(x), math.prod(self.kernel_size)
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                # As in `jnp.sum`, because the sum of small integers overflows.
                wide = x.astype(jax.eval_shape(jnp.sum, x).dtype)
                return super().__call__(wide) / number
            # In half precision the sum of a large window overflows, or loses its last
            # elements.
            wide = x.astype(accumulation_dtype(x))
            return (super().__call__(wide) / number).astype(x.dtype)


class AvgPool1d(_AvgPool, init=False):
    """The average of each window, along one spatial axis.

    Padding counts as zeros: sums are divided by the size of the whole kernel.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AvgPool1d(kernel_size=2, stride=2)
        assert pool(jnp.arange(6.0)[None]).shape == (1, 3)
        ```
    """

    _num_spatial_dims = 1


class AvgPool2d(_AvgPool, init=False):
    """The average of each window, along two spatial axes.

    Padding counts as zeros: sums are divided by the size of the whole kernel.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AvgPool2d(kernel_size=2, stride=2)
        assert pool(jnp.ones((3, 8, 8))).shape == (3, 4, 4)
        ```
    """

    _num_spatial_dims = 2


class AvgPool3d(_AvgPool, init=False):
    """The average of each window, along three spatial axes.

    Padding counts as zeros: sums are divided by the size of the whole kernel.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AvgPool3d(kernel_size=2, stride=2)
        assert pool(jnp.ones((3, 8, 8, 8))).shape == (3, 4, 4, 4)
        ```
    """

    _num_spatial_dims = 3


def _check_padding(pool: Pool) -> None:
    for kernel, pair in zip(pool.kernel_size, pool.padding, strict=True):
        if max(pair) > kernel:
            raise RuntimeError(
                f"{type(pool).__name__} takes a `padding` of at most the kernel size; got "
                f"{pool.padding} for the kernel {pool.kernel_size}."
            )


def _up_to_last_window(
    size: int, kernel: int, stride: int, padding: tuple[int, int]
) -> tuple[int, int]:
    """The padding of one axis, such that a last window covers remaining elements."""
    low, high = padding
    last_start = -(-(low + size + high - kernel) // stride) * stride
    # A window that starts after the input would hold only padding.
    if last_start < low + size:
        high = last_start + kernel - low - size
    return low, high


def _as_dtype(init: Any, dtype: Any) -> Any:
    """`init` in the dtype of the input. Infinity becomes the largest or least number of
    a dtype that has none: of integers, and of some floats of 8 or 4 bits.

    It stays a NumPy array, so that JAX knows its value: JAX differentiates
    `reduce_window` only for known operations with their own initial value.
    """
    if isinstance(init, jax.Array):
        return init.astype(dtype)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    has_infinity = is_float and np.isinf(np.asarray(np.inf, dtype))
    if has_infinity or not np.isinf(init):
        return np.asarray(init, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(init > 0)
    bounds = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
    return np.asarray(bounds.max if init > 0 else bounds.min, dtype)
