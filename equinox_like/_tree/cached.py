"""Nodes that remember how they are flattened, and how `filter_jit` flattens a call.

In a registry of our own (`_compat/registry.py`), a *cached node* such as a Module is one
node: its children are the arrays anywhere below it, and its aux data is a `Structure`, with
all that is static. Both are stored on the instance when it is first flattened, under the
name `_flat_`, where C++ finds them again. What may be changed in place, a list, a dict or a
node of the user's, is a child of its own, and flattened in each call.

A tree that a compiled function returns is described with `describe_output`, and built
from its arrays by C++. The cached nodes in it are *lazy*: they hold the arrays and the
structure, and get their fields when somebody asks for one. Passed to the next call, they
are flattened as they are.

    leaves, structure = registry.flatten(tree)
    registry.adopt(tree)                    # learns of new types: then flatten again
    registry.expand(structure)              # what each leaf that JAX sees is here
    arrays, output = registry.describe_output(tree)
    output.build(arrays)                    # the tree, with lazy nodes
"""

import dataclasses
import enum
import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._compat.registry import new_registry
from .._compat.tracer import Tracer
from .._environment import REGISTRY
from .filters import is_array
from .intern import Contents, InternTable
from .strict import Strict

FLAT: Final = "_flat_"
MISSING: Final[Any] = dataclasses.MISSING
_set = object.__setattr__
_new = object.__new__


class Fixed:
    """A static leaf, as a node without children; it is its own aux data."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any):
        self.value = value
        self.key = Strict(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Fixed and self.key == other.key

    def __hash__(self) -> int:
        return hash((type(self.value), self.key))


class Open:
    """In `Structure.inner`, a node around a child that may be anything: not an array."""


class Structure:
    """A cached node without its children. Equal ones are the same object.

    **Attributes:**

    - `kind`, `aux`: type and aux data of the node, as JAX's registry has them.
    - `inner`: the tuple of the node's own children, as a treedef of our registry. Its
        leaves are the children in our registry.
    - `fields`: the names of the attributes of a lazy instance once it is built.
    - `can_wait`: whether building such a node runs no code of the user's.
    - `is_lazy`: whether instances are lazy: it can wait, and there are fields.
    - `is_closed`: whether nothing in it can be changed in place.
    - `canonical`: of a lazy node that will not be closed, the structure of the same node
        once it is built; else `None`.
    - `programs`: what is compiled for callables of this structure is kept here.
    """

    __slots__ = (
        "__weakref__",
        "_contents",
        "aux",
        "can_wait",
        "canonical",
        "fields",
        "inner",
        "is_closed",
        "is_lazy",
        "kind",
        "programs",
    )

    kind: type
    aux: Any
    inner: Any
    fields: Sequence[str]
    can_wait: bool
    is_closed: bool
    is_lazy: bool
    canonical: Any
    programs: Any

    def build(self, children: Sequence[Any]) -> Any:
        """The node with its own children, of which cached ones are lazy in turn."""
        _, unflatten, _ = _cached[self.kind]
        return unflatten(self.aux, self.inner.unflatten(children))

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.inner})"


class _Flat:
    """`_flat_` of a node that does not have it yet: describes the instance.

    A descriptor without `__set__`, so it is asked only where the instance has none.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        flat = registry.describe(instance)
        if not instance._is_open_:
            _set(instance, FLAT, flat)
        return flat


class _Bare:
    """Has a `__dict__` that is nothing but that."""


# The dictionary of an instance as it is, with what it remembers, and perhaps no fields.
raw_dict: Final[Callable[[Any], dict[str, Any]]] = vars(_Bare)["__dict__"].__get__
set_raw_dict: Final = vars(_Bare)["__dict__"].__set__


class Cached(_Bare):
    """A node that remembers how it is flattened, and may be lazy."""

    # How JAX's registry flattens it, and how ours does.
    _aux_: Any = None
    _flat_: Any = _Flat()
    # Whether it is under construction: then nothing is remembered.
    _is_open_: Any = False

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore
        build_now(self)
        attributes = raw_dict(self)
        if not self._is_open_:
            forget(self)
        return attributes

    @__dict__.setter
    def __dict__(self, attributes: dict[str, Any]) -> None:
        set_raw_dict(self, attributes)

    def __getstate__(self) -> Any:
        return self.__dict__.copy()


def forget(instance: Any) -> None:
    """Drops what an instance remembers. It has its fields: see `build_now`."""
    attributes = raw_dict(instance)
    attributes.pop(FLAT, None)
    attributes.pop("_aux_", None)


