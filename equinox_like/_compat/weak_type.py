"""Arrays whose dtype is weak, as that of `jnp.array(0.1)` is.

JAX has no public function to make an array weakly typed. Serves jax 0.10 to 0.12: the
parameters of a primitive. The fallback is the array as it is.
"""

import jax

from .tracer import Tracer


def weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with the same dtype, which is weak."""
    convert = jax.lax.convert_element_type_p
    try:
        weak = convert.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
    except TypeError:
        return x
    if isinstance(weak, Tracer) or weak.sharding == x.sharding:
        return weak
    return jax.device_put(weak, x.sharding)  # it may have lost the memory kind
