"""The array of numbers in which JAX stores typed PRNG keys.

Serves jax 0.10 to 0.12: it is the private attribute `_base_array`. `sharding` and
`aval` of an array of keys are computed at each access, which takes 10 to 30 us. Those
of the array of numbers take 0.1 us. Without the attribute, calls that donate are slower
if a key comes first, or if arrays are on several devices.
"""

from typing import Any


def stored_as(x: Any) -> Any:
    """The array of numbers, for an array of typed keys; any other array itself."""
    return getattr(x, "_base_array", x)
