"""`AdaptivePool`: pooling to a given output shape, for inputs of any size."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._errors import ShapeError
from ..._module import Module, field
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.callables import check_function
from .._base.shape import as_size, check_input, jax_array, per_axis
from .._base.sharding import whole_along


class AdaptivePool(Module):
    r"""Divides each spatial axis into a given number of bins, and reduces each bin.

    An axis of size $d$ that is to become one of size $t$ is divided, from the start, into
    $d \bmod t$ bins of $\lfloor d / t \rfloor + 1$ elements, and then bins of
    $\lfloor d / t \rfloor$. They do not overlap. The axes are reduced one after the other.

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
        if len(self.target_shape) != n:
            raise ValueError(
                f"{type(self).__name__} takes an int or a sequence of {n} ints as "
                f"`target_shape`; got {target_shape!r}."
            )
        check_function(type(self).__name__, "operation", operation)
        self.operation = operation

    @jax.named_scope("eqx.nn.AdaptivePool")
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


class AdaptiveAvgPool1d(AdaptivePool):
    """The average of each bin, along one spatial axis.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveAvgPool1d(4)
        assert pool(jnp.arange(10.0)[None]).tolist() == [[1.0, 4.0, 6.5, 8.5]]
        ```
    """

    def __init__(self, target_shape: int | Sequence[int]):
        """As for [`equinox_like.nn.AdaptivePool`][]."""
        super().__init__(target_shape, num_spatial_dims=1, operation=jnp.mean)


class AdaptiveAvgPool2d(AdaptivePool):
    """The average of each bin, along two spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveAvgPool2d((2, 3))
        assert pool(jnp.ones((5, 7, 9))).shape == (5, 2, 3)
        ```
    """

    def __init__(self, target_shape: int | Sequence[int]):
        """As for [`equinox_like.nn.AdaptivePool`][]."""
        super().__init__(target_shape, num_spatial_dims=2, operation=jnp.mean)


class AdaptiveAvgPool3d(AdaptivePool):
    """The average of each bin, along three spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveAvgPool3d(2)
        assert pool(jnp.ones((5, 3, 4, 5))).shape == (5, 2, 2, 2)
        ```
    """

    def __init__(self, target_shape: int | Sequence[int]):
        """As for [`equinox_like.nn.AdaptivePool`][]."""
        super().__init__(target_shape, num_spatial_dims=3, operation=jnp.mean)


class AdaptiveMaxPool1d(AdaptivePool):
    """The maximum of each bin, along one spatial axis.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveMaxPool1d(4)
        assert pool(jnp.arange(10.0)[None]).tolist() == [[2.0, 5.0, 7.0, 9.0]]
        ```
    """

    def __init__(self, target_shape: int | Sequence[int]):
        """As for [`equinox_like.nn.AdaptivePool`][]."""
        super().__init__(target_shape, num_spatial_dims=1, operation=jnp.max)


class AdaptiveMaxPool2d(AdaptivePool):
    """The maximum of each bin, along two spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveMaxPool2d((2, 3))
        assert pool(jnp.ones((5, 7, 9))).shape == (5, 2, 3)
        ```
    """

    def __init__(self, target_shape: int | Sequence[int]):
        """As for [`equinox_like.nn.AdaptivePool`][]."""
        super().__init__(target_shape, num_spatial_dims=2, operation=jnp.max)


class AdaptiveMaxPool3d(AdaptivePool):
    """The maximum of each bin, along three spatial axes.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        pool = eqx.nn.AdaptiveMaxPool3d(2)
        assert pool(jnp.ones((5, 3, 4, 5))).shape == (5, 2, 2, 2)
        ```
    """

    def __init__(self, target_shape: int | Sequence[int]):
        """As for [`equinox_like.nn.AdaptivePool`][]."""
        super().__init__(target_shape, num_spatial_dims=3, operation=jnp.max)


def _reduced(pool: AdaptivePool, x: Array, axis: int, target: int) -> Array:
    size = x.shape[axis]
    if not 0 < target <= size:
        raise ShapeError(
            f"{type(pool).__name__} splits axis {axis} of its input into {target} "
            f"bins, but was given shape {x.shape}: {size} elements cannot be split "
            f"into {target} bins."
        )
    small, number_of_large = divmod(size, target)
    split = number_of_large * (small + 1)
    x = jnp.moveaxis(whole_along(x, axis), axis, -1)
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
