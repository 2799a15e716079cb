"""Donation, made visible: which arrays are donated, what could not be, what is gone.

JAX warns of an unusable donated buffer while it lowers, by shape alone, and names neither
leaf nor function when a donated array is used again. Here its warning is muted while a
donating function is compiled, and each message names the leaf.
"""

import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp

from .._compat.lowered import reused_arguments
from .._compat.tracer import Tracer
from .._errors import DonationError, DonationWarning
from .._warn import warn

Donate = Literal[
    "none", "arrays", "all", "all-except-first", "warn", "warn-except-first"
]
MODES: Final = get_args(Donate)


def check_mode(donate: Any) -> None:
    if donate not in MODES:
        choices = ", ".join(f'"{mode}"' for mode in MODES)
        raise ValueError(f"`donate` must be one of {choices}; got {donate!r}.")


def donates(donate: Donate) -> Callable[[str, bool], bool]:
    """Whether a parameter's arrays are donated, given whether it is the first one."""
    if donate == "none":
        return lambda parameter, is_first: False
    if donate.endswith("-except-first"):
        return lambda parameter, is_first: not is_first
    return lambda parameter, is_first: True


# An entry of `warnings.filters`: action, message, category, module, line.
_MUTE = (
    "ignore",
    re.compile("Some donated buffers were not usable"),
    UserWarning,
    None,
    0,
)
_lock = threading.Lock()
_users = 0


class _Muted(threading.local):
    """Mutes JAX's warning from when a donating function is traced until it has run.

    `begin` is called by the function itself, so it costs nothing where nothing is traced;
    `end`, by whoever called it. `warnings.catch_warnings` would put back the filters that
    it found, and so lose those that another thread has set meanwhile; here one filter
    comes, and goes with the last that needs it.
    """

    count = 0

    def begin(self) -> None:
        global _users
        self.count += 1
        with _lock:
            _users += 1
            if _MUTE not in warnings.filters:
                warnings.filters.insert(0, _MUTE)  # pyright: ignore[reportAttributeAccessIssue]

    def end(self) -> None:
        global _users
        if not self.count:
            return
        with _lock:
            _users -= self.count
            if _users == 0 and _MUTE in warnings.filters:
                warnings.filters.remove(_MUTE)  # pyright: ignore[reportAttributeAccessIssue]
        self.count = 0


muted: Final = _Muted()


def warn_of_unusable(
    named: Sequence[tuple[str, Any, bool]], lowered: Any, compiled: Any
) -> None:
    """Warns of the donated leaves whose buffers the compiled program does not reuse."""
    unusable = _unusable(named, lowered, compiled)
    if unusable:
        listing = ", ".join(f"`{name}` ({describe(x)})" for name, x in unusable)
        warn(
            f"Some donated buffers were not usable: {listing}. No output of the same size "
            "is left that could take their place; these arrays stay alive. Return an "
            "updated array for each of them, or do not donate them.",
            DonationWarning,
        )


def explain_failure(
    error: Exception,
    name_leaves: Callable[[list[Any]], Sequence[tuple[str, Any, bool]]],
    leaves: list[Any],
) -> None:
    """Raises a `DonationError` that names the leaf, if a lost buffer is behind `error`."""
    if not isinstance(error, RuntimeError | ValueError):
        return
    text = str(error)
    if any(fragment in text for fragment in _TWICE):
        for name, other in _sharing(name_leaves(leaves)):
            raise DonationError(
                f"`{name}` and `{other}` are the same array, or share its memory, and so "
                "cannot be donated. Nothing was deleted. Pass a copy in one of the two "
                "places, or the array in one place only."
            ) from error
    if any(fragment in text for fragment in _GONE):
        gone = [(name, x) for name, x, _ in name_leaves(leaves) if _is_deleted(x)]
        for name, x in gone[:1]:
            more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
            raise DonationError(
                f"`{name}` ({describe(x)}){more} has been deleted: it was donated to an "
                "earlier call, whose output may now be in its memory. Use what that call "
                "returned in its place; or keep the array, by passing a copy of it to "
                'that call or by `filter_jit(..., donate="none")`.'
            ) from error


# Fragments of JAX's messages.
_GONE = ("has been deleted", "Invalid buffer passed")
_TWICE = ("donate the same buffer twice", "previously donated in the same call")


def describe(x: Any) -> str:
    """dtype and shape, as in `float32[3]`."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _is_deleted(x: Any) -> bool:
    # A tracer has no buffer; a NumPy array keeps its own.
    return is_concrete(x) and x.is_deleted()


def is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _sharing(named: Sequence[tuple[str, Any, bool]]) -> Iterator[tuple[str, str]]:
    """Pairs of names of arrays, one of them donated, that hold the same buffer."""
    seen: dict[Any, tuple[str, bool]] = {}
    for name, x, donated in filter(lambda leaf: is_concrete(leaf[1]), named):
        for buffer in _buffers(x):
            other = seen.setdefault(buffer, (name, donated))
            if other[0] != name and (donated or other[1]):
                yield other[0], name


def _buffers(x: jax.Array) -> list[Any]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    try:
        return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    except Exception:
        return [id(x)]  # a backend that has no pointers: the same object at least


def _unusable(
    named: Sequence[tuple[str, Any, bool]], lowered: Any, compiled: Any
) -> list[tuple[str, Any]]:
    reused = reused_arguments(lowered, compiled)
    if reused is None:
        return []
    # The flat arguments are the groups one after the other: the donated come first.
    donated = [(name, x) for name, x, is_donated in named if is_donated]
    return [leaf for leaf, r in zip(donated, reused, strict=False) if r is False]
