"""`select_if_vmap_p`: selects between the new and the old value of a loop's carry.

Under `jax.vmap`, batch elements that have finished keep their values while the others
continue. Without a batch, the loop itself ends, so no selection is needed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._compat.axes import varying_alike
from .._compat.rules import (
    Zero,
    batching_rules,
    instantiate,
    is_undefined_primal,
    jvp_rules,
    lower_as,
    new_primitive,
    transposition_rules,
)
from .._runtime.finalise import register_impl_finalisation

select_if_vmap_p: Any = new_primitive("select_if_vmap")
"""`select_if_vmap_p.bind(pred, x, y)` returns `[x]`. The bool `pred` is assumed to be
true. Under a `jax.vmap` that maps `pred`, it returns the elements of `x` where `pred`
is true, and the elements of `y` elsewhere."""


def select_if_vmap(pred: Any, x: Any, y: Any) -> Any:
    # A loop that ends elsewhere on each device ends with another carry on each.
    (out,) = select_if_vmap_p.bind(*varying_alike(pred, x, y))
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
    tangent = select_if_vmap(pred, instantiate(dx), instantiate(dy))
    return [select_if_vmap(pred, x, y)], [tangent]


def _pull_back(cotangents, pred, x, y):
    (ct,) = cotangents
    if type(ct) is Zero:
        return [None, None, None]
    zeros = jnp.zeros_like(ct)
    return [
        None,
        select_if_vmap(pred, ct, zeros) if is_undefined_primal(x) else None,
        select_if_vmap(pred, zeros, ct) if is_undefined_primal(y) else None,
    ]


def _batch(args, axes):
    # By `jax.vmap`, since the batch may be split over the explicit axes of a mesh.
    pred, x, y = args
    if axes[0] is not None:
        return [jax.vmap(jnp.where, axes)(pred, x, y)], [0]
    x, y = jax.vmap(lambda *both: both, axes[1:])(x, y)
    return [select_if_vmap(pred, x, y)], [0]


jvp_rules[select_if_vmap_p] = _push_forward
transposition_rules[select_if_vmap_p] = _pull_back
batching_rules[select_if_vmap_p] = _batch
lower_as(select_if_vmap_p, _run)
register_impl_finalisation(select_if_vmap_p)
