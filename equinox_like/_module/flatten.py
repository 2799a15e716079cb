"""How an instance becomes children and aux data, and back, one node at a time.

This is what JAX's own registry does with a Module. The aux data of a node is an `Aux`, a
tuple that JAX compares in C:

    (names of the children, names of the statics, strict key of the statics)

An instance remembers the aux data of its last flattening as `_aux_`. How a whole Module is
flattened at once is in `_tree/cached.py`.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import jax.tree_util as jtu

from .._tree.cached import (
    Attribute,
    Cached,
    build_now,
    raw_dict,
    set_raw_dict,
)
from .._tree.registry import register_cached
from .._tree.snapshot import UNCHANGING, Kept
from .._tree.strict import strict_key, strict_types

WRAPPER_ATTRIBUTES: Final = (
    "__module__",
    "__name__",
    "__qualname__",
    "__doc__",
    "__annotations__",
)
AUX: Final = "_aux_"
# What `_is_open_` of an instance is while it is under construction.
OPEN: Final = "_is_open_"
SCANNED: Final = frozenset({"<a tree is searched for this instance>"})

# What reading an attribute raises where there is none.
_WITHOUT_VALUE: Final = (AttributeError, RuntimeError)
_set = object.__setattr__


class Aux(tuple):
    """The aux data of one node. It is the tuple; its attributes follow from that."""

    # The values of the statics, by name.
    statics: dict[str, Any]
    # Those of them that can be changed in place.
    open: dict[str, Kept]
    # The values in order, where each field, and nothing else, is set on the instance.
    values: tuple[Any, ...] | None
    # Then also the `__dict__` of such an instance but for its children, if none is open.
    blank: dict[str, Any] | None

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.statics.items())


strict_types.add(Aux)


class ContainsItself(Exception):
    """Flattening came to the instance that is looked for."""


class Node(Cached):
    """What is flattened field by field: the base of Modules."""


def register(
    cls: type[Node], dynamic: tuple[str, ...], static: tuple[str, ...], is_frozen: bool
) -> None:
    """Makes `cls` a pytree node whose children are the `dynamic` fields.

    `is_frozen` says that its instances never change, and so may remember how they are
    flattened.
    """
    get_dynamic, get_static = getter(dynamic), getter(static)
    are_same = _comparer(len(static))
    names = dynamic + static

    def flatten(self):
        try:
            aux = self._aux_
            if are_same(aux.values, get_static(self)) and not (
                aux.open and any(kept.has_changed() for kept in aux.open.values())
            ):
                return get_dynamic(self), aux
        except _WITHOUT_VALUE:
            pass  # a field was deleted behind our back
        return flatten_first(self)

    def flatten_first(self):
        build_now(self)
        attributes = raw_dict(self)
        state = self._is_open_
        if state is SCANNED:
            raise ContainsItself
        # Fields may be missing, and other attributes may be there: a cached property, or
        # the names of a wrapped function. Of these only the latter are structure.
        present = tuple(name for name in dynamic if name in attributes)
        fixed = tuple(n for n in static + WRAPPER_ATTRIBUTES if n in attributes)
        aux = _make_aux(present, fixed, tuple(attributes[name] for name in fixed))
        if not state:
            if present + fixed == names:
                aux.values = get_static(self)
            _set(self, AUX, aux)
        return tuple(attributes[name] for name in present), aux

    def flatten_with_keys(self):
        children, aux = flatten(self)
        keys = map(jtu.GetAttrKey, aux[0])
        return tuple(zip(keys, children, strict=True)), aux

    def lazy_fields(aux):
        is_plain = aux.values is not None and are_read_lazily(cls, names)
        return names if is_plain else ()

    unflatten = _unflattener(len(dynamic))(cls, dynamic)
    jtu.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    if is_frozen:
        register_cached(cls, flatten, unflatten, lazy_fields)


def _make_aux(
    names: tuple[str, ...], fixed: tuple[str, ...], statics: tuple[Any, ...]
) -> Aux:
    by_name = dict(zip(fixed, statics, strict=True))
    found = {}
    if not UNCHANGING.issuperset(map(type, statics)):
        found = {
            name: kept for name in fixed if (kept := Kept(by_name[name])).can_change
        }
    by_name |= {name: kept.value for name, kept in found.items()}
    aux = Aux((names, fixed, strict_key(by_name.values())))
    aux.statics, aux.open = by_name, found
    aux.values = aux.blank = None
    return aux


def _unflatten_first(cls: type[Node], aux: Aux, children: Sequence[Any]) -> Any:
    statics = aux.statics
    if aux.open:
        statics = statics | {name: kept.get() for name, kept in aux.open.items()}
    attributes = dict.fromkeys(aux[0]) | statics
    attributes[AUX] = aux
    if aux.values is not None and not aux.open:
        aux.blank = attributes.copy()
    attributes.update(zip(aux[0], children, strict=True))
    self = object.__new__(cls)
    set_raw_dict(self, attributes)
    return self


def are_read_lazily(cls: type, names: tuple[str, ...]) -> bool:
    """Whether each of these attributes is read through an `Attribute` of the class."""
    return all(type(_found_on(cls, name)) is Attribute for name in names)


def _found_on(cls: type, name: str) -> Any:
    return next((b.__dict__[name] for b in cls.__mro__ if name in b.__dict__), None)


def getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """`self -> (self.name, ...)`, in C where there are two names or more."""
    if len(names) >= 2:
        return attrgetter(*names)
    if len(names) == 1:
        read = attrgetter(*names)
        return lambda self: (read(self),)
    return lambda self: ()


@functools.cache
def _comparer(count: int) -> Callable[..., bool]:
    """Makes the function that checks whether two tuples have the same objects.

    Unlike `==` it distinguishes `1` from `True`, in the same time.
    """
    if count == 0:
        return lambda old, new: old is not None
    first = "".join(f"a{i}, " for i in range(count))
    second = "".join(f"b{i}, " for i in range(count))
    same = " and ".join(f"a{i} is b{i}" for i in range(count))
    code = f"""
def are_same(old, new):
    if old is None:
        return False
    ({first}) = old
    ({second}) = new
    return {same}
"""
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope["are_same"]


@functools.cache
def _unflattener(count: int) -> Callable[..., Any]:
    """Makes the function that unflattens instances with so many children.

    Written out for each number: nothing else that Python does here takes less time.
    """
    names = "".join(f"name{i}, " for i in range(count))
    targets = "".join(f"attributes[name{i}], " for i in range(count))
    code = f"""
def unflattener(cls, names):
    ({names}) = names

    def unflatten(aux, children):
        blank = aux.blank
        if blank is None:
            return unflatten_first(cls, aux, children)
        attributes = blank.copy()
        ({targets}) = children
        self = new(cls)
        set_raw_dict(self, attributes)
        return self

    return unflatten
"""
    scope = {
        "new": object.__new__,
        "set_raw_dict": set_raw_dict,
        "unflatten_first": _unflatten_first,
    }
    exec(code, scope)
    return scope["unflattener"]
