"""Calls through JAX's own dispatch: what it knows, it runs in C++; else it asks.

An owner has `owner.quick = make_quick(owner, ...)`, to be called with `(tree, args,
kwargs)`, and these methods:

    owner.call(tree, args, kwargs, miss=None)  # in Python; a `Miss` may become quick
    owner.explained(error, call)               # what to raise for an error of the program
    owner.settle(plan, leaves, entry)          # sees to what it was given

The last is for those that donate. They call `miss.give` with what is to be passed to it.
"""

import functools
import re
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Final

from .._compat.dispatch import Dispatch, Held, NotYet, dispatch
from .._compat.trace_state import at_top_level
from .._compat.tracer import Tracer
from .._core.base import is_private
from .._core.pack import Packed
from .._errors import DonationError
from .._tree.filters import is_array
from .._tree.intern import interner
from .._tree.strict import Strict
from .donation import Record, are_all_deleted, is_deleted
from .plan import MAX_KEPT, WRAPPED, Plan, taker

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Given:
    """What should be gone after each call of a kind, and where it is told of."""

    __slots__ = ("entry", "plan", "record", "statics", "take", "tree_type")

    def __init__(self, plan: Plan, leaves: list[Any], entry: Any, record: Record):
        self.plan = plan
        self.entry = entry
        self.record = record
        self.tree_type = record.tree_type
        # The leaves without the data.
        self.statics = list(leaves)
        for i in plan.places:
            self.statics[i] = None
        # Picks what should be gone from the data of a call; `None` if it is all of them.
        self.take: Callable[[list[Any]], Any] | None = None
        self.learn(leaves)

    def learn(self, leaves: list[Any]) -> None:
        """What was donated and is gone now should be gone after the next call."""
        data = self.plan.data(leaves)
        gone = [i for i, (x, is_given) in enumerate(data) if is_given and is_deleted(x)]
        self.take = None if len(gone) == len(data) else taker(gone)

    def leaves(self, data: list[Any]) -> list[Any]:
        """All leaves of a call with these data."""
        leaves = self.statics.copy()
        for i, x in zip(self.plan.places, data, strict=True):
            leaves[i] = x
        return leaves


class Miss:
    """A call that JAX's dispatch does not know, and what makes it known."""

    def __init__(self, dispatch: Dispatch, call: Call, donates: bool):
        self.dispatch = dispatch
        self.call = call
        # For functions that donate: quick calls return this beside the output.
        self.donates = donates
        self.given: Given | None = None
        # What JAX has called, and what that remembers of a quick call.
        self.function: Any = None
        self.quick: Any = None
        # Whether it was tried to make its like quick; and whether it shows now if they can
        # be, else JAX will ask again.
        self.was_tried, self.is_settled = False, True

    def way(self, function: Any) -> Callable[..., Any]:
        """How to call what `jax.jit` returned, so that its like become quick."""
        self.was_tried = True
        was_known = self.dispatch.learn(self.call, _is_data, _key_of)
        # JAX has looked for this call by another structure than it has from now on.
        self.is_settled = was_known is not False
        if not (was_known and self.dispatch.agrees(self.call, _is_data)):
            return function
        self.function = function
        return self._run

    def _run(self, *groups: Any) -> Any:
        out, self.quick, again = self.dispatch.run(self.function, groups)
        self.is_settled = not again
        return out

    def give(self, plan: Plan, leaves: list[Any], entry: Any, record: Record) -> None:
        """After the call: quick ones see to what should be gone."""
        if self.quick is not None and any(map(is_deleted, leaves)):
            self.given = Given(plan, leaves, entry, record)

    def unpack(self, out: Any) -> Any:
        """`out.unpack()`, where it is packed; the same for quick calls."""
        is_packed = isinstance(out, Packed)
        if is_packed:
            out = out.unpack()
        if self.quick is not None and (is_packed or self.donates):
            tree = (self.given, out) if self.donates else out
            self.quick = self.dispatch.returning(self.quick, tree, _is_data)
        return out


