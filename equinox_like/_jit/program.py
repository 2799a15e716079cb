"""All compiled functions of one callable with one set of options: the hot path of a call.

A call flattens its arguments in C++ (`_tree/cached.py`). It looks up the layout for
their structure (`layout.py`), then the specialization for their static leaves
(`specialization.py`, `donating.py`). The specialization calls the `jax.jit`-ed
function.

Programs are stored, if possible, with the callable itself. So wrapping the callable again
finds what was compiled, and all of it is freed with the callable. A global
`WeakKeyDictionary` would leak: a static leaf in a value may refer to the key, and the
garbage collector cannot free such a cycle through a global table.
"""

import dataclasses
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu

from .._compat.tracing import at_top_level
from .._core.base import Transformed
from .._core.caches import on_clear
from .._module.construct import filled
from .._module.module import BoundMethod
from .._tree.cycles import check_no_cycle, check_no_cycles
from .._tree.deleted import Record
from .._tree.partitioning import Skeleton
from .._tree.registry import cached_types, registry
from .._tree.strict import ByIdentity, strict_key, strict_treedef
from .donating import DonatingSpecialization
from .donation import Donate, Donation
from .layout import Call, Layout, LayoutTable, add_bounded
from .retrace import Storm, Trace
from .shardings import OPTIONS, Shardings
from .specialization import Specialization

flatten = registry.flatten


class Settings(NamedTuple):
    """What `filter_jit` was given for a callable."""

    name: str  # of the callable, for messages
    signature: inspect.Signature
    donate: Donate
    jitkwargs: dict[str, Any]
    shardings: Shardings | None


class Program:
    """The layouts and specializations of a callable.

    A callable that is not a pytree is opaque: `opaque()` returns it, from a weak
    reference if possible. A callable pytree is part of each call instead, and
    `opaque()` is `None`.
    """

    def __init__(self, opaque: Callable[[], Any], settings: Settings):
        self.opaque = opaque
        self._settings = settings
        self.name, signature, donate, self.jitkwargs, self.shardings = settings
        self.donate: Donate = donate
        self.options = {k: v for k, v in self.jitkwargs.items() if k not in OPTIONS}
        self.donation = Donation(donate)
        self.record = Record(self.name)
        self.layouts = LayoutTable(signature, self.name, self.donation.donates)
        self._forms = self.layouts.forms
        self._specializations: dict[Skeleton, Specialization] = {}
        self._lock = threading.RLock()
        self._donates = self.donation.is_any
        self.storm = Storm()

    def call(self, call: Call) -> Any:
        """Calls the function with these arguments."""
        if self._donates and not at_top_level():
            # JAX would donate under a transformation, too, where a caller may still
            # need the arrays.
            return self.without_donation.call(call)
        # `LayoutTable.fit`, inlined for speed.
        leaves, structure = self.flatten(call)
        form = self._forms.get(structure)
        layout = form and form.layouts.get(tuple(map(type, form.take_unknown(leaves))))
        if layout is None:
            layout, leaves = self.layouts.add(call)
        specialization = layout.only
        if specialization is None:  # static leaves select it
            specialization = layout.find(leaves) or self.find(layout, leaves, call)
        return specialization.run(layout, leaves)

    def flatten(self, call: Call) -> Any:
        """`registry.flatten`, which takes the place of this method after the first call."""
        tree, args, kwargs = call
        check_no_cycle(self.name, tree)
        check_no_cycles(self.opaque() if tree is None else tree, args, kwargs)
        flat = flatten(call)
        self.flatten = flatten
        return flat

    def find(self, layout: Layout, leaves: list[Any], call: Call) -> Specialization:
        """The compiled function for the structure and static leaves of a call."""
        skeleton = layout.skeleton(leaves)
        # Concurrent first calls share one function, so that it is compiled once.
        with self._lock:
            found = self._specializations.get(skeleton)
            if found is None:
                kind = DonatingSpecialization if layout.donates else Specialization
                fun = self.opaque() if call[0] is None else call[0]
                found = kind(self, fun, layout, skeleton)
                if old := add_bounded(self._specializations, skeleton, found):
                    self._forget(old)
        layout.remember(leaves, found)
        return found

    def clear(self, structure: Any) -> None:
        """Drops all specializations and layouts for callables of this structure."""
        with self._lock:
            keys = [
                skeleton
                for skeleton in self._specializations
                if skeleton.treedef.children()[0] == structure
            ]
            self._forget([self._specializations.pop(key) for key in keys])
            self.layouts.clear(structure)
            self.storm.number = min(self.storm.number, 1)

    def _forget(self, specializations: list[Specialization]) -> None:
        for specialization in specializations:
            self.layouts.forget(specialization)
            specialization.function.clear_cache()

    def __repr__(self) -> str:  # shown in errors about mismatched static fields
        return f"<program of {self.name}, donate={self.donate!r}>"

    @functools.cached_property
    def without_donation(self) -> "Program":
        return Program(self.opaque, self._settings._replace(donate="none"))

    def traces(self) -> list[Trace]:
        specializations = list(self._specializations.values())
        return [t for s in specializations for t in list(s.traces)]


