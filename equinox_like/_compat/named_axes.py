"""`psum` and `pmean` that also take names of `jax.vmap` within a `jax.shard_map`.

There, if `check_vma` is on, JAX's collectives raise an `AssertionError` for a name that is
not an axis of the mesh. Serves jax 0.10 to 0.12: a primitive of ours sums over the names
of `vmap`. Its batching rule is in `fancy_primitive_batchers` of `jax.interpreters`, whose
rules get the name of the axis. Without that table, JAX raises its error. There is no
fallback for `ad.deflinear2`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from .primitive import Primitive
from .tracer import Tracer

_sum_p = Primitive("sum_over_vmaps")


def psum(x: Any, names: Any) -> Any:
    """`jax.lax.psum` of an array or a number."""
    names = names if isinstance(names, tuple) else (names,)
    on_mesh = jax.sharding.get_abstract_mesh().manual_axes
    mapped = tuple(name for name in names if name not in on_mesh)
    if mapped and on_mesh and isinstance(x, Tracer) and _is_supported:
        jax.lax.psum(1, mapped)  # raises NameError unless there are such axes
        x = _sum_p.bind(x, names=mapped)
        names = tuple(name for name in names if name in on_mesh)
    return jax.lax.psum(x, names)


def pmean(x: Any, names: Any) -> Any:
    """`jax.lax.pmean` of an array."""
    return psum(x, names) / jax.lax.psum(1, names)


def register(batchers: Any) -> bool:
    """Registers the batching rule in this table; returns whether there is one."""
    if batchers is None:
        return False
    batchers[_sum_p] = _batched
    return True


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
_is_supported = register(getattr(batching, "fancy_primitive_batchers", None))
