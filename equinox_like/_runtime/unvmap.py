"""`unvmap_all`, `unvmap_any`, `unvmap_max`: one value for a whole batch."""

import jax
import jax.numpy as jnp

from .._compat.primitives import for_whole_batch
from .._typing import ArrayLike

unvmap_all_p = for_whole_batch("unvmap_all", jnp.all, like=jnp.all)
"""The primitive of [`equinox_like.internal.unvmap_all`][]: `unvmap_all_p.bind(x)`."""

unvmap_any_p = for_whole_batch("unvmap_any", jnp.any, like=jnp.any)
"""The primitive of [`equinox_like.internal.unvmap_any`][]: `unvmap_any_p.bind(x)`."""

unvmap_max_p = for_whole_batch("unvmap_max", jnp.max, like=jnp.max)
"""The primitive of [`equinox_like.internal.unvmap_max`][]: `unvmap_max_p.bind(x)`."""


def unvmap_all(x: ArrayLike) -> jax.Array:
    """`jnp.all` over an array and over the batch of every `jax.vmap` around it.

    **Arguments:**

    - `x`: an array of any shape and dtype, or a Python number.

    **Returns:**

    A bool of shape `()`, which has no batch axis: it can be the predicate of a `lax.cond`
    that stays a `cond` under `vmap`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        f = jax.vmap(eqx.internal.unvmap_all, out_axes=None)
        assert not f(jnp.asarray([True, False]))
        ```
    """
    return unvmap_all_p.bind(jnp.asarray(x))


def unvmap_any(x: ArrayLike) -> jax.Array:
    """`jnp.any` over an array and over the batch of every `jax.vmap` around it.

    **Arguments:**

    - `x`: an array of any shape and dtype, or a Python number.

    **Returns:**

    A bool of shape `()`, which has no batch axis; `False` for an empty array.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        f = jax.vmap(eqx.internal.unvmap_any, out_axes=None)
        assert f(jnp.asarray([True, False]))
        ```
    """
    return unvmap_any_p.bind(jnp.asarray(x))


def unvmap_max(x: ArrayLike) -> jax.Array:
    """`jnp.max` over an array and over the batch of every `jax.vmap` around it.

    **Arguments:**

    - `x`: an array of any shape and of a real dtype, or a Python number.

    **Returns:**

    An array of shape `()` and the dtype of `x`, which has no batch axis.

    **Raises:**

    `ValueError` for an empty array, `NotImplementedError` if it is differentiated.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        f = jax.vmap(eqx.internal.unvmap_max, out_axes=None)
        assert f(jnp.asarray([1, 3, 2])) == 3
        ```
    """
    return unvmap_max_p.bind(jnp.asarray(x))
