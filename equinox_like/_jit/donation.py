"""Donation: which arrays are donated, and the errors and warnings about them.

While JAX lowers, it warns of an unusable donated buffer by its shape only. When a
donated array is used again, JAX's error names neither the leaf nor the function. Here
JAX's warning is hidden while a donating function is compiled, and each message names
the leaf.
"""

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np

from .._compat.compiled import Buffer
from .._compat.errors import (
    UNUSABLE_DONATION,
    is_deleted_array_error,
    is_nan_error,
    is_shared_buffer_error,
)
from .._errors import DonationError, DonationWarning, did_you_mean, warn
from .._tree.arrays import buffer_pointers, describe_array, is_concrete, is_deleted
from .._tree.deleted import check_not_deleted
from .._tree.nodes import listed
from .layout import Layout

_T = TypeVar("_T")

Mode = Literal[
    "none", "arrays", "all", "all-except-first", "warn", "warn-except-first", "strict"
]
Donate = Mode | tuple[str, ...]
MODES: Final = get_args(Mode)


class Donation:
    """A parsed `donate=`: which arrays to donate, and how to report unusable ones."""

    def __init__(self, donate: Any):
        check_mode(donate)
        self.donate: Donate = donate
        self.names = frozenset(donate) if isinstance(donate, tuple) else None
        self.is_any = donate != "none" and self.names != frozenset()
        self.is_strict = donate == "strict"
        self.spares_first = str(donate).endswith("-except-first")
        # Whether unusable donations are reported before the first call runs.
        warns = self.names is not None or str(donate).startswith("warn")
        self.inspects_first = self.is_any and (self.is_strict or warns)

    def donates(self, parameter: str, is_first: bool) -> bool:
        """Whether a parameter's arrays are donated."""
        if self.names is not None:
            return parameter in self.names
        return self.is_any and not (is_first and self.spares_first)

    def check_names(self, signature: inspect.Signature, function: str) -> None:
        for name in sorted(self.names or ()):
            if name not in signature.parameters:
                meant = did_you_mean(name, signature.parameters, "{!r}")
                raise ValueError(
                    f"`donate` names {name!r}, which is not a parameter of "
                    f"`{function}`. Its parameters: "
                    f"{', '.join(map(repr, signature.parameters)) or 'none'}.{meant}"
                )

    def report_unusable(self, leaves: Sequence[tuple[str, Any]]) -> None:
        """Raises or warns, depending on the mode, for leaves that no output reuses."""
        if not leaves:
            return
        listing = ", ".join(f"`{name}` ({describe_array(x)})" for name, x in leaves)
        advice = ""
        if are_any_sharded([x for _, x in leaves]):
            advice = (
                " The size on each device must be equal. If the array is returned with "
                "another sharding, which JAX may choose, pass the sharding of the "
                "argument, as in `filter_jit(..., out_shardings=...)`."
            )
        if self.is_strict:
            raise DonationError(
                f'`donate="strict"`: some donated buffers are not usable: {listing}. '
                "No remaining output has their size. This was raised before "
                "execution, and nothing was deleted. Return an updated array for each "
                'of them, or donate the others by name, as in `donate=("model",)`.'
                + advice
            )
        outcome = "are deleted anyway, unless NumPy holds their memory"
        if self.names is None:
            outcome = "stay alive"
        warn(
            f"Some donated buffers were not usable: {listing}. No remaining output has "
            f"their size, or the function does not use them; these arrays {outcome}. "
            "Return an updated array for each of them, or do not donate them." + advice,
            DonationWarning,
        )


def check_mode(donate: Any) -> None:
    is_names = isinstance(donate, tuple) and all(isinstance(n, str) for n in donate)
    if not is_names and donate not in MODES:
        choices = ", ".join(f'"{mode}"' for mode in MODES)
        meant = did_you_mean(donate, MODES, '`donate="{}"`')
        if isinstance(donate, str) and donate.isidentifier():
            meant += f' To donate a parameter, write `donate=("{donate}",)`.'
        raise ValueError(
            f"`donate` must be one of {choices}, or a tuple of parameter names; got "
            f"{donate!r}.{meant}"
        )


# An entry of `warnings.filters`: action, message, category, module, line.
_HIDE = ("ignore", UNUSABLE_DONATION, UserWarning, None, 0)
# Reentrant: a signal handler may need the lock while its thread holds it.
_lock = threading.RLock()
_users = 0
_ATTEMPTS: Final = 6


def lower_silently(lower: Callable[[], _T]) -> _T:
    """Returns `lower()`, without JAX's warning of unusable donations.

    Another thread's `catch_warnings` may drop the filter. If the warning is then raised
    as an error, this lowers again.
    """
    for _ in range(_ATTEMPTS - 1):
        with _warning_hidden():
            try:
                return lower()
            except UserWarning as e:
                if not is_lowering_warning(e):
                    raise
    return lower()