class Attribute:
    """Stands on the class for a field: finds its value once a lazy instance is built.

    A descriptor without `__set__`, so it is asked only where the instance has no value.
    """

    __slots__ = ("default", "name")

    def __init__(self, name: str, default: Any = MISSING):
        self.name = name
        self.default = default

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        name, default = self.name, self.default
        if instance is not None:
            build_now(instance)
            # Another thread may have been first.
            attributes = raw_dict(instance)
            if name in attributes:
                return attributes[name]
        if default is MISSING:
            kind = type(instance) if instance is not None else owner
            shown = "object" if instance is not None else "type object"
            name_of_kind = getattr(kind, "__name__", "?")
            text = (
                f"{name_of_kind!r} {shown}"
                if instance is not None
                else f"{shown} {name_of_kind!r}"
            )
            raise AttributeError(
                f"{text} has no attribute {name!r}",
                name=name,
                obj=owner if instance is None else instance,
            )
        bind = getattr(type(default), "__get__", None)
        return default if bind is None else bind(default, instance, owner)


_structures: InternTable[Structure] = InternTable()

# For each cached type: how to flatten one level, how to build an instance, and the names
# of its fields where it may be lazy.
_cached: dict[type, tuple[Any, Any, Callable[[Any], Sequence[str]]]] = {}
# Foreign nodes that build themselves without side effects, so that it may be done later.
_trusted: set[type] = {tuple, list, dict, type(None)}


def register_cached(
    kind: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    lazy_fields: Callable[[Any], Sequence[str]],
) -> None:
    """Lets instances of `kind`, a node of JAX's registry, remember how they are flattened.

    It derives from `Cached`. `flatten` and `unflatten` are those for JAX's registry;
    `lazy_fields(aux)` are the names of the fields of an instance with this aux data, where
    all can be read through an `Attribute` of the class, and else empty.
    """
    _cached[kind] = flatten, unflatten, lazy_fields
    registry.register_cached(kind)


def trust(kind: type) -> None:
    """Building such a node runs no code of the user's: what holds one may be lazy."""
    _trusted.add(kind)


