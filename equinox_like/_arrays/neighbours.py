"""`nextafter` and `prevbefore`: the floating-point numbers next to a number."""

import jax
import jax.numpy as jnp
import numpy as np

from .._typing import ArrayLike


def nextafter(x: ArrayLike) -> jax.Array:
    """The next larger floating-point number.

    For zero, of either sign, this is the smallest normal number, since many devices
    treat smaller numbers as zero.

    **Arguments:**

    - `x`: an array of a floating dtype, or a Python float.

    **Returns:**

    An array of the shape and dtype of `x`. Infinity, or the largest number of a dtype
    without one, is unchanged. The derivative is 1.

    **Raises:**

    `ValueError` if `x` has another dtype.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.internal.nextafter(1.0) == 1 + jnp.finfo(jnp.float32).eps
        ```
    """
    return _neighbour(_as_floating(x, "nextafter"), 1)


def prevbefore(x: ArrayLike) -> jax.Array:
    """The next smaller floating-point number.

    As [`equinox_like.internal.nextafter`][], in the other direction.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.internal.prevbefore(0.0) == -jnp.finfo(jnp.float32).tiny
        ```
    """
    return _neighbour(_as_floating(x, "prevbefore"), -1)


def _as_floating(x: ArrayLike, name: str) -> jax.Array:
    x = jnp.asarray(x)
    # The powers of two of `float8_e8m0fnu` have neither a sign nor a zero.
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.float8_e8m0fnu:
        raise ValueError(f"`{name}` takes floating-point numbers; got {x.dtype}.")
    return x


def _neighbour(x: jax.Array, sign: int) -> jax.Array:
    # The rule calls `step`: derivatives of any order are those of the identity.
    @jax.custom_jvp
    def step(x):
        tiny = jnp.asarray(sign * jnp.finfo(x.dtype).tiny, x.dtype)
        # Infinity, or the largest number of a dtype that has none, such as float8_e4m3fn.
        far = np.fmax(np.asarray(np.inf, x.dtype), jnp.finfo(x.dtype).max)
        far = jnp.full_like(x, sign * far)
        return jnp.where(x == 0, tiny, jnp.nextafter(x, far))

    step.defjvp(lambda primals, tangents: (step(*primals), *tangents))
    return step(x)
