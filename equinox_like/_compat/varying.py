"""The manual axes of a mesh along which an array varies from device to device.

Serves jax 0.10 to 0.12, where the abstract value of an array has
`manual_axis_type.varying`, or `vma` in older versions. Needed to name the output that
`jax.shard_map` refuses, since JAX only gives its index, and for the types of our own
primitives. Without either attribute, the error is JAX's own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from .rules import as_struct


def varying_axes(aval: Any) -> frozenset[Any]:
    """The axes along which an array varies, from its `jax.typeof`."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is not None:
        return frozenset(getattr(kind, "varying", ()))
    return frozenset(getattr(aval, "vma", None) or ())


def vary_over(axes: Iterable[Any], x: Any) -> Any:
    """`x`, marked as varying over these axes too."""
    missing = tuple(set(axes) - varying_axes(jax.typeof(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, each marked as varying over the axes that any of them varies over."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in arrays))
    return tuple(vary_over(axes, x) for x in arrays) if axes else arrays


def types_varying_over(axes: Iterable[Any], types: Sequence[Any]) -> Sequence[Any]:
    """These types of arrays that vary over no axes, as types that vary over `axes`."""
    if not axes:
        return types
    mark = jax.make_jaxpr(lambda *data: [vary_over(axes, x) for x in data])
    return mark(*map(as_struct, types)).out_avals
