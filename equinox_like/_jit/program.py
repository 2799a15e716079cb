"""All compiled functions of one callable: the steps of a call, and who owns them.

A call flattens its arguments in C++ (`_tree/cached.py`). It looks up the layout for
their structure (`layout.py`), then the specialization for their static leaves
(`specialization.py`, `donation.py`). The specialization calls the `jax.jit`-ed
function. A call that is not known goes through the steps of `Program._first_call`.

Programs are stored, if possible, with the callable itself. So wrapping the callable again
finds what was compiled, and all of it is freed with the callable. A global
`WeakKeyDictionary` would leak: a static leaf in a value may refer to the key, and the
garbage collector cannot free such a cycle through a global table.
"""

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu

from .._compat.tracing import at_top_level
from .._core.base import Transformed, on_clear
from .._module.construct import filled
from .._module.module import BoundMethod
from .._tree.cycles import check_no_cycles
from .._tree.deleted import Record
from .._tree.filters import is_array_or_struct
from .._tree.partitioning import Skeleton
from .._tree.registry import cached_types, registry
from .._tree.strict import ByIdentity, strict_key, strict_treedef
from .donation import Donate, DonatingSpecialization, Donation
from .layout import Call, CallLayout, LayoutTable, Leaves, add_bounded, with_methods
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
        self._donates = self.donation.is_any
        donates = self.donation.donates if self._donates else None
        self.layouts = LayoutTable(signature, self.name, donates)
        self._by_structure = self.layouts.by_structure
        self._specializations: dict[Skeleton, Specialization] = {}
        self._lock = threading.RLock()
        self.storm = Storm()

    def call(self, call: Call) -> Any:
        """Calls the function with these arguments."""
        if self._donates and not at_top_level():
            # JAX would donate under a transformation, too, where a caller may still
            # need the arrays.
            return self.without_donation.call(call)
        if self._by_structure:
            # `LayoutTable.fit`, inlined for speed.
            leaves, structure = flatten(call)
            known = self._by_structure.get(structure)
            if known is not None:
                kinds = tuple(map(type, known.take_unknown(leaves)))
                layout = known.layouts.get(kinds)
                if layout is not None:
                    specialization = layout.only or layout.find(leaves)
                    if specialization is not None:
                        return specialization.run(layout, leaves)
        return self._first_call(call)

    def _first_call(self, call: Call) -> Any:
        """Takes a call that is not known through its steps.

        A tree that contains itself is refused, before anything flattens it. The layout
        says where each leaf goes, and the skeleton of the static leaves which function
        is compiled. `run` calls that. Where JAX has no trace yet, a donating function is
        inspected; then JAX traces, which keeps the output's structure, and what `explain`
        compares. The stages begin with the same steps, in `prepare`.
        """
        if not self._by_structure:  # else it was flattened
            check_no_cycles(self._function(call), *call[1:])
        layout, leaves = self.layouts.fit(call)
        # A call with a method has two structures, of which one may be known.
        specialization = layout.only or layout.find(leaves)
        if specialization is None:
            specialization = self._specialize(layout, leaves, call)
            layout.remember(leaves, specialization)
        return specialization.run(layout, leaves)

    def prepare(self, call: Call) -> "Prepared":
        """What a call would run, which may hold a `jax.ShapeDtypeStruct`."""
        layout, leaves = self.layout_of(call)
        return Prepared(self._specialize(layout, leaves, call), layout, leaves)

    def layout_of(self, call: Call) -> tuple[CallLayout, Leaves]:
        """The layout and leaves of a call that may hold a `jax.ShapeDtypeStruct`."""
        check_no_cycles(self._function(call), *call[1:])
        call = with_methods(call)
        layout = self.layouts.make(call, is_data=is_array_or_struct)
        return layout, jtu.tree_leaves(call)

    def _function(self, call: Call) -> Any:
        return self.opaque() if call[0] is None else call[0]

    def _specialize(
        self, layout: CallLayout, leaves: Leaves, call: Call
    ) -> Specialization:
        """The compiled function for the structure and static leaves of a call."""
        skeleton = layout.skeleton(leaves)
        # Concurrent first calls share one function, so that it is compiled once.
        with self._lock:
            found = self._specializations.get(skeleton)
            if found is None:
                kind = DonatingSpecialization if layout.donates else Specialization
                found = kind(self, self._function(call), layout, skeleton)
                for old in add_bounded(self._specializations, skeleton, found):
                    self._by_structure.clear()  # the layouts hold it
                    old.function.clear_cache()
        return found

    def clear(self) -> None:
        """Drops all specializations and layouts."""
        with self._lock:
            for specialization in self._specializations.values():
                specialization.function.clear_cache()
            self._specializations.clear()
            self._by_structure.clear()
            self.storm.number = min(self.storm.number, 1)

    def __repr__(self) -> str:  # shown in errors about mismatched static fields
        return f"<program of {self.name}, donate={self.donate!r}>"

    @functools.cached_property
    def without_donation(self) -> "Program":
        return Program(self.opaque, self._settings._replace(donate="none"))

    def traces(self) -> list[Trace]:
        specializations = list(self._specializations.values())
        return [t for s in specializations for t in list(s.traces)]