class Programs:
    """The programs of one callable, by their options."""

    __slots__ = ("__weakref__", "_all", "_lock", "_owner")

    def __init__(self, owner: Any):
        self._all: dict[Any, Program] = {}
        self._lock = threading.RLock()
        self._owner = weakref.ref(owner) if owner is not None else _nothing
        with _lock:
            _all_programs.add(self)

    def get(self, key: Any, opaque: Callable[[], Any], settings: Settings) -> Program:
        """The program with these settings; the same one for equal settings and keys."""
        _, signature, donate, jitkwargs, shardings = settings
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
                    found = self._all[options] = Program(opaque, settings)
                return found
        except TypeError:  # an option is unhashable
            return Program(opaque, settings)

    def is_of(self, owner: Any) -> bool:
        return self._owner() is owner

    def clear(self) -> None:
        self._all.clear()

    def __repr__(self) -> str:  # shown in errors about mismatched static fields
        return "<programs>"

    def __reduce__(self) -> Any:  # pickled with the function's attributes, as `None`
        return _nothing, ()

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _nothing() -> None:
    return None


_all_programs: weakref.WeakSet[Programs] = weakref.WeakSet()
# Reentrant: a finaliser or a signal handler may wrap a function while its thread does.
_lock = threading.RLock()


@on_clear
def _forget_programs() -> None:
    # Existing wrappers hold their own programs, and keep working.
    with _lock:  # another thread may wrap a function
        found = list(_all_programs)
    for programs in found:
        programs.clear()
    _by_key.clear()


def program_of(fun: Any, tree: Any, settings: Settings) -> Program:
    """The program of a callable. `tree` is `fun` if that is a pytree, else `None`."""
    if tree is not None:
        owner, key = tree, None
        if type(tree) is BoundMethod:
            owner, key = tree.__self__, tree.__func__
        return _of_tree(owner).get(key, _nothing, settings)
    programs, key, opaque = _of_opaque(fun)
    return programs.get(key, opaque, settings)


def is_opaque(fun: Any) -> bool:
    """Whether `fun` is not a pytree, or a transformed function without leaves around one
    that is not: its programs are those of the latter, and do not keep it alive."""
    inner = fun
    while isinstance(inner, Transformed):
        inner = inner._held_
    return jtu.all_leaves([inner]) and (inner is fun or not jtu.tree_leaves(fun))


def _of_opaque(fun: Any) -> tuple[Programs, Any, Callable[[], Any]]:
    """The programs of a callable, the key for it, and what returns it, or a copy."""
    if isinstance(fun, Transformed):
        programs, key, inner = _of_opaque(fun._held_)
        kind, place = type(fun), "_opaque" if fun._tree is None else "_tree"
        fields = vars(fun) | {"_tree": None, "_opaque": None}
        key = kind, tuple(fields), strict_key(fields.values()), key
        return programs, key, lambda: filled(kind, fields | {place: inner()})
    if type(fun) is types.FunctionType:
        return _of_function(fun), None, weakref.ref(fun)
    owner, key, reference = fun, None, weakref.ref
    if isinstance(fun, types.MethodType):
        owner, key, reference = fun.__self__, fun.__func__, weakref.WeakMethod
    elif (programs := _of_value(fun)) is not None:
        return programs, None, lambda: fun
    try:
        opaque = reference(fun)
    except TypeError:
        return _shared(ByIdentity(owner)), key, lambda: fun
    return _of_identity(owner), key, opaque


_NAME: Final = "__equinox_like_programs__"


def _of_function(fun: Any) -> Programs:
    with _lock:
        found = fun.__dict__.get(_NAME)
        # `functools.wraps` copies attributes, so these may be another function's
        # programs.
        if type(found) is not Programs or not found.is_of(fun):
            found = fun.__dict__[_NAME] = Programs(fun)
        return found


def _of_identity(owner: Any) -> Programs:
    """The programs of any other object.

    They are in a table, because the object's attributes belong to the user.
    """
    with _lock:
        found = _by_id.get(id(owner))
        if found is None or not found.is_of(owner):
            found = _by_id[id(owner)] = Programs(owner)
            weakref.finalize(owner, _by_id.pop, id(owner), None).atexit = False
        return found


_by_id: dict[int, Programs] = {}


def _of_value(fun: Any) -> Programs | None:
    """The programs of a frozen dataclass that is nothing but the values of its fields.

    Equal ones share them. `None` for any other object.
    """
    kind: Any = getattr(type(fun), "__dataclass_params__", None)
    if kind is None or not (kind.frozen and kind.eq):
        return None
    try:
        fields = {f.name: getattr(fun, f.name) for f in dataclasses.fields(fun)}
        if not getattr(fun, "__dict__", {}).keys() <= fields.keys():
            return None
        hash(fun)  # refuses values that can change
        return _shared((type(fun), strict_key(fields.values())))
    except (AttributeError, TypeError):
        return None


def owner_of_programs(tree: Any) -> Any:
    """The structure that holds the programs of a callable pytree, if there is one.

    They are freed with it. An instance forgets it when an attribute is read.
    """
    return _structure_of(tree.__self__ if type(tree) is BoundMethod else tree)


def _structure_of(tree: Any) -> Any:
    return registry.structure_of(tree) if type(tree) in cached_types else None


def _of_tree(tree: Any) -> Programs:
    """The programs of all callable pytrees with the structure of `tree`."""
    owner = _structure_of(tree)
    if owner is None:
        try:
            return _shared((type(tree), strict_treedef(jtu.tree_structure(tree))))
        except Exception:
            return Programs(None)  # the call will raise, and name the leaf
    with _lock:
        if owner.programs is None:
            owner.programs = Programs(owner)
        return owner.programs


def _shared(key: Any) -> Programs:
    """The programs of all callables with this key.

    They keep the first one alive until `_MOST_SHARED` other keys have been added.
    """
    with _lock:
        found = _by_key.get(key)
        if found is None:
            found = Programs(None)
            add_bounded(_by_key, key, found, most=_MOST_SHARED)
        return found


_by_key: dict[Any, Programs] = {}
_MOST_SHARED: Final = 64
