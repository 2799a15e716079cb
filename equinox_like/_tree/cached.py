"""Nodes that cache their flattened form, and may be lazy.

A cached node is flattened once. The result, `_flat_`, is stored on the instance, where C++
code reads it: the arrays below it, and what it is without them (`registry.py`). A node
that a compiled function returns has only `_flat_` at first (it is lazy). It gets its fields
when one of them, or its `__dict__`, is first needed.

All fields of a lazy node are complete before they are published, by one swap of the
dictionary. If a list or a dict was created, `_flat_` is dropped, because it may change
from then on. A node is built immediately if building it runs code of the user, if a field
is overridden by a property, or if it has attributes that are not fields.

Python calls the three descriptors here only for what an instance does not have yet:
`_Flat` for `_flat_`, `Attribute` for a field, and `_Dictionary` for its `__dict__`.
"""

import dataclasses
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from .registry import FLAT, Child, Waiting, cached_types, registry

MISSING: Final[Any] = dataclasses.MISSING
_set = object.__setattr__
_CACHED, _TUPLE = Child.CACHED, Child.TUPLE


class _Bare:
    """Has an ordinary `__dict__`, whose descriptor is used below."""


# The actual dictionary of an instance: with its caches, but no fields if it is lazy.
raw_dict: Final[Callable[[Any], dict[str, Any]]] = vars(_Bare)["__dict__"].__get__
set_raw_dict: Final = vars(_Bare)["__dict__"].__set__


# --- A lazy node gets its fields ---


def build_now(instance: Any) -> None:
    """Gives a lazy node its fields. Does nothing if the node has them.

    All fields are computed first, and then set at once. If two threads do this, the
    first one wins.
    """
    flat = raw_dict(instance).get(FLAT)
    if flat is None or type(flat[1]) is not Waiting:
        return
    children, waiting = flat
    attributes = raw_dict(waiting.build(children))
    if waiting.built.is_closed:
        attributes[FLAT] = children, waiting.built
    with _publishing:
        known = raw_dict(instance)
        if known.get(FLAT) is flat:
            # Keep attributes that were set by `object.__setattr__`.
            own = {name: x for name, x in known.items() if name != FLAT}
            set_raw_dict(instance, attributes | own if own else attributes)


# No user code runs while it is held, except a signal handler, which may acquire it
# again.
_publishing = threading.RLock()


# --- A node is flattened ---


def _flatten(instance: Any) -> Any:
    """The children and the structure of a cached node, from its fields. They are stored,
    and so are those of the nodes below it."""
    flat: Any = None
    # The instance itself comes last.
    for node, values, aux in reversed(_not_flattened(instance)):
        flat = registry.describe(type(node), values, aux)
        if not node._assignable_:
            _set(node, FLAT, flat)
    return flat


def _not_flattened(instance: Any) -> list[tuple[Any, Sequence[Any], Any]]:
    """The instance and the cached nodes below it, in tuples too, that have no `_flat_` yet,
    from top to bottom, each with its children and aux data.

    Otherwise `describe` would call itself for each level of a deep tree. A node that is
    being constructed is left out: it may contain itself.
    """
    found: list[tuple[Any, Sequence[Any], Any]] = []
    kinds = registry.kinds
    pending = [instance]
    for node in pending:
        cached = cached_types.get(type(node))
        values: Sequence[Any] = node
        if cached is not None:
            values, aux = cached.flatten(node)
            found.append((node, values, aux))
        for value in values:
            what = kinds.get(type(value))
            if what is _CACHED:
                flat = raw_dict(value).get(FLAT)
                if flat and type(flat[1]) is Waiting and not flat[1].built.is_closed:
                    # It waits with the arrays within its lists, not with the lists.
                    build_now(value)
                    flat = None
                if flat is None and not value._assignable_:
                    pending.append(value)
            elif what is _TUPLE or (what is None and isinstance(value, tuple)):
                pending.append(value)
    return found


def forget(instance: Any) -> None:
    """Drops the caches of an instance, which must have its fields: see `build_now`."""
    attributes = raw_dict(instance)
    attributes.pop(FLAT, None)
    attributes.pop("_aux_", None)


