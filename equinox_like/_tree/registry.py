"""How `filter_jit` flattens its arguments and builds its outputs: a registry of our own.

A cached node, such as a Module, is one node in our registry (`_compat/registry.py`). It
stores its flattened form, and is built lazily (`cached.py`). Its children are all arrays
anywhere below it. Its aux data is a `Structure` if it has its fields, and a `Waiting` if it
is lazy.

    leaves, structure = registry.flatten(tree)
    registry.adopt(nodes)                   # if it registers new types, flatten again
    registry.expand(structure)              # what each leaf of JAX's registry is here
    arrays, build = registry.describe_output(tree)
    build(arrays)                           # the tree, with lazy nodes

A node that may be changed in place (a list, a dict, a node of a user's type) is
flattened in each call. Types that users register with JAX are registered here when they
first occur.
"""

import enum
import functools
import itertools
import operator
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import jax.tree_util as jtu

from .._compat.registry import new_registry
from .._compat.tracing import Tracer
from .._environment import REGISTRY
from .filters import is_array
from .nodes import flatten_with_nodes
from .strict import (
    Interned,
    InternTable,
    StaticLeaf,
    fold_treedef,
    has_hash,
    is_compared_by_identity,
    strict_treedef,
)


class CachedType(NamedTuple):
    """How JAX's registry flattens and builds a cached node."""

    flatten: Callable[[Any], tuple[Sequence[Any], Any]]
    unflatten: Callable[[Any, Any], Any]
    # The names of the fields of a node with this aux data, if it may be lazy: if the class
    # has an `Attribute` for each.
    lazy_fields: Callable[[Any], Sequence[str]]
    # Whether an instance never changes, so that its parent may cache its content.
    is_immutable: bool = True


cached_types: Final[dict[type, CachedType]] = {}

# The attribute in which a cached node stores its children and its structure.
FLAT: Final = "_flat_"


class UserNode:
    """A tree that JAX builds: in an output, a node that is registered with JAX only."""

    __slots__ = ("statics", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Any]):
        self.treedef = treedef
        # For each leaf, a `StaticLeaf` or `None` for an array.
        self.statics = [None if is_array(x) else StaticLeaf(x) for x in leaves]

    def build(self, data: Sequence[Any]) -> Any:
        arrays = iter(data)
        return self.treedef.unflatten(
            next(arrays) if x is None else x.value for x in self.statics
        )


class MutableChild:
    """In `Structure.inner`, a node around a child that can be any pytree, not an
    array."""


class Structure(Interned):
    """A cached node that has its fields, without its children.

    Structures are interned: equal ones are the same object.

    **Attributes:**

    - `kind`, `aux`: type and aux data of the node, as JAX's registry has them.
    - `inner`: the tuple of the node's own children, as a treedef of our registry. Its
        leaves are the children in our registry.
    - `is_closed`: whether nothing in it can be changed in place.
    - `programs`: the compiled programs of callables with this structure.
    """

    __slots__ = ("aux", "inner", "is_closed", "kind", "programs")

    def __init__(self, kind: type, aux: Any, inner: Any, is_closed: bool):
        self.kind, self.aux, self.inner, self.is_closed = kind, aux, inner, is_closed
        self.programs: Any = None

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.inner})"


@final
class Waiting:
    """A cached node that a compiled function returns, until it is built.

    It is not interned, since nodes are built from it, which must have the identical static
    values that the function returned.

    **Attributes:**

    - `kind`, `aux`, `inner`: as in `Structure`.
    - `can_wait`: whether building such a node runs no user code.
    - `is_lazy`: whether it is built when it is first read: it can wait, and there are
        fields that could be read.
    - `built`: the structure of the node once it is built.
    """

    __slots__ = ("aux", "built", "can_wait", "inner", "is_lazy", "kind")

    def __init__(
        self, kind: type, aux: Any, inner: Any, can_wait: bool, built: Structure
    ):
        self.kind, self.aux, self.inner = kind, aux, inner
        self.can_wait, self.built = can_wait, built
        self.is_lazy = can_wait and bool(cached_types[kind].lazy_fields(aux))

    def build(self, children: Sequence[Any]) -> Any:
        """The node from its children. Cached nodes below it are lazy in turn."""
        unflatten = cached_types[self.kind].unflatten
        return unflatten(self.aux, self.inner.unflatten(children))


