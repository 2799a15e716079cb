"""Along which manual axes of a mesh an array differs from device to device.

Serves jax 0.10 to 0.12, where the type of an array has `manual_axis_type.varying`; in
older ones it was `vma`. Needed to name the output that `jax.shard_map` refuses, which
JAX knows by number. If a type has neither, nothing is known, and the message is JAX's.
"""

from typing import Any


def varying_axes(aval: Any) -> frozenset[Any]:
    """The axes by the type of an array, as `jax.typeof` gives it."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is not None:
        return frozenset(getattr(kind, "varying", ()))
    return frozenset(getattr(aval, "vma", None) or ())