def forget_other_classes(nodes: Sequence[Any]) -> bool:
    """Drops the caches of nodes if one of them was flattened as one of another class.

    `%autoreload` changes the class of instances. Returns whether it did.
    """
    nodes = [node for node in nodes if type(node) in cached_types]
    flat = [(raw_dict(node).get(FLAT), type(node)) for node in nodes]
    if not any(known and known[1].kind is not kind for known, kind in flat):
        return False
    for node in nodes:
        build_now(node)
        forget(node)
    return True


# --- The descriptors ---


class _Flat:
    """The class attribute `_flat_`. Without `__set__`: the one of an instance comes
    first."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        # `PublicRegistry` does not describe nodes.
        if not hasattr(registry, "describe") or type(instance) not in cached_types:
            return None
        try:
            return _flatten(instance)
        except AttributeError as e:  # would call a `__getattr__` of the user's class
            raise RuntimeError(str(e)) from e


class _Dictionary:
    """The descriptor `__dict__` of a node. Reading it builds a lazy node first.

    It is not a `property`, since tools that decorate a class would replace it.
    """

    def __get__(self, instance: Any, owner: type) -> dict[str, Any]:
        build_now(instance)
        attributes = raw_dict(instance)
        if not instance._assignable_:
            forget(instance)
        return attributes

    def __set__(self, instance: Any, attributes: dict[str, Any]) -> None:
        set_raw_dict(instance, attributes)


class _LooksLikeData(type):
    """Metaclass of `Attribute`, so that tools take its instances for data descriptors.

    `inspect` and `help` look for `__set__` with `getattr`, and find it here. So they do
    not list a field as a method. Python itself looks in the class `Attribute`, which
    has none, and so reads the instance's dictionary first.
    """

    def __set__(cls, instance: Any, value: Any) -> None: ...


# The class attribute for a field. It builds a lazy instance, and returns the field's
# value. A descriptor without `__set__`: Python uses it only if the instance has no
# value. To tools it looks like the member of a class with slots, so they see no
# default. Such a member has no docstring, so this class has none.
class Attribute(metaclass=_LooksLikeData):
    __slots__ = ("default", "name", "owner")

    owner: Any

    def __init__(self, owner: Any, name: str, default: Any = MISSING):
        """For the field `name` that the class `owner` declares."""
        self.owner = owner
        self.name = name
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            build_now(instance)
            # `build_now` does nothing if another thread has just built it.
            attributes = raw_dict(instance)
            if self.name in attributes:
                return attributes[self.name]
        return self._of_class(instance, owner)

    def _of_class(self, instance: Any, owner: Any) -> Any:
        """The default; without one, what a base class has, or the attribute itself."""
        name, default = self.name, self.default
        if default is not MISSING:
            bind = getattr(type(default), "__get__", None)
            return default if bind is None else bind(default, instance, owner)
        found = owner if instance is None else instance
        above = getattr(super(self.owner, found), name, MISSING)
        if above is not MISSING and type(above) is not Attribute:
            return above
        if instance is None:
            return self
        raise AttributeError(
            f"{type(found).__name__!r} object has no attribute {name!r}",
            name=name,
            obj=found,
        )

    def __reduce__(self):  # for cloudpickle, which copies `MISSING`
        default = () if self.default is MISSING else (self.default,)
        return Attribute, (self.owner, self.name, *default)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return types.MemberDescriptorType

    @property
    def __doc__(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None

    def __repr__(self) -> str:
        return f"<field {self.name!r} of {self.owner.__name__!r} objects>"


class Cached(_Bare):
    """A node that caches its flattened form, and may be lazy."""

    # An annotation would show in `typing.get_type_hints` of every Module.
    if TYPE_CHECKING:
        _aux_: Any
        _flat_: Any
        _assignable_: Any

    # Caches for JAX's registry, and for ours.
    _aux_ = None
    _flat_ = _Flat()
    # The attributes that can be assigned. There are some only during construction, when
    # nothing is cached.
    _assignable_ = frozenset()

    __dict__ = _Dictionary()  # pyright: ignore[reportAssignmentType]

    def __getstate__(self) -> Any:
        return self.__dict__.copy()
