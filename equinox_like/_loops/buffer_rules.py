"""The primitives that read and write buffers in place, also in derivatives.

Their derivatives touch only the elements that are read or written. JAX's own rules
would create an array of zeros as large as the buffer for each read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._compat.axes import varying_alike
from .._compat.rules import Zero, instantiate, is_undefined_primal
from .._runtime.finalise import register_impl_finalisation
from .._runtime.vprim import create_vprim
from .select import select_if_vmap


def read(x: Any, place: Any, arrays: Any) -> tuple[Any, Any]:
    """The value at a place, and `x` again, to be used in place of `x` from now on.

    In the backward pass, the cotangent of `x` then passes through all reads one by one,
    and each read adds to it in place.
    """
    value, x = read_p.bind(x, *arrays, place=place)
    return value, x


def write(pred: Any, x: Any, value: Any, place: Any, arrays: Any) -> Any:
    args = varying_alike(pred, x, value, *arrays)
    (out,) = maybe_set_p.bind(*args, place=place)
    return out


def _then(value: Any, x: Any) -> Any:
    """`value`, which was read from `x`, and `x`, available only after the read.

    XLA copies an array before a write unless it knows that all reads come earlier.
    """
    return lax.optimization_barrier((value, x))


def _read(x, *arrays, place):
    return list(_then(place.read(x, *arrays), x))


def _read_types(x, *arrays, place):
    (value,) = jax.make_jaxpr(place.read)(x, *arrays).out_avals
    return [value, x]


def _read_jvp(primals, tangents, *, place):
    out = read_p.bind(*primals, place=place)
    return out, read_p.bind(tangents[0], *primals[1:], place=place)


def _read_transpose(cotangents, x, *arrays, place):
    value, rest = cotangents
    none = [None] * len(arrays)
    if type(value) is Zero:
        return [rest, *none]
    return [place.add_read(instantiate(rest), value, *arrays), *none]


def _set(pred, x, value, *arrays, place):
    old = place.written(x, *arrays)
    return [place.write(x, select_if_vmap(pred, value, old), *arrays)]


def _set_types(pred, x, value, *arrays, place):
    return [x]


def _set_jvp(primals, tangents, *, place):
    pred, _, _, *arrays = primals
    _, dx, dvalue, *_ = tangents
    out = maybe_set_p.bind(*primals, place=place)
    dx, dvalue = instantiate(dx), instantiate(dvalue)
    return out, maybe_set_p.bind(pred, dx, dvalue, *arrays, place=place)


def _set_transpose(cotangents, pred, x, value, *arrays, place):
    (ct,) = cotangents
    none = [None] * len(arrays)
    if type(ct) is Zero:
        return [None, None, None, *none]
    here, ct = _then(place.written(ct, *arrays), ct)
    zeros = jnp.zeros_like(here)
    ct_value = select_if_vmap(pred, here, zeros) if is_undefined_primal(value) else None
    ct_x = write(pred, ct, zeros, place, arrays) if is_undefined_primal(x) else None
    return [None, ct_x, ct_value, *none]


read_p: Any = create_vprim(
    "read_buffer", _read, _read_types, _read_jvp, _read_transpose
)
"""From an array and the arrays of an index to the value there, and the same array."""
maybe_set_p: Any = create_vprim("maybe_set", _set, _set_types, _set_jvp, _set_transpose)
"""`maybe_set_p.bind(pred, x, value, *arrays, place=place)` returns `[x]` with `value`
at the index that `place` and `arrays` describe. The bool `pred` is assumed to be true.
Under a `jax.vmap` that maps `pred`, only elements where it is true are written."""

register_impl_finalisation(read_p)
register_impl_finalisation(maybe_set_p)
