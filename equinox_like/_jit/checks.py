"""Runtime checks of values: a call waits for its program if the program holds a check.

A check is a primitive that fails while the compiled program runs. JAX runs programs
asynchronously, so the call may have returned by then. A call whose program holds a
check therefore waits, so that its caller gets the error. Whether a program holds a
check is read off its jaxpr, because the check may be in a nested function that JAX has
already traced.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.tree_util as jtu
import numpy as np

from .._compat.errors import forget_failed, runtime_tokens
from .._compat.jaxpr import name_and_params, opened, programs_in
from .donation import raise_clearer
from .layout import Layout

# For each check primitive, what `register_check` got.
_checks: dict[Any, tuple[str, str, Callable[[str], Exception]]] = {}


def register_check(
    primitive: Any, begin: str, end: str, error_of: Callable[[str], Exception]
) -> None:
    """Makes calls wait for programs that hold `primitive`; to be called before it is bound.

    If it fails, it raises an error with a text between the lines `begin` and `end`, which
    JAX passes on. The call then raises `error_of(text)`.
    """
    _checks[primitive] = begin, end, error_of


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


def raise_explained(
    error: BaseException, layout: Layout, leaves: list[Any]
) -> NoReturn:
    """Raises `error`, raised by a call with these leaves, or what explains it better.

    This is the check's own error if a check failed, and a `DonationError` if a donated
    array is deleted or shared. Others get notes, for example on which arrays were deleted.
    """
    failed = _failed_check(error)
    if failed is not None:
        forget_failed(runtime_tokens)
        raise_clearer(failed, layout, leaves)
        raise failed from None
    raise_clearer(error, layout, leaves)
    if isinstance(error, TypeError):
        _add_note_on_foreign_arrays(error, layout.named_leaves(leaves))
    raise error


def _add_note_on_foreign_arrays(
    error: Exception, named: Sequence[tuple[str, Any, bool]]
):
    # JAX's message says that it is not an array, and advises `static_argnums`.
    for name, leaf, _ in named:
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSUMm":
            error.add_note(
                f"`{name}` is a NumPy array of dtype {leaf.dtype}, which JAX does not "
                "have. Leave it out, or pass a tuple of its elements, which is static."
            )


def _failed_check(error: BaseException) -> Exception | None:
    """The error of the check that has caused `error`, if one has."""
    if isinstance(error, RuntimeError | ValueError):
        for begin, end, error_of in _checks.values():
            _, has_begin, rest = str(error).partition(f"\n{begin}\n")
            text, has_end, _ = rest.partition(f"\n{end}\n")
            if has_begin and has_end:
                return error_of(text)
    return None