def build_now(instance: Any) -> None:
    """Gives a lazy node its fields; does nothing to any other one.

    They are complete before they are published, all at once. Of two threads the first wins.
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


class OwnRegistry:
    """Flattens with cached nodes, and builds lazy ones."""

    def __init__(self, nodes: Any):
        self._nodes = nodes
        self._jax = jtu.default_registry
        # Children and aux data of a node; `None` for a leaf.
        self._level = self._jax.flatten_one_level
        self._adopted: set[type] = set()
        self._lock = threading.RLock()
        self.flatten = nodes.flatten
        nodes.register_node(
            Fixed, lambda fixed: ((), fixed), lambda fixed, _: fixed.value
        )
        nodes.register_node(Open, _not_flattened, _not_flattened)
        self._leaf = nodes.flatten(0)[1]
        self._none = nodes.flatten(None)[1]
        self._open = self._node((Open, None), [self._leaf])

    def register_cached(self, kind: type) -> None:
        def unflatten(structure, children):
            if not structure.is_lazy:
                return structure.build(children)
            lazy = _new(kind)
            _set(lazy, FLAT, (children, structure))
            return lazy

        self._nodes.register_node(kind, operator.attrgetter(FLAT), unflatten)

    def describe(self, instance: Any) -> tuple[tuple[Any, ...], Structure]:
        """Children and structure of a cached node."""
        kind = type(instance)
        values, aux = _cached[kind][0](instance)
        children: list[Any] = []
        parts = [self._describe(value, children) for value in values]
        return tuple(children), self._structure(kind, aux, parts)

    def _describe(self, value: Any, children: list[Any]) -> Any:
        kind = type(value)
        if value is None:
            return self._none
        if is_array(value) or isinstance(value, Tracer):
            children.append(value)
            return self._leaf
        if kind in _cached:
            below, structure = getattr(value, FLAT)
            children.extend(below)
            return self._node((kind, structure), [self._leaf] * len(below))
        level = self._level(value)
        if kind is tuple or (level is not None and _is_namedtuple(kind, level[1])):
            parts = [self._describe(x, children) for x in level[0]]
            return self._node((kind, None), parts)
        if level is None and not may_become_node(kind) and _has_hash(value):
            return self._node((Fixed, Fixed(value)), [])
        children.append(value)
        return self._open

    def _node(self, data: Any, parts: Sequence[Any]) -> Any:
        return self._leaf.from_node_data_and_children(self._nodes, data, list(parts))

    def _structure(self, kind: type, aux: Any, parts: Sequence[Any]) -> Structure:
        inner = self._node((tuple, None), parts)
        statics = tuple(self._statics(inner))

        def make(contents: Contents) -> Structure:
            structure = Structure()
            structure.kind, structure.aux, structure.inner = kind, aux, inner
            nodes = list(self._kinds(inner))
            below = [s for s in statics if type(s) is Structure]
            structure.is_closed = not any(k in (list, dict) for k in nodes) and all(
                s.is_closed for s in below
            )
            structure.fields = _cached[kind][2](aux)
            structure.can_wait = (
                all(k in _cached or _is_trusted(k) for k in nodes)
                and all(s.can_wait for s in below)
                and not any(
                    type(s) is Fixed and may_become_node(type(s.value)) for s in statics
                )
            )
            structure.is_lazy = structure.can_wait and bool(structure.fields)
            structure._contents = contents
            structure.programs = structure.canonical = None
            built = self._as_built(inner)
            if built != inner:
                structure.canonical = self._structure(kind, aux, built.children())
            return structure

        hashes = tuple(hash(s) if _has_hash(s) else 0 for s in statics)
        own = hash(aux) if _has_hash(aux) else 0
        full_hash = hash((kind, own, inner, hashes))
        return _structures.find((kind, aux, inner), make, full_hash)

    def _as_built(self, treedef: Any) -> Any:
        """What `describe` makes of a node that was described as output."""
        node = treedef.node_data()
        if node is None or node[0] in (Open, type(None)):
            return treedef
        kind, aux = node
        if kind is Fixed:
            return self._open if may_become_node(type(aux.value)) else treedef
        if kind in _cached:
            structure = aux.canonical or aux
            count = structure.inner.num_leaves
            return self._node((kind, structure), [self._leaf] * count)
        if kind is tuple or (hasattr(kind, "_fields") and kind not in self._adopted):
            return self._node(node, [self._as_built(c) for c in treedef.children()])
        return self._open

    def _statics(self, treedef: Any) -> Iterator[Any]:
        """The static leaves in a treedef of ours, and the structures of cached nodes."""
        node = treedef.node_data()
        if node is None:
            return
        if node[0] is Fixed or node[0] in _cached:
            yield node[1]
        else:
            for child in treedef.children():
                yield from self._statics(child)

    def _kinds(self, treedef: Any) -> Iterator[type]:
        node = treedef.node_data()
        if node is not None:
            yield node[0]
            if node[0] not in _cached:
                for child in treedef.children():
                    yield from self._kinds(child)

    def adopt(self, tree: Any) -> bool:
        """Registers here the nodes in a tree that are registered with JAX alone."""
        examples: dict[type, Any] = {}

        def note(node: Any) -> bool:
            examples.setdefault(type(node), node)
            return False

        jtu.tree_flatten(tree, note)
        found = False
        for kind, example in examples.items():
            if kind in _cached or kind in _BUILT_IN or kind in self._adopted:
                continue
            level = self._level(example)
            if level is not None and not _is_namedtuple(kind, level[1]):
                self._adopt(kind)
                found = True
        return found

    def _adopt(self, kind: type) -> None:
        jax_leaf = jtu.tree_structure(0)

        def unflatten(aux, children):
            treedef = jax_leaf.from_node_data_and_children(
                self._jax, (kind, aux), [jax_leaf] * len(children)
            )
            return treedef.unflatten(children)

        with self._lock:
            if kind not in self._adopted:  # by another thread, just now
                self._nodes.register_node(kind, self._level, unflatten)
                self._adopted.add(kind)

    def is_still_leaf(self, value: Any) -> bool:
        """Whether the type of a static leaf was not registered with JAX meanwhile."""
        return self._level(value) is None

    def expand(self, treedef: Any) -> list[Any]:
        """For each leaf that JAX sees what it is in our registry.

        The `Fixed` that a structure has; or a leaf: `True` if it is certain to be an array.
        """
        found: list[Any] = []
        self._expand(treedef, None, found)
        return found

    def _expand(self, treedef: Any, below: Iterator[Any] | None, found: list) -> None:
        """Within a cached node `below` are the treedefs in the place of its leaves."""
        node = treedef.node_data()
        if node is None:
            found.append(below is not None)
            if below is not None:
                next(below)
        elif node[0] is Fixed:
            found.append(node[1])
        elif node[0] is Open and below is not None:
            self._expand(next(below), None, found)
        elif node[0] in _cached:
            children = iter(treedef.children()) if below is None else below
            self._expand(node[1].inner, children, found)
        else:
            for child in treedef.children():
                self._expand(child, below, found)

    def describe_output(
        self, tree: Any, is_data: Callable[[Any], bool]
    ) -> "tuple[list[Any], Output]":
        """The arrays of a tree, and how to build the tree from others like them."""
        leaves, treedef = jtu.tree_flatten(tree)
        self.adopt(tree)
        ours = self._describe_output(treedef, iter(leaves), is_data)
        return list(filter(is_data, leaves)), Output(ours, ours.unflatten)

    def _describe_output(
        self, treedef: Any, leaves: Iterator[Any], is_data: Any
    ) -> Any:
        node = treedef.node_data()
        if node is None:
            leaf = next(leaves)
            return self._leaf if is_data(leaf) else self._node((Fixed, Fixed(leaf)), [])
        parts = [self._describe_output(c, leaves, is_data) for c in treedef.children()]
        kind, aux = node
        if kind not in _cached:
            return self._node(node, parts) if kind is not type(None) else self._none
        structure = self._structure(kind, aux, parts)
        count = structure.inner.num_leaves
        return self._node((kind, structure), [self._leaf] * count)


class PublicRegistry:
    """The same by JAX's own registry: node by node, and nothing is lazy."""

    def __init__(self) -> None:
        self.flatten = jtu.tree_flatten

    def register_cached(self, kind: type) -> None:
        pass

    def describe(self, instance: Any) -> Any:
        raise AttributeError(FLAT)

    def adopt(self, tree: Any) -> bool:
        return False

    def is_still_leaf(self, value: Any) -> bool:
        return True

    def expand(self, treedef: Any) -> list[Any]:
        return [False] * treedef.num_leaves

    def describe_output(
        self, tree: Any, is_data: Callable[[Any], bool]
    ) -> "tuple[list[Any], Output]":
        leaves, treedef = jtu.tree_flatten(tree)
        data = [i for i, leaf in enumerate(leaves) if is_data(leaf)]
        statics = [None if is_data(leaf) else Fixed(leaf) for leaf in leaves]
        template = [None if s is None else s.value for s in statics]

        def build(arrays: Sequence[Any]) -> Any:
            filled = template.copy()
            for i, x in zip(data, arrays, strict=True):
                filled[i] = x
            return treedef.unflatten(filled)

        return [leaves[i] for i in data], Output((treedef, statics), build)