class Guarded:
    """A function of JAX's dispatch, for one thread at a time.

    JAX keeps what it knows in a table of C++, and looks there by `==`. Where that is
    Python's, another thread may come in between, and change the table under the eyes of the
    first. Whoever finds it in use is served in Python. So is a function that calls itself.
    """

    __slots__ = ("_free", "_function", "_owner", "_raised")

    def __init__(
        self, found: Dispatch, name: str, owner: Callable[[], Any], donates: bool
    ):
        # What to take, and to give back. Unlike a lock's `acquire`, `del` leaves no moment
        # for a signal's handler between taking it and the `try` that gives it back.
        self._free = [True]
        self._owner = owner
        # By Python, below JAX's dispatch: which would keep such a kind of call for Python.
        self._raised: list[BaseException] = []
        slow = functools.partial(_slow, owner, self._raised, donates)
        miss = functools.partial(_miss, owner, self._raised, donates, found)
        function = found.function(name, slow, miss, MAX_KEPT)
        self._function = _seeing_to_donation(function, owner) if donates else function

    def __call__(self, tree: Any, args: Any, kwargs: Any) -> Any:
        is_mine = True
        try:
            del self._free[0]
        except IndexError:
            is_mine = False
        if is_mine:
            try:
                out = self._function(tree, args, kwargs)
                if not self._raised:
                    return out
                error = self._raised.pop()
            except Exception as e:
                call = tree, args, kwargs
                error = self._raised.pop() if self._raised else self._failure(e, call)
            except BaseException:
                self._raised.clear()
                raise
            finally:
                self._free.append(True)
            if error is not None:
                context = error.__context__
                try:
                    raise error
                finally:
                    error.__context__ = context  # not what is handled out there
                    del error, context  # they know this frame
        return self._owner().call(tree, args, kwargs)

    def _failure(self, error: Exception, call: Call) -> Exception | None:
        """What to raise for an error of JAX's dispatch; `None` to ask Python."""
        _, *below = traceback.walk_tb(error.__traceback__)
        is_of_xla = _STATUS.search(str(error))  # a `ValueError` as well
        is_of_cpp = all(is_private(frame) for frame, _ in below)
        if isinstance(error, _OF_ARGUMENTS) and is_of_cpp and not is_of_xla:
            # C++ has told of arguments that it cannot take apart, compare or pass on.
            return None
        try:
            return self._owner().explained(error, call)
        except DonationError as e:
            return e
        except Exception:  # of taking the arguments apart
            return error


_OF_ARGUMENTS = (TypeError, ValueError, AttributeError)
# How XLA names what failed: `INVALID_ARGUMENT: ...`.
_STATUS = re.compile(r"\b[A-Z]+(_[A-Z]+)*: ")

# More kinds of call, and Python, which looks them up by their static values, is quicker;
# so it is sooner for those that donate.
MANY: Final = 128
MANY_DONATING: Final = 32

# What `make_quick` returns where only `owner.call` is left.
IN_PYTHON: Final[Any] = object()


def make_quick(owner: Any, name: str, donates: bool = False) -> Any:
    """`owner.call` by JAX's dispatch, if there is one, else `IN_PYTHON`.

    `None` if that is not known yet.
    """
    try:
        found = dispatch()
    except NotYet:
        return None
    if found is None:
        return IN_PYTHON
    # Before a call has them: JAX can take numbers of Python for arrays.
    found.learn((0, 0.0, 0j, False), _is_data, _key_of)
    # It must not keep the owner alive, which keeps it.
    return Guarded(found, name, weakref.ref(owner), donates)


def _seeing_to_donation(function: Any, owner: Callable[[], Any]) -> Callable[..., Any]:
    def call(tree, args, kwargs):
        held = Held()
        held.call = tree, args, kwargs
        given, out = function(held)
        if given is not None:
            take = given.take
            arrays = held.leaves if take is None else take(held.leaves)
            if are_all_deleted(arrays):
                given.record.arrays = arrays
            else:
                leaves = given.leaves(held.leaves)
                owner().settle(given.plan, leaves, given.entry)
                given.learn(leaves)
            given.record.tree_type = given.tree_type
        return out

    return call


def _slow(owner: Any, raised: list[BaseException], donates: bool, *args: Any) -> Any:
    out = None
    try:
        out = owner().call(*_call_in(args))
    except BaseException as e:
        raised.append(e)
    return (None, out) if donates else out


def _miss(
    owner: Any,
    raised: list[BaseException],
    donates: bool,
    found: Dispatch,
    *args: Any,
) -> Any:
    miss = Miss(found, _call_in(args), donates)
    out, again = None, True
    try:
        if not at_top_level():  # where no call is quick
            out = owner().call(*miss.call)
        else:
            out = owner().call(*miss.call, miss)
            again = not miss.is_settled
    except BaseException as e:
        raised.append(e)
        miss.quick = None
    return ((None, out) if donates else out), miss.quick, again


def _call_in(args: Any) -> Call:
    (first, *_) = args
    return first.call if type(first) is Held else args


def _is_data(x: Any) -> bool:
    return is_array(x) or isinstance(x, Tracer)


def _key_of(kind: type, is_node: bool) -> Any:
    if is_node:
        return interner()
    if kind in _PLAIN or kind.__eq__ is object.__eq__:
        return None
    stand_in = interner()
    return (lambda x: stand_in(Strict(x))) if issubclass(kind, WRAPPED) else stand_in


_PLAIN = (bool, int, str, bytes)
