"""Calls through JAX's own dispatch: what it knows, it runs in C++; else it asks.

An owner has `owner.quick = make_quick(owner, ...)`, to be called with `(tree, args,
kwargs)`, and two methods:

    owner.call(tree, args, kwargs, miss=None)  # in Python; a `Miss` is to become quick
    owner.explained(error, call)               # what to raise for an error of the program
"""

import functools
import inspect
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Final

from .._compat.dispatch import Dispatch
from .._compat.trace_state import at_top_level
from .._compat.tracer import Tracer
from .._tree.filters import is_array
from .._tree.strict import Strict
from .base import hide_frames
from .pack import Packed
from .plan import MAX_KEPT, WRAPPED

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class NewTypes(Exception):
    """Of a call whose like JAX's dispatch may know: it has learned of some types."""


class Miss:
    """A call that JAX's dispatch does not know, and what makes it known."""

    def __init__(self, dispatch: Dispatch, call: Call):
        self.dispatch = dispatch
        self.call = call
        # What JAX has called, and what that remembers of a quick call.
        self.function: Any = None
        self.quick: Any = None
        self.must_compile_again = False
        # Of the call, blind to what is static.
        self.structure: Any = None

    def way(self, function: Any) -> Callable[..., Any]:
        """How to call what `jax.jit` returned, so that its like become quick."""
        was_known = self.dispatch.learn(self.call, _is_data, _key_of)
        if was_known is False:
            raise NewTypes
        if was_known:
            self.structure = self.dispatch.agreed(self.call, _is_data)
        if self.structure is None:
            return function
        self.function = function
        return self._run

    def _run(self, *groups: Any) -> Any:
        out, self.quick, self.must_compile_again = self.dispatch.run(
            self.function, groups
        )
        return out

    @property
    def tells(self) -> bool:
        """Whether it shows now if calls of this kind can be quick."""
        return self.function is not None and not self.must_compile_again

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

    __slots__ = ("_acquire", "_function", "_owner", "_release")

    def __init__(self, function: Any, owner: Callable[[], Any]):
        lock = threading.Lock()
        self._function, self._owner = function, owner
        self._acquire, self._release = lock.acquire, lock.release

    def __call__(self, tree: Any, args: Any, kwargs: Any) -> Any:
        if self._acquire(False):
            try:
                return self._function(tree, args, kwargs)
            except Exception as e:
                error = _failure(e, self._owner(), (tree, args, kwargs))
                if error is e:
                    raise
                if error is not None:
                    raise error from None
            finally:
                self._release()
        # Not in the `except`: it would be told as a context.
        return self._owner().call(tree, args, kwargs)


# What `make_quick` returns where only `owner.call` is left.
IN_PYTHON: Final[Any] = object()


def make_quick(owner: Any, name: str, found: Dispatch | None) -> Any:
    """`owner.call` by JAX's dispatch, if there is one, else `IN_PYTHON`."""
    if found is None:
        return IN_PYTHON
    # It must not keep the owner alive, which keeps it.
    itself = weakref.ref(owner)
    slow = functools.partial(_call, itself)
    # Before a call has them: JAX can take numbers of Python for arrays.
    found.learn((0, 0.0, 0j, False), _is_data, _key_of)
    miss = functools.partial(_miss, itself, found)
    return Guarded(found.function(name, slow, miss, MAX_KEPT), itself)


def _call(owner: Any, tree: Any, args: Any, kwargs: Any) -> Any:
    return owner().call(tree, args, kwargs)


def _miss(owner: Any, found: Dispatch, tree: Any, args: Any, kwargs: Any) -> Any:
    if not at_top_level():  # where no call is quick
        return owner().call(tree, args, kwargs), None, False
    miss = Miss(found, (tree, args, kwargs))
    try:
        out = owner().call(tree, args, kwargs, miss)
    except NewTypes:
        # JAX has looked for this call by another structure than it has from now on.
        return owner().call(tree, args, kwargs), None, False
    if miss.quick is not None and not found.may_build(miss.quick):
        miss.quick = None
    return out, miss.quick, miss.must_compile_again


# Where Python goes on below JAX's dispatch.
_ENTRIES = [inspect.unwrap(f).__code__ for f in (_call, _miss)]


def _failure(error: Exception, owner: Any, call: Call) -> Exception | None:
    """What to raise for `error`, maybe itself; `None` if the program has not run.

    To be asked in the `except` clause.
    """
    # For JAX a kind of call that failed stays one for Python.
    owner.quick = None
    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_code in _ENTRIES for frame, _ in frames):
        if not isinstance(error, RuntimeError | ArithmeticError):
            # Not of a program, but of taking the arguments apart, or of comparing them.
            return None
        try:
            error = owner.explained(error, call)
        except Exception as e:
            error = e
    hide_frames(error)
    return error


def _is_data(x: Any) -> bool:
    return is_array(x) or isinstance(x, Tracer)


def _key_of(kind: type) -> Any:
    if kind in _PLAIN or kind.__eq__ is object.__eq__:
        return None
    return _StrictKey if issubclass(kind, WRAPPED) else _Key


_PLAIN = (bool, int, str, bytes)


class _Key:
    """Compared by `==` if the hashes are equal, as the keys of a dictionary are.

    JAX compares structures by `==` alone, which not all values can that have a hash.
    """

    __slots__ = ("hash", "value")

    def __init__(self, value: Any):
        self.value = value
        self.hash = hash(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Key) or self.hash != other.hash:
            return False
        try:
            return bool(self.value is other.value or self.value == other.value)
        except Exception:
            return False  # Python, which is then asked, raises it as it is

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # JAX does not ask for it


class _StrictKey(_Key):
    def __init__(self, value: Any):
        super().__init__(Strict(value))
