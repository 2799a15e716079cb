"""Pooling, and `resize` and `Upsample`, which change the sizes of spatial axes."""

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._errors import ShapeError
from ..._module import Module, field
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.checks import (
    as_array,
    as_padding,
    as_size,
    check_function,
    check_input,
    check_length,
    check_windows,
    jax_array,
    per_axis,
    wrong_value,
)
from .._base.precision import accumulation_dtype, computes
from .._base.sharding import parts, split_along, split_as

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
            is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
            # The sum of small integers, or of a large window in half precision, overflows.
            wide = accumulation_dtype(x)
            if not is_inexact:
                wide = jax.eval_shape(jnp.sum, x).dtype
            y = super().__call__(x.astype(wide)) / number
            return y.astype(x.dtype) if is_inexact else y


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


class AdaptivePool(Module):
    """Divides each spatial axis into a given number of bins, and reduces each bin.

    An axis of size `d` that is to become one of size `t` is divided, from the start, into
    `d % t` bins of `d // t + 1` elements, and then bins of `d // t`. They do not
    overlap. The axes are reduced one after the other.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptivePool(3, num_spatial_dims=1, operation=jnp.median)
        assert pool(jnp.arange(8.0)[None]).tolist() == [[1.0, 4.0, 6.5]]
        ```
    """

    target_shape: tuple[int, ...] = field(static=True)
    operation: Callable[[Any], Any]

    def __init__(
        self,
        target_shape: int | Sequence[int],
        num_spatial_dims: int,
        operation: Callable[[Any], Any],
    ):
        """**Arguments:**

        - `target_shape`: the sizes of the spatial axes of the output: an int, or one for
            each axis.
        - `num_spatial_dims`: the number of spatial axes.
        - `operation`: a function of an array with one axis that returns a scalar.

        **Raises:**

        `ValueError` if `target_shape` has another length.
        """
        n = as_size(self, "num_spatial_dims", num_spatial_dims)
        self.target_shape = per_axis(self, "target_shape", target_shape, n, 0)
        check_length(self, "target_shape", self.target_shape, n)
        check_function(type(self).__name__, "operation", operation)
        self.operation = operation

    @computes("eqx.nn.AdaptivePool", "nothing")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: shape `(channels, size_1, ..., size_n)`.
        - `key`: ignored.

        **Returns:**

        An array of shape `(channels, *target_shape)`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another rank, if an axis of `x` is
        smaller than its target, or if the operation does not return a scalar.
        """
        check_input(self, x, (None,) * (len(self.target_shape) + 1))
        x = jax_array(x)
        for axis, target in enumerate(self.target_shape, start=1):
            x = _reduced(self, x, axis, target)
        return x


class _AdaptivePoolNd(AdaptivePool):
    """Base class of those with a fixed operation and number of spatial axes."""

    _reduction: ClassVar[tuple[int, Any]] = (0, None)

    def __init__(self, target_shape: int | Sequence[int]):
        """**Arguments:**

        - `target_shape`: the sizes of the spatial axes of the output, or one size for all.
        """
        super().__init__(target_shape, *self._reduction)


class AdaptiveAvgPool1d(_AdaptivePoolNd, init=False):
    """The average of each bin, along one spatial axis.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveAvgPool1d(4)
        assert pool(jnp.arange(10.0)[None]).tolist() == [[1.0, 4.0, 6.5, 8.5]]
        ```
    """

    _reduction = 1, jnp.mean


class AdaptiveAvgPool2d(_AdaptivePoolNd, init=False):
    """The average of each bin, along two spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveAvgPool2d((2, 3))
        assert pool(jnp.ones((5, 7, 9))).shape == (5, 2, 3)
        ```
    """

    _reduction = 2, jnp.mean


class AdaptiveAvgPool3d(_AdaptivePoolNd, init=False):
    """The average of each bin, along three spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveAvgPool3d(2)
        assert pool(jnp.ones((5, 3, 4, 5))).shape == (5, 2, 2, 2)
        ```
    """

    _reduction = 3, jnp.mean


class AdaptiveMaxPool1d(_AdaptivePoolNd, init=False):
    """The maximum of each bin, along one spatial axis.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveMaxPool1d(4)
        assert pool(jnp.arange(10.0)[None]).tolist() == [[2.0, 5.0, 7.0, 9.0]]
        ```
    """

    _reduction = 1, jnp.max


class AdaptiveMaxPool2d(_AdaptivePoolNd, init=False):
    """The maximum of each bin, along two spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveMaxPool2d((2, 3))
        assert pool(jnp.ones((5, 7, 9))).shape == (5, 2, 3)
        ```
    """

    _reduction = 2, jnp.max


class AdaptiveMaxPool3d(_AdaptivePoolNd, init=False):
    """The maximum of each bin, along three spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveMaxPool3d(2)
        assert pool(jnp.ones((5, 3, 4, 5))).shape == (5, 2, 2, 2)
        ```
    """

    _reduction = 3, jnp.max


def _reduced(pool: AdaptivePool, x: Array, axis: int, target: int) -> Array:
    size = x.shape[axis]
    if not 0 < target <= size:
        raise ShapeError(
            f"{type(pool).__name__} splits axis {axis} of its input into {target} bins, "
            f"but was given shape {x.shape}, with {size} elements."
        )
    small, number_of_large = divmod(size, target)
    split = number_of_large * (small + 1)
    x = jnp.moveaxis(split_along(x, axis, None), axis, -1)
    bins = [
        # Not -1, which is ambiguous if there are no channels.
        each.reshape(*x.shape[:-1], each.shape[-1] // width, width)
        for each, width in ((x[..., :split], small + 1), (x[..., split:], small))
        if each.shape[-1] > 0
    ]
    y = jnp.concatenate([_over_last_axis(pool, b) for b in bins], axis=-1)
    return jnp.moveaxis(y, -1, axis)


def _over_last_axis(pool: AdaptivePool, x: Array) -> Array:
    operation = pool.operation
    for _ in range(x.ndim - 1):
        operation = jax.vmap(operation)
    y = operation(x)
    if getattr(y, "shape", None) != x.shape[:-1]:
        raise ShapeError(
            f"{type(pool).__name__} takes an `operation` that returns a scalar for an "
            f"array of one axis; for bins of shape {x.shape} it returned "
            f"{describe_node(y)}."
        )
    return y


# `int` is listed because beartype does not accept an int as a float.
_Scale = float | int | Sequence[float | int]
ResizeMethod = Literal["nearest", "linear", "cubic", "lanczos3", "lanczos5"]


@jax.named_scope("eqx.nn.resize")
def resize(
    x: ArrayLike,
    *,
    size: int | Sequence[int] | None = None,
    scale: _Scale | None = None,
    method: ResizeMethod = "nearest",
    antialias: bool = True,
) -> Array:
    """Resizes the spatial axes of an array, by `jax.image.resize`.

    Point `i` of `n` stands at the centre of its interval, at `(i + 1/2) / n` of the
    axis, before and after. This is what other libraries call `align_corners=False`; for
    `align_corners=True` use `jax.image.scale_and_translate`. `"cubic"` is the kernel of
    Keys (1981) with the parameter -0.5 (torch: -0.75). At the edges the weights of the
    existing points sum to 1.

    **Arguments:**

    - `x`: shape `(channels, size_1, ..., size_n)`, with one spatial axis or more.
    - `size`: the new sizes: an int for all spatial axes, or one for each.
    - `scale`: factors for the sizes, in place of `size`: a number for all spatial axes,
        or one for each. The new sizes are rounded down.
    - `method`: `"nearest"`, `"linear"`, `"cubic"`, `"lanczos3"` or `"lanczos5"`.
    - `antialias`: whether to widen the kernel where an axis shrinks, so that each old point
        has a weight. `"nearest"` has no kernel.

    **Returns:**

    An array of shape `(channels, new_1, ..., new_n)` and the dtype of `x`, computed in
    float32 at least. Integers become floats, except for `"nearest"`. On a mesh with
    explicit axes, an axis whose size changes is not split.

    **Raises:**

    `ValueError` unless exactly one of `size` and `scale` is given, for values that are
    not positive, and for another `method`. [`equinox_like.ShapeError`][] if there is not
    one value for each spatial axis, if there are no spatial axes, or if an axis is empty.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        x = jnp.array([[0.0, 4.0]])
        assert (eqx.nn.resize(x, scale=2) == jnp.array([[0, 0, 4, 4]])).all()
        y = eqx.nn.resize(x, size=4, method="linear")
        assert (y == jnp.array([[0, 1, 3, 4]])).all()
        ```
    """
    _check_options("resize", size, scale, method)
    options = size, scale, method, antialias
    return _resized("resize", as_array("`resize`", "x", x), *options)


class Upsample(Module):
    """Resizes the spatial axes of its input: [`equinox_like.nn.resize`][] as a layer.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        upsample = eqx.nn.Upsample(scale=2, method="linear")
        assert upsample(jnp.ones((3, 4, 5))).shape == (3, 8, 10)
        ```
    """

    size: int | tuple[int, ...] | None = field(static=True)
    scale: float | int | tuple[float | int, ...] | None = field(static=True)
    method: ResizeMethod = field(static=True)
    antialias: bool = field(static=True)

    def __init__(
        self,
        scale: _Scale | None = None,
        size: int | Sequence[int] | None = None,
        method: ResizeMethod = "nearest",
        antialias: bool = True,
    ):
        """**Arguments:**

        - `scale`: factors for the sizes: a number for all spatial axes, or one for each.
        - `size`: the new sizes, in place of `scale`: an int, or one for each axis.
        - `method`, `antialias`: as for [`equinox_like.nn.resize`][], and so are errors.
        """
        _check_options("Upsample", size, scale, method)
        self.size = tuple(size) if isinstance(size, Sequence) else size
        self.scale = tuple(scale) if isinstance(scale, Sequence) else scale
        self.method = method
        self.antialias = antialias

    @computes("eqx.nn.Upsample", "nothing")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: shape `(channels, size_1, ..., size_n)`.
        - `key`: ignored.

        **Returns:**

        As [`equinox_like.nn.resize`][].

        **Raises:**

        [`equinox_like.ShapeError`][] as [`equinox_like.nn.resize`][].
        """
        options = self.size, self.scale, self.method, self.antialias
        return _resized("Upsample", as_array(self, "x", x), *options)


