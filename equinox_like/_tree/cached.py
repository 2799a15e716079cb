"""Nodes that remember how they are flattened, and may be lazy.

A cached node is flattened once; what that gave is kept on the instance, where C++ finds
it. A node that a compiled function returns holds nothing but that at first: it gets its
fields when one of them is read, or its `__dict__`, or anything else that needs them.
"""

import dataclasses
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .own_registry import FLAT
from .registry import registry
from .structure import Structure, cached_types

MISSING: Final[Any] = dataclasses.MISSING
_set = object.__setattr__


class _Flat:
    """`_flat_` of a node that does not have it yet: describes the instance.

    A descriptor without `__set__`, so it is asked only where the instance has none.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        describe = getattr(registry, "describe", None)  # JAX's own does not have it
        if describe is None or type(instance) not in cached_types:
            raise AttributeError(FLAT)  # to a tool that reads all that `dir` lists
        try:
            flat = describe(instance)
        except AttributeError as e:  # which would ask a `__getattr__` of the user's
            raise RuntimeError(str(e)) from e
        if not instance._is_open_:
            _set(instance, FLAT, flat)
        return flat


class _Bare:
    """Has a `__dict__` with only that in it."""


# The dictionary of an instance as it is, with what it remembers, and perhaps no fields.
raw_dict: Final[Callable[[Any], dict[str, Any]]] = vars(_Bare)["__dict__"].__get__
set_raw_dict: Final = vars(_Bare)["__dict__"].__set__


class _Dictionary:
    """`__dict__` of a node, which is built first.

    It is not a `property`: tools that decorate a class would replace one.
    """

    def __get__(self, instance: Any, owner: type) -> dict[str, Any]:
        build_now(instance)
        attributes = raw_dict(instance)
        if not instance._is_open_:
            forget(instance)
        return attributes

    def __set__(self, instance: Any, attributes: dict[str, Any]) -> None:
        set_raw_dict(instance, attributes)


class Cached(_Bare):
    """A node that remembers how it is flattened, and may be lazy."""

    # An annotation would show in `typing.get_type_hints` of every Module.
    if TYPE_CHECKING:
        _aux_: Any
        _flat_: Any
        _is_open_: Any

    # How JAX's registry flattens it, and how ours does.
    _aux_ = None
    _flat_ = _Flat()
    # The attributes that can be assigned now. It has some under construction only, and then
    # remembers nothing.
    _is_open_ = frozenset()

    __dict__ = _Dictionary()  # pyright: ignore[reportAssignmentType]

    def __getstate__(self) -> Any:
        return self.__dict__.copy()


def forget(instance: Any) -> None:
    """Drops what an instance remembers. It has its fields: see `build_now`."""
    attributes = raw_dict(instance)
    attributes.pop(FLAT, None)
    attributes.pop("_aux_", None)


class _LooksLikeData(type):
    """`inspect` and `help` ask the type of a descriptor whether it has `__set__`: yes, so
    that a field is not listed as a method. Python itself asks the classes only, where it
    finds none, and reads the instance first.
    """

    def __set__(cls, instance: Any, value: Any) -> None: ...


# Stands on the class for a field: finds its value once a lazy instance is built.
#
# A descriptor without `__set__`, so it is asked only where the instance has no value. To
# tools it is what a dataclass with slots has for each field, so that they see no default;
# like that, it has no docstring.
class Attribute(metaclass=_LooksLikeData):
    __slots__ = ("default", "name", "owner")

    owner: Any

    def __init__(self, owner: Any, name: str, default: Any = MISSING):
        """Of a field that the class `owner` declares."""
        self.owner = owner
        self.name = name
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        name, default = self.name, self.default
        found: Any = owner
        if instance is not None:
            found = instance
            build_now(instance)
            # Another thread may have been first.
            attributes = raw_dict(instance)
            if name in attributes:
                return attributes[name]
        if default is MISSING:
            # A class further up may have one, or a method of this name.
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
        bind = getattr(type(default), "__get__", None)
        return default if bind is None else bind(default, instance, owner)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return types.MemberDescriptorType

    @property
    def __doc__(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None

    def __repr__(self) -> str:
        return f"<field {self.name!r} of {self.owner.__name__!r} objects>"


def build_now(instance: Any) -> None:
    """Gives a lazy node its fields; does nothing to any other one.

    They are complete before they are published, all at once. If there are two threads,
    the first wins.
    """
    flat = raw_dict(instance).get(FLAT)
    if flat is None or not _is_unbuilt(raw_dict(instance), flat[1]):
        return
    children, structure = flat
    attributes = raw_dict(structure.build(children))
    if structure.is_closed:
        attributes[FLAT] = flat
    with _publishing:
        known = raw_dict(instance)
        if FLAT in known and _is_unbuilt(known, structure):
            # Somebody may have set an attribute behind our back.
            own = {name: x for name, x in known.items() if name != FLAT}
            set_raw_dict(instance, attributes | own if own else attributes)


def _is_unbuilt(attributes: dict[str, Any], structure: Structure) -> bool:
    return structure.is_lazy and (
        len(attributes) == 1 or not all(name in attributes for name in structure.fields)
    )


# Held while no other code runs. A signal's handler may come to it again.
_publishing = threading.RLock()
