"""`resize` and `Upsample`: resize the spatial axes of an array."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._errors import ShapeError
from ..._module import Module, field
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.precision import accumulation_dtype
from .._base.shape import as_array
from .._base.sharding import explicit_mesh, parts, placed

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
    return _resized(
        "resize", as_array("`resize`", "x", x), size, scale, method, antialias
    )


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
        """Arguments and errors as for [`equinox_like.nn.resize`][]."""
        _check_options("Upsample", size, scale, method)
        self.size = tuple(size) if isinstance(size, Sequence) else size
        self.scale = tuple(scale) if isinstance(scale, Sequence) else scale
        self.method = method
        self.antialias = antialias

    @jax.named_scope("eqx.nn.Upsample")
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
        known = ", ".join(map(repr, get_args(ResizeMethod)))
        raise ValueError(f"`{name}` takes one of {known} as `method`; got {method!r}.")
    if size is not None:
        for each in size if isinstance(size, Sequence) else [size]:
            if not isinstance(each, Integral) or each < 1:
                raise ValueError(f"`{name}` takes ints >= 1 as `size`; got {size!r}.")
        return
    for each in scale if isinstance(scale, Sequence) else [scale]:
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

    if explicit_mesh(x) is None:
        return run(x)
    sizes = zip(x.shape, shape, parts(x), strict=True)
    kept = (part if before == after else None for before, after, part in sizes)
    return placed(run, PartitionSpec(*kept), x)


def _new_sizes(name: str, x: Array, size: Any, scale: Any) -> tuple[int, ...]:
    old = x.shape[1:]
    if not old or 0 in old:
        raise ShapeError(
            f"`{name}` takes an `x` of shape (channels, size_1, ..., size_n), with one "
            f"spatial axis or more, none of them empty, but was given shape {x.shape}."
        )
    given = scale if size is None else size
    each = tuple(given) if isinstance(given, Sequence) else (given,) * len(old)
    if len(each) != len(old):
        raise ShapeError(
            f"`{name}` takes one value for each spatial axis: {len(old)} in all for an "
            f"`x` of shape {x.shape}; got {given!r}."
        )
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
