"""Flattens an instance to children and aux data, and back, one node at a time.

JAX's own registry uses this for Modules. The aux data of a node is an `Aux`, a tuple
that JAX compares in C:

    (names of the children, names of the statics, strict key of the statics)

An instance caches the aux data of its last flattening as `_aux_`. For the cache of a
whole flattened Module, see `_tree/cached.py`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import jax.tree_util as jtu

from .._annotations import ARE_LAZY
from .._tree.cached import MISSING, Attribute, Cached, build_now, raw_dict, set_raw_dict
from .._tree.registry import CachedType, cached_types, register_cached
from .._tree.strict import strict_key, strict_types

WRAPPER_ATTRIBUTES: Final = (
    "__module__",
    "__name__",
    "__qualname__",
    "__doc__",
    *(() if ARE_LAZY else ("__annotations__",)),  # see `Shown`
)
AUX: Final = "_aux_"
# The attribute with the names that can be assigned while an instance is constructed.
ASSIGNABLE: Final = "_assignable_"

# The errors of reading an attribute that is missing.
_WITHOUT_VALUE: Final = (AttributeError, RuntimeError)
_set = object.__setattr__


class Aux(tuple):
    """The aux data of one node. The attributes are derived from the tuple."""

    # The values of the statics, by name.
    statics: dict[str, Any]
    # The values of the statics in order, if exactly the fields are set and it is not
    # from a pickle.
    values: tuple[Any, ...] | None
    # Then: the instance's `__dict__` with `None` as children.
    blank: dict[str, Any] | None
    # For `_tree/registry.py`: the structures of nodes with it, by a short key.
    structures: dict[Any, Any]

    def __reduce__(self):
        # Made anew from the values, because some of their types cannot be pickled, such
        # as that of a function, nor can weak references.
        return _make_aux, (*self[:2], tuple(self.statics.values()), {})

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.statics.items())


strict_types.add(Aux)


class Node(Cached):
    """Base class of Modules: a node that is flattened field by field."""

    # Whether it is a callable around another one, which may be JAX's and hold arrays.
    _wraps_callables_ = False
    # Whether it only calls what it holds, so that errors do not name it as a layer.
    _passes_calls_on_ = False
    # For private fields: the public attribute that paths show in place of their name.
    _shown_fields_ = MappingProxyType({})


def register(
    cls: type[Node],
    dynamic: tuple[str, ...],
    static: tuple[str, ...],
    is_immutable: bool,
) -> None:
    """Makes `cls` a pytree node whose children are the `dynamic` fields.

    `is_immutable`: whether its instances never change, so that they can be cached.
    """
    cached, with_keys = make_functions(cls, dynamic, static)
    jtu.register_pytree_with_keys(cls, with_keys, cached.unflatten, cached.flatten)
    if is_immutable:
        register_cached(cls, cached)


def make_functions(
    cls: type[Node], dynamic: tuple[str, ...], static: tuple[str, ...]
) -> tuple[CachedType, Callable[[Any], tuple[Sequence[Any], Any]]]:
    """How instances are flattened whose children are the `dynamic` fields; and that, with
    keys."""
    get_dynamic, get_static = getter(dynamic), getter(static)
    are_same = _comparer(len(static))
    # By aux data: its `structures`, so that new instances find those of earlier ones.
    shared: dict[Any, dict[Any, Any]] = {}
    keys = {n: jtu.GetAttrKey(cls._shown_fields_.get(n, n)) for n in dynamic}
    names = dynamic + static
    all_names = frozenset(names)

    def flatten(self):
        try:
            aux = self._aux_
            if are_same(aux.values, get_static(self)):
                return get_dynamic(self), aux
        except _WITHOUT_VALUE:
            pass  # nothing is cached, or a field was deleted by `object.__delattr__`
        return flatten_first(self)

    def flatten_first(self):
        build_now(self)
        attributes = raw_dict(self)
        present, fixed = dynamic, static
        if attributes.keys() != all_names:
            # Fields may be missing, and there may be other attributes: cached properties,
            # and the names of a wrapped function. Of these, only the names are structure.
            present = tuple(name for name in dynamic if name in attributes)
            fixed = tuple(n for n in static + WRAPPER_ATTRIBUTES if n in attributes)
        statics = tuple([attributes[name] for name in fixed])
        aux = _make_aux(present, fixed, statics, shared)
        if not self._assignable_:
            if present + fixed == names:
                aux.values = get_static(self)
            _set(self, AUX, aux)
        return tuple([attributes[name] for name in present]), aux

    def flatten_with_keys(self):
        children, aux = flatten(self)
        return tuple(zip(map(keys.get, aux[0]), children, strict=True)), aux

    def lazy_fields(aux):
        # A lazy instance is built when an `Attribute` of the class is read.
        is_plain = aux.values is not None and all(
            type(inspect.getattr_static(cls, name, None)) is Attribute for name in names
        )
        return names if is_plain else ()

    unflatten = _unflattener(len(dynamic))(cls, dynamic)
    return CachedType(flatten, unflatten, lazy_fields), flatten_with_keys


def _make_aux(
    names: tuple[str, ...],
    fixed: tuple[str, ...],
    statics: tuple[Any, ...],
    structures: dict[Any, dict[Any, Any]],
) -> Aux:
    aux = Aux((names, fixed, strict_key(statics)))
    aux.statics = dict(zip(fixed, statics, strict=True))
    aux.values = aux.blank = None
    aux.structures = {}
    if all(map(_is_shareable, statics)):
        if len(structures) >= _MOST_SHARED:
            structures.clear()
        aux.structures = structures.setdefault(aux, aux.structures)
    return aux


# Types of statics that refer to nothing, so that a table may hold them.
_SHAREABLE: Final = frozenset({bool, int, float, str, type(None)})
_MOST_SHARED: Final = 256


def _is_shareable(value: Any) -> bool:
    parts = value if type(value) is tuple else (value,)
    return _SHAREABLE.issuperset(map(type, parts))


def _unflatten_first(cls: type[Node], aux: Aux, children: Sequence[Any]) -> Any:
    attributes = dict.fromkeys(aux[0]) | aux.statics
    attributes[AUX] = aux
    if aux.values is not None:
        aux.blank = attributes.copy()
    attributes.update(zip(aux[0], children, strict=True))
    self = object.__new__(cls)
    set_raw_dict(self, attributes)
    return self


def getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """`self -> (self.name, ...)`, in C if there are at least two names."""
    if len(names) >= 2:
        return attrgetter(*names)
    if len(names) == 1:
        read = attrgetter(*names)
        return lambda self: (read(self),)
    return lambda self: ()


@functools.cache
def _comparer(count: int) -> Callable[..., bool]:
    """Makes a function that compares two tuples of this length by `is`.

    Unlike `==` it distinguishes `1` from `True`, and it is as fast.
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
    """Makes a function that unflattens instances with `count` children.

    Generated code, unrolled for each `count`, is the fastest way to do this in Python.
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


# cloudpickle sends a class that the other process cannot import, such as one of a notebook,
# by value: it makes an empty class, and sets the attributes of the original one by one. So
# JAX knows the class before it has fields. It is complete once `_module_spec_` is set.


def is_empty(namespace: dict[str, Any]) -> bool:
    """Whether a class may get its fields later. A class statement sets more names."""
    return namespace.keys() - {"__orig_bases__"} == {"__module__"}


def register_empty(cls: Any) -> None:
    """Makes `cls` a pytree node, with the fields that it has when first flattened."""

    @functools.cache
    def functions():
        return make_functions(cls, cls._module_spec_.dynamic, cls._module_spec_.static)

    jtu.register_pytree_with_keys(
        cls,
        lambda node: functions()[1](node),
        lambda aux, children: functions()[0].unflatten(aux, children),
        lambda node: functions()[0].flatten(node),
    )


def restore(cls: Any, old: Any, new: Any) -> None:
    """Completes a class that has the attributes of the original, except its spec, which
    is the `new` one."""
    for f in cls.__dataclass_fields__.values():
        for name in ("default", "default_factory"):
            # It is compared by identity, but `pickle` makes a copy.
            if type(getattr(f, name)) is type(MISSING):
                setattr(f, name, MISSING)
    own = cls.__dict__.get("__init__")
    if own is not None and own is old.init and new.init is None:
        # A base class was incomplete, so this one was not known to inherit `__init__`.
        type.__delattr__(cls, "__init__")
    if new.is_immutable and cls not in cached_types:
        cached, _ = make_functions(cls, new.dynamic, new.static)
        register_cached(cls, cached)
