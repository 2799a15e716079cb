"""Where the programs of a callable are kept: by the callable itself.

So wrapping it again finds what was compiled, and all goes when the callable goes. A global
table of weak references would not do: its values may lead to its keys, by a static value
that holds the function, and the garbage collector would not see that.
"""

import dataclasses
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

from .._core.base import name_of
from .._core.caches import on_clear
from .._module.module import BoundMethod
from .._tree.registry import registry
from .._tree.strict import strict_key
from .._tree.structure import cached_types
from .donation import Donate
from .layout import keep
from .program import Program
from .shardings import OPTIONS, Shardings


class Programs:
    """The programs of one callable, by their options."""

    __slots__ = ("__weakref__", "_all", "_lock", "_owner")

    def __init__(self, owner: Any):
        self._all: dict[Any, Program] = {}
        self._lock = threading.RLock()
        self._owner = weakref.ref(owner) if owner is not None else _nothing
        _all_programs.add(self)

    def get(
        self,
        key: Any,
        opaque: Callable[[], Any],
        name: str,
        signature: inspect.Signature,
        donate: Donate,
        jitkwargs: dict[str, Any],
        shardings: Shardings | None,
    ) -> Program:
        """The program with these options: the same one for equal options and keys."""

        def without_donation():
            return self.get(key, opaque, name, signature, "none", jitkwargs, shardings)

        def make():
            return Program(
                name, opaque, signature, donate, jitkwargs, shardings, without_donation
            )

        parameters = tuple(
            (p.name, p.kind, p.default is p.empty)
            for p in signature.parameters.values()
        )
        rest = sorted((k, v) for k, v in jitkwargs.items() if k not in OPTIONS)
        try:
            options = key, parameters, donate, shardings, strict_key(rest)
            with self._lock:
                found = self._all.get(options)
                if found is None:
                    found = self._all[options] = make()
                return found
        except TypeError:  # an option that has no hash
            return make()

    def is_of(self, owner: Any) -> bool:
        return self._owner() is owner

    def clear(self) -> None:
        self._all.clear()

    def __reduce__(self) -> Any:  # with the function that has it
        return _nothing, ()

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _nothing() -> None:
    return None


_all_programs: weakref.WeakSet[Programs] = weakref.WeakSet()
# A finaliser, or a signal's handler, may wrap a function while this thread does.
_lock = threading.RLock()


@on_clear
def _forget_programs() -> None:
    # Wrappers that exist hold theirs themselves.
    for programs in list(_all_programs):
        programs.clear()
    _by_value.clear()
    _by_type.clear()


def program_of(fun: Any, tree: Any, *options: Any) -> Program:
    """The program of a callable, which is `tree` where it is a pytree.

    `options` are the signature, `donate`, the other arguments of `jax.jit`, and shardings.
    """
    options = name_of(fun), *options
    if tree is not None:
        owner, key = tree, None
        if type(tree) is BoundMethod:
            owner, key = tree.__self__, tree.__func__
        return _of_tree(owner).get(key, _nothing, *options)
    if isinstance(fun, types.MethodType):
        try:
            opaque = weakref.WeakMethod(fun)
        except TypeError:
            return Programs(None).get(None, lambda: fun, *options)
        return _of_identity(fun.__self__).get(fun.__func__, opaque, *options)
    if type(fun) is types.FunctionType:
        return _of_function(fun).get(None, weakref.ref(fun), *options)
    if dataclasses.is_dataclass(fun) and not isinstance(fun, type):
        return _of_value(fun).get(None, lambda: fun, *options)
    try:
        opaque = weakref.ref(fun)
    except TypeError:
        return Programs(None).get(None, lambda: fun, *options)
    return _of_identity(fun).get(None, opaque, *options)


_NAME: Final = "__equinox_like_programs__"


def _of_function(fun: Any) -> Programs:
    with _lock:
        found = fun.__dict__.get(_NAME)
        # What `functools.wraps` returns has the attributes of what it wraps.
        if type(found) is not Programs or not found.is_of(fun):
            found = fun.__dict__[_NAME] = Programs(fun)
        return found


class _Identity(weakref.ref[Any]):
    """A weak reference that equals those to the very same object."""

    __slots__ = ("_id",)

    def __init__(self, referent: Any, callback: Any = None):
        super().__init__(referent, callback)  # pyright: ignore[reportCallIssue]
        self._id = id(referent)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Identity and self._id == other._id

    def __hash__(self) -> int:
        return self._id


def _of_identity(owner: Any) -> Programs:
    """Those of any other object. Its attributes are the user's, so this is a table."""
    with _lock:
        found = _by_identity.get(_Identity(owner))
        if found is None or not found.is_of(owner):
            reference = _Identity(owner, lambda dead: _by_identity.pop(dead, None))
            found = _by_identity[reference] = Programs(owner)
        return found


_by_identity: dict[_Identity, Programs] = {}


def _of_value(fun: Any) -> Programs:
    """Those of a callable dataclass, by the values of its fields.

    It is kept alive with the programs, for as long as few others come.
    """
    values = tuple(getattr(fun, f.name) for f in dataclasses.fields(fun))
    try:
        key = type(fun), strict_key(values)
        with _lock:
            found = _by_value.get(key)
            if found is None:
                found = Programs(None)
                keep(_by_value, key, found, most=_MOST_VALUES)
            return found
    except TypeError:  # a field that has no hash
        return _of_identity(fun)


_by_value: dict[Any, Programs] = {}
_MOST_VALUES: Final = 64


def _of_tree(tree: Any) -> Programs:
    """Those of all callable pytrees of the same structure."""
    owner = registry.structure_of(tree) if type(tree) in cached_types else None
    if owner is None:
        return _of_type(type(tree))
    with _lock:
        if owner.programs is None:
            owner.programs = Programs(owner)
        return owner.programs


def _of_type(kind: type) -> Programs:
    return _by_type.setdefault(kind, Programs(kind))


_by_type: dict[type, Programs] = {}
