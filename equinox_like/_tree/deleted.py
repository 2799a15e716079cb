"""Errors about deleted arrays: which leaf it is, and which function it was donated to.

JAX's own errors name neither. Nothing is inspected before an error: only then are the
arguments searched for deleted arrays.
"""

import functools
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import jax.tree_util as jtu

from .._call_path import outermost
from .._compat.arrays import may_be_donated
from .._compat.errors import is_deleted_array_error
from .._errors import DonationError, LeafError
from .arrays import describe_array, is_deleted
from .cycles import name_cycle
from .nodes import path_str
from .require import is_transformed, named_arguments

_P = ParamSpec("_P")
_T = TypeVar("_T")


def deleted_named(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: errors of JAX about deleted arguments name the leaf and the donor; those
    about an argument that contains itself name the place."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except Exception as e:
            raise_if_deleted(e, function, args, kwargs)
            name_cycle(e, function, args, kwargs)
            raise

    return call


def raise_if_deleted(error: Exception, function: Any, args: Any, kwargs: Any) -> None:
    """Raises a `DonationError` if a deleted array in the arguments caused `error`."""
    if is_deleted_array_error(error):
        arguments = dict(named_arguments(function, args, kwargs))
        if isinstance(error, DonationError) and "args" in arguments:
            return  # `error` has the names of the user's parameters
        leaves = _named_leaves(arguments)
        if isinstance(error, LeafError):  # names the leaf, but not who took it
            leaves = [(name, x) for name, x in leaves if may_be_donated(x)]
        # A call within the function may have named a leaf of its own arguments.
        check_not_deleted(leaves, error.__cause__ or error, is_transformed(args))


def raise_if_deleted_here(error: Exception, call: Any, args: Any, kwargs: Any) -> None:
    """As `raise_if_deleted` for the call of a layer, whose arrays have the names that they
    have in the outermost Module."""
    if is_deleted_array_error(error) and not isinstance(error, DonationError):
        (_, layer), *others = named_arguments(call, args, kwargs)
        model = outermost(error) or layer
        arguments = {type(model).__name__: model, **dict(others)}
        check_not_deleted(_named_leaves(arguments), error)


def _named_leaves(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (path_str(path, name), x)
        for name, tree in arguments.items()
        for path, x in jtu.tree_leaves_with_path(tree)
    ]


def fate_of(x: Any) -> str:
    """What happened to a deleted array, as far as it is known."""
    owner = _owner_of(x)
    if owner:
        return f"donated to `{owner}`"
    also = "" if may_be_donated(x) else ", or its `delete` method was called"
    return f"donated to an earlier call{also}"


def check_not_deleted(
    named: Sequence[tuple[Any, ...]],
    error: BaseException | None = None,
    names_are_theirs: bool = True,
) -> None:
    """Raises a `DonationError` if one of the named leaves is deleted.

    `names_are_theirs`: whether the user chose the names, not this library.
    """
    deleted = [(name, x) for name, x, *_ in named if is_deleted(x)]
    if not deleted:
        return
    # Shown is one of which it is known where it was donated to, if there is one.
    name, x = next((leaf for leaf in deleted if _owner_of(leaf[1])), deleted[0])
    more = len(deleted) - 1
    others = f" and {more} more array{'s' * (more > 1)} have" if more else " has"
    it = f"`{name}`" if more else "it"
    tree = f"`{re.split(r'[.[]', name)[0]}`" if names_are_theirs else "tree"
    by = f"`{owner}`" if (owner := _owner_of(x)) else "that call"
    raise DonationError(
        f"`{name}` ({describe_array(x)}){others} been deleted: {it} was {fate_of(x)}. "
        f"Use the {tree} that {by} returned. To keep the old one, pass "
        f"`eqx.tree_copy({tree.strip('`')})`."
    ) from error


class Record:
    """Donated arrays that the last calls of one program deleted: one per argument.

    They are held weakly, because a deleted array may still hold a copy that NumPy made.
    Their `id`s alone would not do, because Python reuses the `id` of a freed object.
    """

    def __init__(self, name: str):
        self.name = name
        self.calls: deque[Sequence[weakref.ref[Any]]] = deque(maxlen=_CALLS)
        with _lock:
            _records.add(self)


# How many calls a `Record` remembers.
_CALLS: Final = 16
_records: Final[weakref.WeakSet[Record]] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant: a finaliser may wrap a function


def _owner_of(x: Any) -> str | None:
    """The name of the program that has deleted an array, as far as records tell."""
    with _lock:
        found = list(_records)
    for record in found:
        # A copy, because another thread may append.
        if any(ref() is x for call in record.calls.copy() for ref in call):
            return record.name
    return None
