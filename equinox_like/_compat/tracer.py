"""The class of JAX's tracers, and the arrays that they stand for.

Serves jax 0.10 to 0.12, where `jax.core.Tracer` is the only name for the class. Needed
because not every tracer is a `jax.Array`: one that stands for a `jax.Ref` is not.

A transformation outside of compiled functions computes with arrays, which its tracers
hold as `val` (`vmap`) or `primal` (derivatives). A compiled function that it calls waits
for them if it holds a check. If they are not found, the call does not wait, and JAX
raises the error when the result is used.
"""

from typing import Any

import jax
from jax.core import Tracer as Tracer

_HOLD = ("val", "primal")


def known_array(x: Any) -> jax.Array | None:
    """The array that `x` is or stands for; `None` if it is known only when it runs."""
    while isinstance(x, Tracer):
        held = (getattr(x, name, None) for name in _HOLD)
        x = next((y for y in held if isinstance(y, Tracer | jax.Array)), None)
    return x if isinstance(x, jax.Array) else None