def is_lowering_warning(error: Exception) -> bool:
    """Whether this is JAX's warning of unusable donations, raised as an error."""
    return UNUSABLE_DONATION.match(str(error)) is not None


@contextlib.contextmanager
def _warning_hidden() -> Iterator[None]:
    """Hides JAX's warning of unusable donations.

    `warnings.catch_warnings` is not used: on exit it restores the filters that it
    found, and so drops those that another thread has set meanwhile. Here one filter is
    added, and removed with the last call that needs it.
    """
    global _users
    with _lock:
        _users += 1
        if warnings.filters[:1] != [_HIDE]:
            _remove_filter()
            warnings.filters.insert(0, _HIDE)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _remove_filter()


def _remove_filter() -> None:
    if _HIDE in warnings.filters:
        warnings.filters.remove(_HIDE)  # pyright: ignore[reportAttributeAccessIssue]


def raise_clearer(error: BaseException, layout: Layout, leaves: list[Any]) -> None:
    """Raises a `DonationError` naming the leaf, if a donated array caused `error`.

    Raises a `FloatingPointError` if JAX has found a NaN, but cannot run the function
    again because its arguments are deleted. Otherwise adds a note to `error` on which
    donated arrays were deleted.
    """
    if isinstance(error, RuntimeError | ValueError):
        if is_shared_buffer_error(error):
            check_not_shared(layout.named_leaves(leaves), error)
        if is_deleted_array_error(error):
            check_not_run_again(error)
            check_not_deleted(layout.named_leaves(leaves), error)
    add_note_on_losses(error, layout.named_leaves(leaves))


def check_not_shared(
    named: Sequence[tuple[str, Any, bool]], error: Exception | None = None
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
                    "(`tree_copy`) in one of the two places, or the array in one place "
                    "only."
                ) from error


def check_not_run_again(error: Exception) -> None:
    """Raises if JAX tried to run the function again because it had found a NaN."""
    before = error.__context__
    while before is not None and not is_nan_error(before):
        before = before.__context__
    if before is not None:
        raise FloatingPointError(
            "The output contains a NaN or an infinity. To find where it comes from, "
            "JAX would run the function again, step by step, but its arguments were "
            "donated and deleted. Call `.clear_cache()` on the function that "
            "`filter_jit` returned, and call it again within `jax.debug_nans(True)`: a "
            "function that is compiled there donates nothing, until its cache is cleared "
            "once more."
        ) from error


def add_note_on_losses(
    error: BaseException, named: Sequence[tuple[str, Any, bool]]
) -> None:
    """Adds a note to `error` on which donated arrays were deleted."""
    donated = [(name, x) for name, x, is_donated in named if is_donated]
    if not any(is_concrete(x) for _, x in donated):
        return
    lost = [name for name, x in donated if is_deleted(x)]
    if lost:
        error.add_note(f"Donated arrays are lost: {listed(lost, 5)}.")
        if not isinstance(error, Exception):
            error.add_note(
                "The call was interrupted before it returned the new values. Build or "
                "load what is lost again. To be able to go on after an interrupt, keep "
                "a copy (`tree_copy`), or do not donate."
            )
    else:
        error.add_note("No donated array is lost.")


def are_deleted(arrays: Sequence[Any]) -> list[bool | None]:
    """Whether each array is deleted; `None` for an array of NumPy."""
    return [x.is_deleted() if hasattr(x, "is_deleted") else None for x in arrays]


def are_any_sharded(leaves: Sequence[Any]) -> bool:
    """Whether any of the leaves is an array on several devices."""
    return any(is_concrete(x) and len(x.sharding.device_set) > 1 for x in leaves)


def check_unused(layout: Layout, leaves: list[Any], unused: Iterable[int]) -> None:
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


def check_not_fatal(layout: Layout, leaves: list[Any]) -> None:
    """Raises for deleted arrays on several devices, which may crash the process."""
    data = layout.take_data(leaves)
    is_suspect = any(map(is_deleted, data)) or len(set(map(id, data))) < len(data)
    if is_suspect and are_any_sharded(data):
        check_unused(layout, leaves, range(len(data)))


def unusable(
    named: Sequence[tuple[str, Any, bool]],
    buffers: Sequence[Any] | None,
    donation: Donation,
) -> list[tuple[str, Any]]:
    """The donated leaves to report, because no output reuses their buffers.

    Leaves that the program does not use are reported only if donated by name, because
    only then are they deleted.
    """
    kinds = {Buffer.DONOR, Buffer.UNUSABLE}
    if donation.names is not None:
        kinds.add(Buffer.PRUNED)
    return [
        (name, x)
        for (name, x, is_donated), buffer in zip(named, buffers or (), strict=False)
        if is_donated and buffer in kinds and not isinstance(x, np.ndarray | np.generic)
    ]
