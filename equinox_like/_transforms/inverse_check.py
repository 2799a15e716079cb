"""What `filter_invertible(check=True)` raises, also from a compiled program.

A primitive, as that of `error_if`, so that `filter_jit` waits for programs that hold one,
and raises its error.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat.primitive import call_host, for_whole_batch
from .._errors import NotInvertibleError
from .._jit.checks import register_check
from .._tree.filters import is_inexact_array


def refuse_large(errors: jax.Array, x: Any, name: str) -> Any:
    """`x`, unless the inverse of the function with this name is wrong.

    `errors` are the largest one in units of what rounding may do, and the largest one.
    """
    failed = _inverse_check.bind(errors, name=name)

    def depend(leaf):
        # Else nothing would use the check, and JAX would drop it.
        return jnp.where(failed, jnp.nan, leaf).astype(leaf.dtype)

    return jtu.tree_map(lambda a: depend(a) if is_inexact_array(a) else a, x)


def _fail(errors: Any, name: str) -> None:
    text = _text(errors, name)
    raise NotInvertibleError(f"\n{_BEGIN}\n{text}\n{_END}\n")


def _fail_if(errors: Any, name: str) -> np.ndarray:
    """Called with known values, not by a compiled program."""
    if not np.all(np.asarray(errors)[..., 0] <= 1):
        raise NotInvertibleError(_text(errors, name))
    return np.asarray(False)


def _text(errors: Any, name: str) -> str:
    # Of NaN the largest is NaN.
    relative, absolute = np.asarray(errors).reshape(-1, 2).max(0)
    return (
        f"The inverse of `{name}` is wrong: its result differs from the input by up to "
        f"{absolute:.3g}, and by up to {relative:.3g} times the error that rounding "
        "may cause."
    )


def _is_large(errors: jax.Array) -> jax.Array:
    # A comparison that NaN does not pass.
    return ~jnp.all(errors[..., 0] <= 1)


def _run_check(errors: jax.Array, name: str) -> jax.Array:
    fail = functools.partial(_fail, name=name)
    call = functools.partial(call_host, function=fail, on_tpu=fail)
    return jax.lax.cond(_is_large(errors), call, lambda _: np.False_, errors)


_inverse_check = for_whole_batch(
    "inverse_check", _run_check, like=_is_large, eager=_fail_if
)


def _explain(error: Exception) -> Exception | None:
    if not isinstance(error, RuntimeError | ValueError):
        return None
    _, begin, rest = str(error).partition(f"\n{_BEGIN}\n")
    text, end, _ = rest.partition(f"\n{_END}\n")
    return NotInvertibleError(text) if begin and end else None


_BEGIN = "---- the check of a `filter_invertible` failed ----"
_END = "---- with `filter_jit` in place of `jax.jit` this would be the whole error ----"

register_check(_inverse_check, _explain)
