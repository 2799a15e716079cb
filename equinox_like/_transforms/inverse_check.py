"""The check of `filter_invertible(check=True)`, which also works in compiled programs.

Like `error_if`, it is a primitive that is registered as a check: `filter_jit` waits for
programs that hold it, and raises its error.
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
    """Returns `x`; raises if the inverse of the function named `name` is wrong.

    `errors` has the largest relative error, in units of the error that rounding may
    cause, and the largest absolute error.
    """
    failed = _inverse_check.bind(errors, name=name)

    def depend(leaf):
        # An unused check would be dropped by JAX as dead code.
        return jnp.where(failed, jnp.nan, leaf).astype(leaf.dtype)

    return jtu.tree_map(lambda a: depend(a) if is_inexact_array(a) else a, x)


def _fail(_: Any, errors: Any, name: str) -> None:
    text = _text(errors, name)
    raise NotInvertibleError(f"\n{_BEGIN}\n{text}\n{_END}\n")


def _fail_if(errors: Any, name: str) -> np.ndarray:
    """The check outside of compiled programs, where the values are known."""
    if not np.all(np.asarray(errors)[..., 0] <= 1):
        raise NotInvertibleError(_text(errors, name))
    return np.asarray(False)


def _text(errors: Any, name: str) -> str:
    # `max` propagates NaN.
    relative, absolute = np.asarray(errors).reshape(-1, 2).max(0)
    return (
        f"The inverse of `{name}` is wrong: its result differs from the input by up to "
        f"{absolute:.3g}, and by up to {relative:.3g} times the error that rounding "
        "may cause."
    )


def _is_large(errors: jax.Array) -> jax.Array:
    # Negated, so that NaN counts as large.
    return ~jnp.all(errors[..., 0] <= 1)


def _run_check(errors: jax.Array, name: str) -> jax.Array:
    fail = functools.partial(_fail, name=name)
    call = functools.partial(call_host, function=fail, on_tpu=fail)
    return jax.lax.cond(_is_large(errors), call, lambda _: np.False_, errors)


_inverse_check = for_whole_batch(
    "inverse_check", _run_check, like=_is_large, eager=_fail_if
)


_BEGIN = "---- the check of a `filter_invertible` failed ----"
_END = "---- with `filter_jit` in place of `jax.jit` this would be the whole error ----"

register_check(_inverse_check, _BEGIN, _END, NotInvertibleError)
