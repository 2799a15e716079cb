"""`one_way`: the identity, for which reverse mode raises an error with a reason."""

from typing import Any

from .._runtime.finalise import register_impl_finalisation
from .._runtime.vprim import create_vprim


def one_way(x: Any, reason: str) -> Any:
    """`x`. Reverse mode raises a `ValueError` with the reason and the type of `x`."""
    (x,) = _one_way_p.bind(x, reason=reason)
    return x


def _refuse(cotangents, x, *, reason):
    raise ValueError(reason.format(x.aval))


_one_way_p: Any = create_vprim(
    "one_way",
    lambda x, reason: [x],
    lambda x, reason: [x],
    lambda primals, tangents, reason: (
        _one_way_p.bind(*primals, reason=reason),
        _one_way_p.bind(*tangents, reason=reason),
    ),
    _refuse,
)
register_impl_finalisation(_one_way_p)
