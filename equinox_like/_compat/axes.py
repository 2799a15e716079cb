"""Named axes: the manual axes along which an array varies, and sums over axes of `vmap`.

Serves jax 0.10 to 0.12.

- The abstract value of an array has `manual_axis_type.varying`, or `vma` in older
  versions. Needed to name the output that `jax.shard_map` refuses, since JAX only gives
  its index, and for the types of our own primitives. Without either attribute, the error
  is JAX's own.
- Within a `jax.shard_map` with `check_vma`, JAX's collectives raise an `AssertionError` for
  the name of an axis of `jax.vmap`. `psum` and `pmean` here take it: a primitive of ours
  sums over such names. Its batching rule is in `fancy_primitive_batchers` of
  `jax.interpreters`, whose rules get the name of the axis. There is no fallback for that
  table, nor for `ad.deflinear2`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from .primitives import Primitive, as_struct
from .tracing import Tracer


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


_sum_p = Primitive("sum_over_vmaps")


def psum(x: Any, names: Any) -> Any:
    """`jax.lax.psum` of an array or a number."""
    names = names if isinstance(names, tuple) else (names,)
    on_mesh = jax.sharding.get_abstract_mesh().manual_axes
    mapped = tuple(name for name in names if name not in on_mesh)
    if mapped and on_mesh and isinstance(x, Tracer):
        jax.lax.psum(1, mapped)  # raises NameError unless there are such axes
        x = _sum_p.bind(x, names=mapped)
        names = tuple(name for name in names if name in on_mesh)
    return jax.lax.psum(x, names)


def pmean(x: Any, names: Any) -> Any:
    """`jax.lax.pmean` of an array."""
    return psum(x, names) / jax.lax.psum(1, names)


def _batched(
    axis: Any, args: Sequence[Any], dims: Sequence[int | None], *, names: Any
) -> tuple[Any, int | None]:
    (x,), (dim,) = args, dims
    rest = tuple(name for name in names if name != axis.name)
    if rest != names:
        x = x * axis.size if dim is None else jnp.sum(x, dim, dtype=x.dtype)
        dim = None
    return (_sum_p.bind(x, names=rest) if rest else x), dim


def _transposed(cotangent: Any, _: Any, *, names: Any) -> list[Any]:
    return [_sum_p.bind(cotangent, names=names)]


# Every `vmap` removes its name, so the primitive is neither evaluated nor lowered.
_sum_p.def_abstract_eval(lambda x, *, names: x)
ad.deflinear2(_sum_p, _transposed)
batching.fancy_primitive_batchers[_sum_p] = _batched
