"""Models whose parameters are drawn in NumPy: nothing is compiled to make them."""

import jax
import jax.numpy as jnp
import numpy as np

import equinox_like as eqx


def drawn(build, *, seed=0):
    """What `build()` returns, which is traced only, with other floating-point arrays."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        assert jnp.issubdtype(leaf.dtype, jnp.floating), leaf
        # Unlike `jnp.asarray`, `device_put` compiles nothing.
        return jax.device_put(rng.uniform(-1, 1, leaf.shape).astype(leaf.dtype))

    return jax.tree.map(draw, eqx.filter_eval_shape(build))
