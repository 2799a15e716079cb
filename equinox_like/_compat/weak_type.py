"""Arrays whose dtype is weak, as that of `jnp.array(0.1)` is.

JAX has no public function to make an array weakly typed. Serves jax 0.10 to 0.12: the
parameters of a primitive. The fallback is the array as it is.
"""

import jax


def weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with the same dtype, which is weak."""
    convert = jax.lax.convert_element_type_p
    try:
        return convert.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
    except TypeError:
        return x