class Prepared(NamedTuple):
    """A call up to the trace."""

    specialization: Specialization
    layout: CallLayout
    leaves: Leaves

    def stage(self, name: str) -> Any:
        """`trace`, `lower` or `eval_shape` of the function."""
        specialization, layout, leaves = self
        specialization.compares_every_call = True  # JAX gets a trace without inspection
        try:
            return specialization.stage(name, layout, leaves)
        except Exception as e:
            specialization.fail(e, layout, leaves)
        finally:
            specialization.new_traces.clear()  # a stage for each shape is no accident


class Programs:
    """The programs of one callable, by their options."""

    __slots__ = ("__weakref__", "_owner", "all")

    def __init__(self, owner: Any):
        self.all: dict[Any, Program] = {}
        self._owner = weakref.ref(owner) if owner is not None else types.NoneType
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
            with _lock:
                found = self.all.get(options)
                if found is None:
                    found = self.all[options] = Program(opaque, settings)
                return found
        except TypeError:  # an option is unhashable
            return Program(opaque, settings)

    def is_of(self, owner: Any) -> bool:
        return self._owner() is owner

    def __repr__(self) -> str:  # shown in errors about mismatched static fields
        return "<programs>"

    def __reduce__(self) -> Any:  # with the function's attributes, as `None`
        return types.NoneType, ()


_all_programs: weakref.WeakSet[Programs] = weakref.WeakSet()
# Reentrant: a finaliser or a signal handler may wrap a function while its thread does.
_lock = threading.RLock()


@on_clear
def _forget_programs() -> None:
    # Existing wrappers hold their own programs, and keep working.
    with _lock:  # another thread may wrap a function
        found = list(_all_programs)
    for programs in found:
        programs.all.clear()
    _by_key.clear()


def program_of(fun: Any, tree: Any, settings: Settings) -> Program:
    """The program of a callable. `tree` is `fun` if that is a pytree, else `None`."""
    if tree is not None:
        owner, key = tree, None
        if type(tree) is BoundMethod:
            owner, key = tree.__self__, tree.__func__
        return _of_tree(owner).get(key, types.NoneType, settings)
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


def owner_of_programs(tree: Any) -> Any:
    """The structure that holds the programs of a callable pytree, if there is one.

    They are freed with it. An instance forgets it when an attribute is read.
    """
    tree = tree.__self__ if type(tree) is BoundMethod else tree
    return registry.structure_of(tree) if type(tree) in cached_types else None


def _of_tree(tree: Any) -> Programs:
    """The programs of all callable pytrees with the structure of `tree`."""
    owner = owner_of_programs(tree)
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