structures: Final[InternTable[Structure]] = InternTable()


# The most structures that the aux data of a node remembers.
_MOST_KNOWN: Final = 64
_set = object.__setattr__
_new = object.__new__


class Child(enum.IntEnum):
    """What a child of a cached node in JAX's registry is in ours.

    An `IntEnum`, whose hash is that of an integer and takes no call of Python.
    """

    ARRAY = enum.auto()
    # Another cached node, whose children and structure become part of this one's; unless
    # it is being constructed, and so may change.
    CACHED = enum.auto()
    # A tuple, whose items are looked at in turn.
    TUPLE = enum.auto()
    # Any other pytree. It is one child, and is flattened in each call.
    MUTABLE = enum.auto()
    # Static leaves: compared by type and value, as floats are, by identity, and by the
    # strict rule.
    VALUE = enum.auto()
    FLOAT = enum.auto()
    OBJECT = enum.auto()
    OTHER = enum.auto()


# Reading a global takes less time than reading a member.
_ARRAY, _CACHED, _TUPLE, _MUTABLE, _VALUE, _FLOAT, _OBJECT, _OTHER = Child


class OwnRegistry:
    """Flattens trees by the caches of their nodes, and builds lazy nodes."""

    def __init__(self, nodes: Any):
        self._nodes = nodes
        # Children and aux data of a node of JAX's registry; `None` for a leaf.
        self._level = jtu.default_registry.flatten_one_level
        self._adopted: set[type] = set()
        # What values of a type are, where that depends on the type alone. Types of arrays
        # are added when they occur.
        self.kinds: dict[type, Child] = {
            **dict.fromkeys((bool, int, str, type(None)), _VALUE),
            **dict.fromkeys((list, dict), _MUTABLE),
            float: _FLOAT,
            tuple: _TUPLE,
        }
        self._lock = threading.RLock()
        self.flatten = nodes.flatten
        self.strict_treedef = functools.partial(strict_treedef, nodes=nodes)
        nodes.register_node(
            StaticLeaf, lambda fixed: ((), fixed), lambda fixed, _: fixed.value
        )
        nodes.register_node(MutableChild, _not_flattened, _not_flattened)
        nodes.register_node(
            UserNode, _not_flattened, lambda foreign, data: foreign.build(data)
        )
        self._leaf = nodes.flatten(0)[1]
        self._none = nodes.flatten(None)[1]
        self._mutable = self._node((MutableChild, None), [self._leaf])

    def register_cached(self, kind: type) -> None:
        def unflatten(waiting, children):
            if not waiting.is_lazy:
                return waiting.build(children)
            lazy = _new(kind)
            _set(lazy, FLAT, (children, waiting))
            return lazy

        is_immutable = cached_types[kind].is_immutable
        self.kinds[kind] = _CACHED if is_immutable else _MUTABLE
        self._nodes.register_node(kind, operator.attrgetter(FLAT), unflatten)

    # --- Nodes that have their fields ---

    def describe(
        self, kind: type, values: Sequence[Any], aux: Any
    ) -> tuple[Sequence[Any], Structure]:
        """The children and the structure of a cached node, from its flattened form."""
        children, key = self._children_and_key(values)
        # `jax.tree.map` and the like return nodes with the aux data of their inputs, so
        # that most structures are known there.
        known = None if key is None else getattr(aux, "structures", None)
        reference = None if known is None else known.get(key)
        structure = reference and reference()
        if structure is None:
            structure = self._structure(kind, aux, self._inner_of(values))
            if known is not None:
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[key] = weakref.ref(structure)
        return children, structure

    def _children_and_key(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """The children in our registry, of values that are those in JAX's; and what is
        equal for values of the same `_inner_of`, as long as that is alive.

        The key is `None` if it would hold an object of the user's.
        """
        children: list[Any] = []
        key: list[Any] = []
        known, is_whole = self.kinds, True
        items, above = iter(values), []  # no recursion, since tuples may be deep
        while True:
            for value in items:
                kind = type(value)
                what = known.get(kind) or self._child_of_other_type(value)
                if what is _ARRAY or what is _MUTABLE:
                    children.append(value)
                    key.append(what)
                elif what is _VALUE:
                    key.append((kind, value))
                elif what is _CACHED and not value._assignable_:
                    below, structure = getattr(value, FLAT)
                    children += below
                    key.append(id(_built(structure)))
                elif what is _FLOAT:
                    key.append(value.hex())
                elif what is _OBJECT:
                    key.append(id(value))
                elif what is _TUPLE:
                    key.append((kind, len(value)))
                    above.append(items)
                    items = iter(value)
                    break
                elif what is _CACHED:
                    children.append(value)
                    key.append(_MUTABLE)
                else:
                    is_whole = False
            else:
                if not above:
                    return children, tuple(key) if is_whole else None
                items = above.pop()

    def _child_of_other_type(self, value: Any) -> Child:
        kind = type(value)
        if is_array(value) or isinstance(value, Tracer):
            self.kinds[kind] = _ARRAY
            return _ARRAY
        level = self._level(value)
        if level is not None:
            is_tuple = _is_namedtuple(value, level)
            return _TUPLE if is_tuple else _MUTABLE
        if is_compared_by_identity(kind):
            return _OBJECT
        return _OTHER if has_hash(value) else _MUTABLE

    def _inner_of(self, values: Sequence[Any]) -> Any:
        """The treedef of the tuple of these values, children of a node in JAX's registry.

        Its leaves are the children in ours.
        """

        def stop(value):
            return not isinstance(value, tuple) or self._child(value) is not _TUPLE

        parts, tuples = jtu.tree_flatten(tuple(values), stop)
        remaining = map(self._part, parts)

        def whole(treedef):
            return next(remaining) if treedef.node_data() is None else None

        return fold_treedef(tuples, whole, self._node)

    def _child(self, value: Any) -> Child:
        return self.kinds.get(type(value)) or self._child_of_other_type(value)

    def _part(self, value: Any) -> Any:
        """The treedef of one value that is not a tuple."""
        what = self._child(value)
        if what is _ARRAY:
            return self._leaf
        if what is _CACHED and not value._assignable_:
            return self._cached(self.structure_of(value))
        if what is _MUTABLE or what is _CACHED:
            return self._mutable
        return self._static(value)

    def _structure(self, kind: type, aux: Any, inner: Any) -> Structure:
        """The interned structure of a node that has its fields."""
        below = _nodes(inner)
        # Of the static leaves and the cached nodes' structures.
        hashes = [
            hash(data)
            for kind, data in below
            if kind is StaticLeaf or kind in cached_types
        ]

        def make():
            is_closed = not any(
                kind is MutableChild or (kind in cached_types and not data.is_closed)
                for kind, data in below
            )
            return Structure(kind, aux, inner, is_closed)

        full_hash = hash((kind, aux, inner, *hashes))
        return structures.find((kind, aux, inner), make, full_hash)

    # --- Treedefs ---

    def _static(self, value: Any) -> Any:
        if value is None:
            return self._none
        return self._node((StaticLeaf, StaticLeaf(value)), [])

    def _cached(self, structure: Structure | Waiting) -> Any:
        parts = [self._leaf] * structure.inner.num_leaves
        return self._node((structure.kind, structure), parts)

    def _node(self, data: Any, parts: Sequence[Any]) -> Any:
        return self._leaf.from_node_data_and_children(self._nodes, data, parts)

    def adopt(self, nodes: Sequence[Any]) -> bool:
        """Registers the types of these nodes that are registered with JAX only.

        Returns whether there were any: if so, their tree must be flattened again.
        """
        found = False
        for kind, example in {type(node): node for node in nodes}.items():
            if kind in cached_types or kind in _BUILT_IN or kind in self._adopted:
                continue
            level = self._level(example)
            if level is None or _is_namedtuple(example, level):
                continue
            found = True
            with self._lock:
                if kind not in self._adopted:  # another thread may have adopted it
                    # Never unflattened, since outputs describe such nodes as `UserNode`.
                    self._nodes.register_node(kind, self._level, _not_flattened)
                    self._adopted.add(kind)
        return found

    def expand(self, treedef: Any) -> list[Any]:
        """Describes, for each leaf of JAX's registry, what it is in ours.

        Either a `StaticLeaf` of a structure, or a bool for a leaf: whether it is surely an
        array.
        """
        found: list[Any] = []
        # The next one is last. Within a cached node, there is an iterator of the
        # treedefs of its children. Not a recursion, since trees may be deep.
        pending: list[tuple[Any, Iterator[Any] | None]] = [(treedef, None)]
        while pending:
            treedef, below = pending.pop()
            node = treedef.node_data()
            if node is None:
                found.append(below is not None)
                if below is not None:
                    next(below)
            elif node[0] is StaticLeaf:
                found.append(node[1])
            elif node[0] is UserNode and below is not None:
                for leaf in node[1].statics:
                    found.append(leaf is None or leaf)
                    if leaf is None:
                        next(below)
            elif node[0] is MutableChild and below is not None:
                pending.append((next(below), None))
            elif node[0] in cached_types:
                children = iter(treedef.children()) if below is None else below
                pending.append((node[1].inner, children))
            else:
                pending += [(child, below) for child in reversed(treedef.children())]
        return found

    # --- Nodes that a compiled function returns ---

    def describe_output(
        self, tree: Any
    ) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """The arrays of a tree, and a function that builds such a tree from arrays."""
        leaves, treedef, nodes = flatten_with_nodes(tree)
        self.adopt(nodes)
        ours = self._describe_output(treedef, iter(leaves))
        # Not `ours.unflatten`: jax 0.10 hides a bound method's treedef from the
        # garbage collector.
        build = functools.partial(type(ours).unflatten, ours)
        arrays = list(filter(is_array, leaves))
        return arrays, build

    def _describe_output(self, treedef: Any, leaves: Iterator[Any]) -> Any:
        def whole(part):
            node = part.node_data()
            if node is None:
                leaf = next(leaves)
                return self._leaf if is_array(leaf) else self._static(leaf)
            kind, _ = node
            if kind is type(None):
                return self._none
            if (
                kind in cached_types
                or kind in _BUILT_IN
                or self._is_namedtuple_of_jax(kind)
            ):
                return None
            made = UserNode(part, list(itertools.islice(leaves, part.num_leaves)))
            return self._node((UserNode, made), [self._leaf] * made.statics.count(None))

        def make(node, parts):
            kind, aux = node
            if kind in cached_types:
                return self._cached(self._waiting(kind, aux, parts))
            return self._node(node, parts)

        return fold_treedef(treedef, whole, make)

    def _waiting(self, kind: type, aux: Any, parts: Sequence[Any]) -> Waiting:
        inner = self._node((tuple, None), parts)
        built = self._node((tuple, None), list(map(self._as_built, parts)))
        can_wait = all(itertools.starmap(_can_wait, _nodes(inner)))
        return Waiting(kind, aux, inner, can_wait, self._structure(kind, aux, built))

    def _as_built(self, treedef: Any) -> Any:
        """The treedef that `describe` gives for this output once it is built."""

        def whole(part):
            node = part.node_data()
            if node is None or node[0] is type(None):
                return part
            kind, aux = node
            if kind is StaticLeaf:
                return part if has_hash(aux.value) else self._mutable
            if kind in cached_types and cached_types[kind].is_immutable:
                return self._cached(aux.built)
            is_tuple = kind is tuple or self._is_namedtuple_of_jax(kind)
            return None if is_tuple else self._mutable

        return fold_treedef(treedef, whole, self._node)

    def _is_namedtuple_of_jax(self, kind: type) -> bool:
        """Whether a type is a named tuple that was not registered with JAX."""
        return _may_be_namedtuple(kind) and kind not in self._adopted

    def structure_of(self, instance: Any) -> Structure:
        """The interned structure of a cached node."""
        _, structure = getattr(instance, FLAT)
        return _built(structure)


def _built(structure: Structure | Waiting) -> Structure:
    return structure.built if type(structure) is Waiting else structure


def _not_flattened(*_: Any) -> Any:
    raise TypeError("This node describes a structure only, and cannot be flattened.")


_BUILT_IN: Final = frozenset({tuple, list, dict, type(None)})
_OF_JAX: Final = frozenset({OrderedDict, defaultdict, jtu.Partial})


def _nodes(treedef: Any) -> list[tuple[type, Any]]:
    """Kind and data of the nodes in one of our treedefs, without those below cached
    ones."""
    found, pending = [], [treedef]
    while pending:
        treedef = pending.pop()
        node = treedef.node_data()
        if node is not None:
            found.append(node)
            if node[0] is not StaticLeaf and node[0] not in cached_types:
                pending += treedef.children()
    return found


def _can_wait(kind: type, data: Any) -> bool:
    """Whether building such a node runs no user code, so that it can be delayed."""
    if kind in cached_types:
        return data.can_wait
    kind = data.treedef.node_data()[0] if kind is UserNode else kind
    return (
        kind is StaticLeaf
        or kind in _BUILT_IN
        or kind in _OF_JAX
        or _may_be_namedtuple(kind)
    )


def _may_be_namedtuple(kind: type) -> bool:
    """Whether a type was made by `NamedTuple` or `namedtuple`."""
    # Not a class that derives from one: it may have its own `__new__`.
    return tuple in kind.__bases__ and hasattr(kind, "_fields")


def _is_namedtuple(value: Any, level: tuple[Sequence[Any], Any]) -> bool:
    """Whether `value` is a named tuple whose type was not registered with JAX."""
    children, aux = level
    return (
        _may_be_namedtuple(type(value))
        and aux is type(value)
        and len(children) == len(value)
        and all(map(operator.is_, children, value))
    )


class PublicRegistry:
    """As `OwnRegistry`, but uses JAX's registry, node by node; nothing is lazy."""

    flatten = staticmethod(jtu.tree_flatten)
    strict_treedef = staticmethod(strict_treedef)

    def register_cached(self, kind: type) -> None:
        pass

    def structure_of(self, instance: Any) -> None:
        return None

    def adopt(self, nodes: Sequence[Any]) -> bool:
        return False

    def expand(self, treedef: Any) -> list[Any]:
        return [False] * treedef.num_leaves

    def describe_output(
        self, tree: Any
    ) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        leaves, treedef = jtu.tree_flatten(tree)
        return list(filter(is_array, leaves)), UserNode(treedef, leaves).build


def _find() -> Any:
    nodes = new_registry() if REGISTRY == "own" else None
    return PublicRegistry() if nodes is None else OwnRegistry(nodes)


registry: Final[Any] = _find()


def register_cached(kind: type, cached: CachedType) -> None:
    """Lets instances of `kind`, a node of JAX's registry that derives from `Cached`, cache
    their flattened form."""
    cached_types[kind] = cached
    registry.register_cached(kind)
