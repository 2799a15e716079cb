"""`select_if_vmap_p`: selects between the new and the old value of a loop's carry.

Under `jax.vmap`, batch elements that have finished keep their values while the others
continue. Without a batch, the loop itself ends, so no selection is needed.
"""

from typing import Any

import jax.numpy as jnp

from .._compat.primitive import batch_size
from .._compat.rules import (
    Zero,
    batching_rules,
    instantiate,
    is_undefined_primal,
    jvp_rules,
    lower_as,
    new_primitive,
    transposition_rules,
    zero_like,
)
from .._compat.varying import varying_alike
from .._runtime.finalise import register_impl_finalisation

select_if_vmap_p: Any = new_primitive("select_if_vmap")
"""`select_if_vmap_p.bind(pred, x, y)` returns `[x]`. The bool `pred` is assumed to be
true. Under a `jax.vmap` that maps `pred`, it returns the elements of `x` where `pred`
is true, and the elements of `y` elsewhere."""


def select_if_vmap(pred: Any, x: Any, y: Any) -> Any:
    (out,) = select_if_vmap_p.bind(pred, *varying_alike(x, y))
    return out


@select_if_vmap_p.def_impl
def _run(pred, x, y):
    return [x]


@select_if_vmap_p.def_abstract_eval
def _type_of_results(pred, x, y):
    return [x]


def _push_forward(primals, tangents):
    pred, x, y = primals
    _, dx, dy = tangents
    if type(dx) is Zero and type(dy) is Zero:
        return [select_if_vmap(pred, x, y)], [zero_like(x)]
    dx, dy = (instantiate(t) if type(t) is Zero else t for t in (dx, dy))
    return [select_if_vmap(pred, x, y)], [select_if_vmap(pred, dx, dy)]


def _pull_back(cotangents, pred, x, y):
    (ct,) = cotangents
    if type(ct) is Zero:
        return [
            None,
            *(zero_like(z.aval) if is_undefined_primal(z) else None for z in (x, y)),
        ]
    zeros = jnp.zeros_like(ct)
    return [
        None,
        select_if_vmap(pred, ct, zeros) if is_undefined_primal(x) else None,
        select_if_vmap(pred, zeros, ct) if is_undefined_primal(y) else None,
    ]


def _batch(args, axes):
    size = batch_size(args, axes)
    pred, x, y = args
    x, y = (
        _with_batch_first(z, i, size) for z, i in zip(args[1:], axes[1:], strict=True)
    )
    if axes[0] is None:
        return [select_if_vmap(pred, x, y)], [0]
    pred = jnp.expand_dims(pred, tuple(range(1, x.ndim)))
    return [jnp.where(pred, x, y)], [0]


def _with_batch_first(x: Any, axis: int | None, size: int) -> Any:
    if axis is None:
        return jnp.broadcast_to(x, (size, *jnp.shape(x)))
    return jnp.moveaxis(x, axis, 0)


jvp_rules[select_if_vmap_p] = _push_forward
transposition_rules[select_if_vmap_p] = _pull_back
batching_rules[select_if_vmap_p] = _batch
lower_as(select_if_vmap_p, _run)
register_impl_finalisation(select_if_vmap_p)
