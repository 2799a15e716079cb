"""`announce_transform`: shows which JAX transformations reach a value, and when."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax.numpy as jnp

from .._compat.rules import Tangents, identity
from .._core.parts import take_apart
from .._runtime.spoil import may_depend

_T = TypeVar("_T")


def announce_transform(
    x: _T,
    name: Hashable = None,
    intermediates: bool = False,
    announce: Callable[[str], Any] = print,
) -> _T:
    """Returns `x`, and announces each JAX transformation that is applied to it.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged.
    - `name`: if given, printed in parentheses before each text.
    - `intermediates`: whether to announce also the beginning of each transformation.
    - `announce`: called with each text, while the program is traced or lowered.

    A text lists the transformations so far, joined by colons: `jvp_p` and `jvp_t` for
    the primal and the tangent of a derivative, `transpose`, `vmap`. The last word is
    the stage: `impl` (evaluated eagerly), `abstract` (abstractly evaluated), `mlir`
    (lowered). JAX decides how often `abstract` occurs.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        texts = []

        @jax.jit
        @jax.vmap
        def f(x):
            return eqx.debug.announce_transform(x, announce=texts.append)

        f(jnp.ones(3))
        assert texts == ["vmap:abstract", "vmap:mlir"]
        ```
    """
    arrays, rest = take_apart(x, may_depend)
    if not arrays:
        return x
    out = announce_jaxpr_p.bind(
        *map(jnp.asarray, arrays),
        stack=(),
        name=name,
        intermediates=intermediates,
        announce=announce,
    )
    return rest.fill(out)


def _tell(
    stage: str | None,
    stack: tuple[str, ...],
    name: Hashable,
    intermediates: bool,
    announce: Callable[[str], Any],
) -> None:
    prefix = "" if name is None else f"({name}) "
    announce(prefix + ":".join(stack if stage is None else (*stack, stage)))


def _entering(
    transformation: str, stack: tuple[str, ...], **params: Any
) -> tuple[str, ...]:
    """The stack with one more transformation; announces it under `intermediates`."""
    stack = (*stack, transformation)
    if params["intermediates"]:
        _tell(None, stack, **params)
    return stack


def _jvp(primals: Any, tangents: Tangents, stack: Any, **params: Any) -> Any:
    _entering("jvp", stack, **params)
    bind = announce_jaxpr_p.bind
    out = bind(*primals, stack=(*stack, "jvp_p"), **params)
    found = bind(*tangents.values(), stack=(*stack, "jvp_t"), **params)
    return out, dict(zip(tangents, found, strict=True))


def _transpose(cotangents: Tangents, stack: Any, **params: Any) -> Tangents:
    stack = _entering("transpose", stack, **params)
    found = announce_jaxpr_p.bind(*cotangents.values(), stack=stack, **params)
    return dict(zip(cotangents, found, strict=True))


def _batch(arrays: Any, axes: Any, stack: Any, **params: Any) -> Any:
    stack = _entering("vmap", stack, **params)
    return announce_jaxpr_p.bind(*arrays, stack=stack, **params), axes


announce_jaxpr_p = identity(
    "announce_jaxpr", jvp=_jvp, transpose=_transpose, batch=_batch, on_stage=_tell
)
"""The primitive of [`equinox_like.debug.announce_transform`][], of any number of arrays."""
