"""Calls through JAX's own dispatch: what it knows, it runs in C++; else it asks.

An owner has `owner.quick = make_quick(owner, name)`, to be called with `(tree, args,
kwargs)`, and two methods:

    owner.call(tree, args, kwargs, miss=None)  # in Python; a `Miss` is to become quick
    owner.explained(error, call)               # what to raise for an error of the program
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._compat.dispatch import Dispatch, Fixed, dispatch
from .._compat.fast_path import forget_calls
from .._compat.trace_state import at_top_level
from .._compat.tracer import Tracer
from .._tree.filters import is_array
from .._tree.strict import Strict
from .pack import Packed
from .plan import MAX_KEPT, WRAPPED

Trees = tuple[Any, tuple[Any, ...], dict[str, Any]]


class NewTypes(Exception):
    """Of a call that JAX's dispatch may know now that it has learned of some types."""


class Miss:
    """A call that JAX's dispatch does not know, and what makes it known."""

    def __init__(self, dispatch: Dispatch, call: Trees):
        self.dispatch = dispatch
        self.call = call
        # What JAX has called, and what that remembers of a quick call.
        self.function: Any = None
        self.quick: Any = None
        self.must_compile_again = False

    def way(self, function: Any) -> Callable[..., Any]:
        """How to call what `jax.jit` returned, so that its like become quick."""
        if not self.dispatch.learn(self.call, _is_data, _key_of):
            raise NewTypes
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
            fixed = jtu.tree_map(lambda x: x if is_array(x) else Fixed(x), out)
            self.quick = self.dispatch.returning(self.quick, fixed)
        return out


def make_quick(owner: Any, name: str) -> Callable[[Any, Any, Any], Any]:
    """`owner.call` by JAX's dispatch, if there is one, else just that."""
    # It must not keep the owner alive, which keeps it.
    itself = weakref.ref(owner)
    slow = functools.partial(_call, itself)
    found = dispatch()
    if found is None:
        return slow
    # Before a call has them: JAX can take numbers of Python for arrays.
    found.learn((0, 0.0, 0j, False), _is_data, _key_of)
    miss = functools.partial(_miss, itself, found)
    return found.function(name, slow, miss, MAX_KEPT)


def in_python(owner: Any) -> Callable[[Any, Any, Any], Any]:
    """The same without JAX's dispatch."""
    return functools.partial(_call, weakref.ref(owner))


def _call(owner: Any, tree: Any, args: Any, kwargs: Any) -> Any:
    return owner().call(tree, args, kwargs)


def _miss(owner: Any, found: Dispatch, tree: Any, args: Any, kwargs: Any) -> Any:
    if not at_top_level():  # where no call is quick
        return owner().call(tree, args, kwargs), None, False
    miss = Miss(found, (tree, args, kwargs))
    try:
        out = owner().call(tree, args, kwargs, miss)
    except NewTypes:
        pass
    else:
        return out, miss.quick, miss.must_compile_again
    return owner().quick(tree, args, kwargs), None, False


# Where Python goes on below JAX's dispatch.
_ENTRIES = _call.__code__, _miss.__code__


def has_run(error: Exception, owner: Any, call: Trees) -> bool:
    """Whether `error` is that of the call, and not one of JAX's dispatch about it.

    To be asked in the `except` clause. If `error` comes from the program, and something
    better is to be raised in its place, this raises it.
    """
    forget_calls(owner.quick)
    entry = error.__traceback__ and error.__traceback__.tb_next
    if entry is not None and entry.tb_frame.f_code in _ENTRIES:
        return True
    found = dispatch()
    try:
        if found is not None:
            found.flatten(call)
    except Exception:
        return False
    better = owner.explained(error, call)
    if better is not error:
        raise better from None
    return True


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
        return (
            isinstance(other, _Key)
            and self.hash == other.hash
            and (self.value is other.value or self.value == other.value)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # JAX does not ask for it


class _StrictKey(_Key):
    def __init__(self, value: Any):
        super().__init__(Strict(value))
