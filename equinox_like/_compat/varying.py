"""The manual axes of a mesh along which an array varies from device to device.

Serves jax 0.10 to 0.12, where the abstract value of an array has
`manual_axis_type.varying`, or `vma` in older versions. Needed to name the output that
`jax.shard_map` refuses, since JAX only gives its index. Without either attribute, the
error is JAX's own.
"""

from typing import Any


def varying_axes(aval: Any) -> frozenset[Any]:
    """The axes along which an array varies, from its `jax.typeof`."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is not None:
        return frozenset(getattr(kind, "varying", ()))
    return frozenset(getattr(aval, "vma", None) or ())