def _not_flattened(*_: Any) -> Any:
    raise TypeError("This node is part of a structure only.")


class Output:
    """How to build a tree from its arrays. Equal ones build the same from the same."""

    __slots__ = ("build", "key")

    def __init__(self, key: Any, build: Callable[[Sequence[Any]], Any]):
        self.key = key
        self.build = build

    def __eq__(self, other: object) -> bool:
        return type(other) is Output and self.key == other.key

    __hash__ = None  # pyright: ignore[reportAssignmentType]


_BUILT_IN: Final = frozenset({tuple, list, dict, type(None)})

# The packages whose types are what they are for good.
_LASTING = ("builtins", "types", "functools", "jax", "jaxlib", "numpy", "ml_dtypes")
# But for those that hold whatever they are given, of which somebody may make nodes.
_HOLDERS = (
    functools.partial,
    slice,
    frozenset,
    types.MethodType,
    types.SimpleNamespace,
)
_IS_HEAP_TYPE = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`


def may_become_node(kind: type) -> bool:
    """Whether leaves of this type may be nodes some day: somebody may register it."""
    known = _may_become_node.get(kind)
    if known is None:
        known = _may_become_node[kind] = not _is_lasting(kind)
    return known


_may_become_node: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _is_lasting(kind: type) -> bool:
    if issubclass(kind, enum.Enum):
        return True
    module = kind.__module__
    if not isinstance(module, str) or module.split(".")[0] not in _LASTING:
        return False
    if issubclass(kind, _HOLDERS):
        return False
    # A class can have the name of a package in which it is not.
    is_in_module = getattr(sys.modules.get(module), kind.__qualname__, None) is kind
    return is_in_module or not kind.__flags__ & _IS_HEAP_TYPE


def _is_trusted(kind: type) -> bool:
    return kind in _trusted or kind is Fixed or hasattr(kind, "_fields")


def _is_namedtuple(kind: type, aux: Any) -> bool:
    return issubclass(kind, tuple) and kind is not tuple and aux is kind


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return True


def _find() -> Any:
    nodes = new_registry() if REGISTRY == "own" else None
    return PublicRegistry() if nodes is None else OwnRegistry(nodes)


registry: Final[Any] = _find()
