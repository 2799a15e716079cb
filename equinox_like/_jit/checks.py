"""Runtime checks of values: a call waits for its program if the program holds a check.

A check is a primitive that fails while the compiled program runs. JAX runs programs
asynchronously, so the call may have returned by then. A call whose program holds a
check therefore waits, so that its caller gets the error. Whether a program holds a
check is read off its jaxpr, because the check may be in a nested function that JAX has
already traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._compat.jaxpr import name_and_params, opened, programs_in
from .._compat.tokens import forget_failed, runtime_tokens
from .._core.base import hide_frames
from .donation import explain_failure

# For each check primitive, the function that turns JAX's error into the one to raise.
_checks: dict[Any, Callable[[Exception], Exception | None]] = {}


def register_check(
    primitive: Any, explain: Callable[[Exception], Exception | None]
) -> None:
    """Makes calls wait for programs that hold `primitive`.

    `explain` gets an error that such a program raised. It returns the error to raise
    instead, or `None` if the check did not cause the error.
    """
    _checks[primitive] = explain


def there_are_checks() -> bool:
    return bool(_checks)


def holds_check(jaxpr: Any) -> bool:
    """Whether a jaxpr, or a jaxpr nested in it, holds a check."""
    seen: set[int] = set()
    todo = [jaxpr]
    while todo:
        jaxpr, _ = opened(todo.pop())
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            if equation.primitive in _checks:
                return True
            todo += programs_in(name_and_params(equation)[1])
    return False


def wait_for(out: Any) -> None:
    """Waits for a program, from its output: a tree of arrays."""
    if jtu.tree_leaves(out):
        jax.block_until_ready(out)
    else:
        jax.effects_barrier()


def explained(
    error: Exception,
    name_leaves: Callable[[list[Any]], Sequence[tuple[str, Any, bool]]],
    leaves: list[Any],
) -> Exception:
    """The exception to raise in place of `error`, raised by a call with these leaves.

    This is the check's own error if a check failed, else `error` itself, with notes on
    which donated arrays were deleted. Raises a `DonationError` if `error` was caused by
    a deleted or shared donated array.
    """
    found = (explain(error) for explain in _checks.values())
    failed = next((e for e in found if e is not None), None)
    if failed is not None:
        forget_failed(runtime_tokens)
        error = failed
    explain_failure(error, name_leaves, leaves)
    hide_frames(error)
    return error