def _check_options(name: str, size: Any, scale: Any, method: Any) -> None:
    if (size is None) is (scale is None):
        raise ValueError(f"`{name}` takes either `size` or `scale`.")
    if method not in get_args(ResizeMethod):
        wanted = f"one of {', '.join(map(repr, get_args(ResizeMethod)))}"
        raise wrong_value(f"`{name}`", wanted, "method", method)
    given = scale if size is None else size
    for each in given if isinstance(given, Sequence) else [given]:
        if size is not None and (not isinstance(each, Integral) or each < 1):
            raise ValueError(f"`{name}` takes ints >= 1 as `size`; got {size!r}.")
        if not isinstance(each, Real) or not 0 < float(each) < math.inf:
            raise ValueError(f"`{name}` takes numbers > 0 as `scale`; got {scale!r}.")


def _resized(
    name: str, x: Array, size: Any, scale: Any, method: ResizeMethod, antialias: bool
) -> Array:
    shape = x.shape[:1] + _new_sizes(name, x, size, scale)
    work = accumulation_dtype(x)
    keeps = method == "nearest" or jnp.issubdtype(x.dtype, jnp.inexact)
    dtype = x.dtype if keeps else work

    def run(x: Array) -> Array:
        # In half precision, the interpolation weights would be off by one percent.
        wide = x if method == "nearest" else x.astype(work)
        return jax.image.resize(wide, shape, method, antialias).astype(dtype)

    sizes = zip(x.shape, shape, parts(x), strict=True)
    kept = (part if before == after else None for before, after, part in sizes)
    return split_as(run, kept, x)


def _new_sizes(name: str, x: Array, size: Any, scale: Any) -> tuple[int, ...]:
    old = x.shape[1:]
    if not old or 0 in old:
        raise ShapeError(
            f"`{name}` takes an `x` of shape (channels, size_1, ..., size_n), with one "
            f"spatial axis or more, none of them empty, but was given shape {x.shape}."
        )
    given = scale if size is None else size
    each = tuple(given) if isinstance(given, Sequence) else (given,) * len(old)
    check_length(f"`{name}`", "size" if scale is None else "scale", each, len(old))
    if size is not None:
        return each
    # Rounded first, because 100 * 0.29 is a little less than 29.
    new = tuple(
        n * int(s) if isinstance(s, Integral) else math.floor(round(n * float(s), 6))
        for n, s in zip(old, each, strict=True)
    )
    if 0 in new:
        raise ShapeError(
            f"`{name}` of shape {x.shape} by the scale {given!r} would leave an empty "
            "axis."
        )
    return new
