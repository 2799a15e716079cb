"""The channel for checks of values: programs that hold one are waited for.

A check is a primitive, which fails while the compiled program runs: long after the call has
returned, as JAX waits for nothing. So a call whose program holds a check does wait, and its
caller gets the error. Whether it holds one is read off the trace, since the check may be in
a function that was traced before and is not run again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._compat.jaxpr import name_and_params
from .._compat.tokens import forget_failed, runtime_tokens
from .._core.base import hide_frames
from .._tree.arrays import is_concrete
from .donation import explain_failure

# From each primitive to what makes of JAX's error the one to raise, or nothing.
_checks: dict[Any, Callable[[Exception], Exception | None]] = {}


def register_check(
    primitive: Any, explain: Callable[[Exception], Exception | None]
) -> None:
    """Makes a call wait for programs that hold `primitive`.

    `explain` gets an error of such a program, and returns what to raise in its place, or
    `None` if it was not the check that failed.
    """
    _checks[primitive] = explain


def there_are_checks() -> bool:
    return bool(_checks)


def holds_check(jaxpr: Any) -> bool:
    """Whether a check is in a jaxpr, at any depth."""
    seen: set[int] = set()
    todo = [getattr(jaxpr, "jaxpr", jaxpr)]
    while todo:
        jaxpr = todo.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            if equation.primitive in _checks:
                return True
            todo += _jaxprs_in(name_and_params(equation)[1])
    return False


def _jaxprs_in(params: Any) -> Iterator[Any]:
    for value in jtu.tree_leaves(params, is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield getattr(value, "jaxpr", value)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def wait_for(out: Any) -> None:
    arrays = [x for x in jtu.tree_leaves(out) if is_concrete(x)]
    if arrays:
        jax.block_until_ready(arrays)
    else:
        jax.effects_barrier()


def explained(
    error: Exception,
    name_leaves: Callable[[list[Any]], Sequence[tuple[str, Any, bool]]],
    leaves: list[Any],
) -> Exception:
    """What to raise for `error` of a call with these leaves.

    That of a check, if one is behind it, else itself; with notes on what has become of
    donated arrays. Raises a `DonationError` if a lost buffer is behind it.
    """
    found = (explain(error) for explain in _checks.values())
    failed = next((e for e in found if e is not None), None)
    if failed is not None:
        forget_failed(runtime_tokens)
        error = failed
    explain_failure(error, name_leaves, leaves)
    hide_frames(error)
    return error
