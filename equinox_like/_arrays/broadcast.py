"""`left_broadcast_to`: broadcasting whose axes are aligned on the left."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._typing import ArrayLike


def left_broadcast_to(arr: ArrayLike, shape: Sequence[int]) -> jax.Array:
    """As `jnp.broadcast_to`, but new axes are added on the right.

    **Arguments:**

    - `arr`: an array, or a Python number.
    - `shape`: the shape of the result. It begins with the shape of `arr`, in which an
        axis of size 1 fits any size.

    **Returns:**

    An array of this shape and the dtype of `arr`.

    **Raises:**

    `ValueError` if the shapes do not fit.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        mask = jnp.asarray([True, False, True])
        assert eqx.internal.left_broadcast_to(mask, (3, 2)).all(axis=1).tolist() == [
            True, False, True
        ]
        ```
    """
    arr, shape = jnp.asarray(arr), tuple(shape)
    head = shape[: arr.ndim]
    if len(head) < arr.ndim or any(
        n not in (1, m) for n, m in zip(arr.shape, head, strict=True)
    ):
        raise ValueError(
            f"An array of shape {arr.shape} cannot be broadcast to {shape}, with the axes "
            "aligned on the left."
        )
    missing = tuple(range(arr.ndim, len(shape)))
    return jnp.broadcast_to(jnp.expand_dims(arr, missing), shape)
