"""Calls through JAX's own dispatch: what it knows, it runs in C++; else it asks.

An owner has `owner.quick = make_quick(owner, ...)`, to be called with `(tree, args,
kwargs)`, and two methods:

    owner.call(tree, args, kwargs, miss=None)  # in Python; a `Miss` may become quick
    owner.explained(error, call)               # what to raise for an error of the program
"""

import functools
import re
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Final

from .._compat.dispatch import Dispatch, NotYet, dispatch
from .._compat.trace_state import at_top_level
from .._compat.tracer import Tracer
from .._errors import DonationError
from .._tree.filters import is_array
from .._tree.intern import interner
from .._tree.strict import Strict
from .base import is_private
from .pack import Packed
from .plan import MAX_KEPT, WRAPPED

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Miss:
    """A call that JAX's dispatch does not know, and what makes it known."""

    def __init__(self, dispatch: Dispatch, call: Call):
        self.dispatch = dispatch
        self.call = call
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

    def unpack(self, out: Any) -> Any:
        """`out.unpack()`, where it is packed; the same for quick calls."""
        if not isinstance(out, Packed):
            return out
        out = out.unpack()
        if self.quick is not None:
            self.quick = self.dispatch.returning(self.quick, out, _is_data)
        return out


class Guarded:
    """A function of JAX's dispatch, for one thread at a time.

    JAX keeps what it knows in a table of C++, and looks there by `==`. Where that is
    Python's, another thread may come in between, and change the table under the eyes of the
    first. Whoever finds it in use is served in Python. So is a function that calls itself.
    """

    __slots__ = ("_free", "_function", "_owner", "_raised")

    def __init__(self, found: Dispatch, name: str, owner: Callable[[], Any]):
        # What to take, and to give back. Unlike a lock's `acquire`, `del` leaves no moment
        # for a signal's handler between taking it and the `try` that gives it back.
        self._free = [True]
        self._owner = owner
        # By Python, below JAX's dispatch: which would keep such a kind of call for Python.
        self._raised: list[BaseException] = []
        slow = functools.partial(_slow, owner, self._raised)
        miss = functools.partial(_miss, owner, self._raised, found)
        self._function = found.function(name, slow, miss, MAX_KEPT)

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

# More kinds of call, and Python, which looks them up by their static values, is quicker.
MANY: Final = 128

# What `make_quick` returns where only `owner.call` is left.
IN_PYTHON: Final[Any] = object()


def make_quick(owner: Any, name: str) -> Any:
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
    return Guarded(found, name, weakref.ref(owner))


def _slow(
    owner: Any, raised: list[BaseException], tree: Any, args: Any, kwargs: Any
) -> Any:
    try:
        return owner().call(tree, args, kwargs)
    except BaseException as e:
        raised.append(e)


def _miss(
    owner: Any,
    raised: list[BaseException],
    found: Dispatch,
    tree: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    miss = Miss(found, (tree, args, kwargs))
    try:
        if not at_top_level():  # where no call is quick
            return owner().call(tree, args, kwargs), None, True
        out = owner().call(tree, args, kwargs, miss)
    except BaseException as e:
        raised.append(e)
        return None, None, True
    return out, miss.quick, not miss.is_settled


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
