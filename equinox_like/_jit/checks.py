"""What is checked around a call: deleted arrays before it, errors and checks after it.

A runtime check is a primitive that fails while the compiled program runs. JAX runs
programs asynchronously, so the call may have returned by then. A call whose program
holds a check therefore waits, so that its caller gets the error. Whether a program holds
a check is read off its jaxpr, because the check may be in a nested function that JAX has
already traced.

When a donated array is used again, JAX's error names neither the leaf nor the function.
`raise_explained` names them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

import jax
import jax.tree_util as jtu
import numpy as np

from .._compat.arrays import MAY_CRASH, record_deleted_part
from .._compat.errors import (
    forget_failed,
    is_deleted_array_error,
    is_nan_error,
    is_shared_buffer_error,
    runtime_tokens,
)
from .._compat.jaxpr import name_and_params, opened, programs_in
from .._errors import DonationError
from .._tree.arrays import buffer_pointers, is_concrete, is_deleted
from .._tree.deleted import check_not_deleted
from .._tree.nodes import listed
from .layout import CallLayout, Leaves, NamedLeaf

# For each check primitive, what `register_check` got.
registered_checks: Final[dict[Any, tuple[str, str, Callable[[str], Exception]]]] = {}


def register_check(
    primitive: Any, begin: str, end: str, error_of: Callable[[str], Exception]
) -> None:
    """Makes calls wait for programs that hold `primitive`; to be called before it is bound.

    If it fails, it raises an error with a text between the lines `begin` and `end`, which
    JAX passes on. The call then raises `error_of(text)`.
    """
    registered_checks[primitive] = begin, end, error_of


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
            if equation.primitive in registered_checks:
                return True
            todo += programs_in(name_and_params(equation)[1])
    return False


def wait_for(out: Any) -> None:
    """Waits for a program, from its output: a tree of arrays."""
    if jtu.tree_leaves(out):
        jax.block_until_ready(out)
    else:
        jax.effects_barrier()


class _Fatal:
    """Whether there have been deleted arrays on which JAX may crash."""

    exist = False

    def add(self, in_part: Sequence[jax.Array] = ()) -> None:
        """After arrays on several devices were deleted, `in_part` not as a whole."""
        for x in in_part:
            record_deleted_part(x)
        self.exist |= MAY_CRASH or bool(in_part)


fatal: Final = _Fatal()


def check_not_fatal(layout: CallLayout, leaves: Leaves) -> None:
    """Raises for deleted arrays on several devices, which may crash the process."""
    data = layout.take_data(leaves)
    is_suspect = any(map(is_deleted, data)) or len(set(map(id, data))) < len(data)
    if is_suspect and are_any_sharded(data):
        check_unused(layout, leaves, range(len(data)))


def check_unused(layout: CallLayout, leaves: Leaves, unused: Iterable[int]) -> None:
    """Raises for unused arguments that are deleted, or donated in another place, too.

    JAX does not check arguments that the program does not use. `unused` has the indices
    of these arguments among the data.
    """
    places = [layout.data_places[i] for i in unused]
    if any(is_deleted(leaves[i]) for i in places):
        check_not_deleted(layout.named_leaves(leaves))
    donated = list(map(id, layout.take_donated(leaves)))
    others = set(map(id, layout.take_kept(leaves)))
    if len(set(donated)) < len(donated) or not others.isdisjoint(donated):
        check_not_shared(layout.named_leaves(leaves))


def check_not_shared(
    named: Sequence[NamedLeaf], error: Exception | None = None
) -> None:
    """Raises if two arrays share a buffer, and one of them is donated."""
    seen: dict[Any, tuple[str, bool]] = {}
    for name, x, is_donated in named:
        for buffer in buffer_pointers(x) if is_concrete(x) else ():
            other, is_other_donated = seen.setdefault(buffer, (name, is_donated))
            if other != name and (is_donated or is_other_donated):
                raise DonationError(
                    f"`{other}` and `{name}` are the same array, or share memory, so "
                    "they cannot be donated. Nothing was deleted. Pass a copy "
                    "(`tree_copy`) in one of the two places."
                ) from error


def are_any_sharded(leaves: Sequence[Any]) -> bool:
    """Whether any of the leaves is an array on several devices."""
    return any(is_concrete(x) and len(x.sharding.device_set) > 1 for x in leaves)


def raise_explained(
    error: BaseException, layout: CallLayout, leaves: Leaves
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


def _failed_check(error: BaseException) -> Exception | None:
    """The error of the check that has caused `error`, if one has."""
    if isinstance(error, RuntimeError | ValueError):
        for begin, end, error_of in registered_checks.values():
            _, has_begin, rest = str(error).partition(f"\n{begin}\n")
            text, has_end, _ = rest.partition(f"\n{end}\n")
            if has_begin and has_end:
                return error_of(text)
    return None


def raise_clearer(error: BaseException, layout: CallLayout, leaves: Leaves) -> None:
    """Raises a `DonationError` naming the leaf, if a donated array caused `error`.

    Raises a `FloatingPointError` if JAX has found a NaN, but cannot run the function
    again because its arguments are deleted. Otherwise adds a note to `error` on which
    donated arrays were deleted.
    """
    if isinstance(error, RuntimeError | ValueError):
        if is_shared_buffer_error(error):
            check_not_shared(layout.named_leaves(leaves), error)
        if is_deleted_array_error(error):
            _check_not_run_again(error)
            check_not_deleted(layout.named_leaves(leaves), error)
    _add_note_on_losses(error, layout.named_leaves(leaves))


def _check_not_run_again(error: Exception) -> None:
    """Raises if JAX tried to run the function again because it had found a NaN."""
    before = error.__context__
    while before is not None and not is_nan_error(before):
        before = before.__context__
    if before is not None:
        raise FloatingPointError(
            "The output contains a NaN or an infinity. JAX cannot run the function again "
            "to find where it comes from: its arguments were donated and deleted. Call "
            "its `.clear_cache()`, and call it within `jax.debug_nans(True)`, where "
            "functions are compiled without donation."
        ) from error


def _add_note_on_losses(error: BaseException, named: Sequence[NamedLeaf]) -> None:
    """Adds a note to `error` on which donated arrays were deleted."""
    donated = [(name, x) for name, x, is_donated in named if is_donated]
    if not any(is_concrete(x) for _, x in donated):
        return
    lost = [name for name, x in donated if is_deleted(x)]
    if lost:
        error.add_note(f"Donated arrays are lost: {listed(lost, 5)}.")
    else:
        error.add_note("No donated array is lost.")


def _add_note_on_foreign_arrays(error: Exception, named: Sequence[NamedLeaf]):
    # JAX's message says that it is not an array, and advises `static_argnums`.
    for name, leaf, _ in named:
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSUMm":
            error.add_note(
                f"`{name}` is a NumPy array of dtype {leaf.dtype}, which JAX does not "
                "have. Leave it out, or pass a tuple of its elements, which is static."
            )
