"""`OwnRegistry`: our pytree registry, in which cached nodes are built lazily.

Its treedefs hold a `Structure` for each cached node, and nodes that JAX's treedefs do not
have, `StaticLeaf`, `MutableChild` and `UserNode`: see `structure.py`.
"""

import functools
import itertools
import operator
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._compat.tracing import Tracer
from .filters import is_array
from .nodes import flatten_with_nodes
from .strict import (
    fold_treedef,
    has_hash,
    is_compared_by_identity,
    strict_treedef,
)
from .structure import (
    FLAT,
    MutableChild,
    StaticLeaf,
    Structure,
    UserNode,
    cached_types,
    structures,
)

# The most structures that the aux data of a node remembers.
_MOST_KNOWN: Final = 64
# Types of static leaves that are the same if their types and values are equal.
_OF_VALUES: Final = frozenset({bool, int, str, type(None)})
_set = object.__setattr__
_new = object.__new__


class OwnRegistry:
    """Flattens trees by the caches of their nodes, and builds lazy nodes."""

    def __init__(self, nodes: Any):
        self._nodes = nodes
        # Children and aux data of a node of JAX's registry; `None` for a leaf.
        self._level = jtu.default_registry.flatten_one_level
        self._adopted: set[type] = set()
        # The types of arrays that have occurred.
        self._array_types: set[type] = set()
        self._lock = threading.RLock()
        self.flatten = nodes.flatten
        nodes.register_node(
            StaticLeaf, lambda fixed: ((), fixed), lambda fixed, _: fixed.value
        )
        nodes.register_node(MutableChild, _not_flattened, _not_flattened)
        nodes.register_node(
            UserNode, _not_flattened, lambda foreign, data: foreign.build(data)
        )
        self._leaf = nodes.flatten(0)[1]
        self._none = nodes.flatten(None)[1]
        self._open = self._node((MutableChild, None), [self._leaf])

    def register_cached(self, kind: type) -> None:
        def unflatten(structure, children):
            if not structure.is_lazy:
                return structure.build(children)
            lazy = _new(kind)
            _set(lazy, FLAT, (children, structure))
            return lazy

        self._nodes.register_node(kind, operator.attrgetter(FLAT), unflatten)

    def describe(
        self, kind: type, values: Sequence[Any], aux: Any
    ) -> tuple[Sequence[Any], Structure]:
        """The children and the structure of a cached node, from its flattened form."""
        children: list[Any] = []
        statics: list[Any] = []
        key = self._key(values, children, statics)
        # `jax.tree.map` and the like return nodes with the aux data of their inputs, so
        # that most structures are known there. A `StaticLeaf` may be equal to another one.
        known = getattr(aux, "structures", None)
        if statics and StaticLeaf in map(type, statics):
            known = None
        reference = None if known is None else known.get(key)
        structure = reference and reference()
        if structure is None:
            inner = self._described_by(key, statics)
            structure = self._structure(kind, aux, inner)
            if known is not None:
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[key] = weakref.ref(structure)
        return children, structure

    def _key(
        self, values: Sequence[Any], children: list[Any], statics: list[Any]
    ) -> tuple[Any, ...]:
        """Describes the children of a node in JAX's registry.

        It is a key for what they are, without the `children` in our registry. Where it
        has an `id`, or `StaticLeaf`, the object is added to `statics`. A tuple is its type
        and its length, and its items follow.
        """
        key: list[Any] = []
        pending = [*reversed(values)]  # no recursion, since tuples may be deep
        while pending:
            value = pending.pop()
            kind = type(value)
            if kind in self._array_types:  # faster than `is_array`
                children.append(value)
                key.append(None)
            elif kind in _OF_VALUES:
                key.append((kind, value))
            elif kind is float:
                key.append(value.hex())
            elif kind is list or kind is dict:
                children.append(value)
                key.append(MutableChild)
            elif kind is tuple:
                key.append((kind, len(value)))
                pending += reversed(value)
            elif kind not in cached_types:
                key.append(self._key_of_other(value, children, statics, pending))
            elif cached_types[kind].is_immutable and not value._assignable_:
                below, structure = getattr(value, FLAT)
                children += below
                statics.append(structure)
                key.append(id(structure))
            else:
                children.append(value)
                key.append(MutableChild)
        return tuple(key)

    def _key_of_other(
        self, value: Any, children: list[Any], statics: list[Any], pending: list[Any]
    ) -> Any:
        kind = type(value)
        if is_array(value) or isinstance(value, Tracer):
            self._array_types.add(kind)
            children.append(value)
            return None
        level = self._level(value)
        if level is None:
            if is_compared_by_identity(kind):
                statics.append(value)
                return id(value)
            if has_hash(value):
                statics.append(StaticLeaf(value))
                return StaticLeaf
        elif _is_namedtuple(value, level):
            pending += reversed(value)
            return kind, len(value)
        children.append(value)
        return MutableChild

    def _described_by(self, key: Any, statics: list[Any]) -> Any:
        """The treedef of a tuple whose children have this key."""
        parts: list[Any] = []
        for item in reversed(key):
            if item is None:
                part = self._leaf
            elif item is MutableChild:
                part = self._open
            elif type(item) is str:
                part = self._static(float.fromhex(item))
            elif type(item) is not tuple:
                part = self._static(statics.pop())
            elif issubclass(item[0], tuple):
                below = [parts.pop() for _ in range(item[1])]
                part = self._node((item[0], None), below)
            else:
                part = self._static(item[1])
            parts.append(part)
        return self._node((tuple, None), parts[::-1])

    def _static(self, value: Any) -> Any:
        if value is None:
            return self._none
        if type(value) is Structure:
            return self._cached(value)
        fixed = value if type(value) is StaticLeaf else StaticLeaf(value)
        return self._node((StaticLeaf, fixed), [])

    def _cached(self, structure: Structure) -> Any:
        parts = [self._leaf] * structure.inner.num_leaves
        return self._node((structure.kind, structure), parts)

    def _node(self, data: Any, parts: Sequence[Any]) -> Any:
        return self._leaf.from_node_data_and_children(self._nodes, data, parts)

    def _structure(self, kind: type, aux: Any, inner: Any) -> Structure:
        """The interned structure of a node that user code has built."""
        # Of the static leaves and the cached nodes' structures.
        hashes = [
            hash(data)
            for kind, data in _nodes(inner)
            if kind is StaticLeaf or kind in cached_types
        ]
        make = functools.partial(self._new_structure, kind, aux, inner)
        full_hash = hash((kind, aux, inner, *hashes))
        return structures.find((kind, aux, inner), make, full_hash)

    def _structure_of_output(
        self, kind: type, aux: Any, parts: Sequence[Any]
    ) -> Structure:
        structure = self._new_structure(kind, aux, self._node((tuple, None), parts))
        built = [self._as_built(part) for part in parts]
        structure.canonical = self._structure(
            kind, aux, self._node((tuple, None), built)
        )
        structure.is_closed = not any(map(self._has_open, built))
        return structure

    def _new_structure(self, kind: type, aux: Any, inner: Any) -> Structure:
        structure = Structure()
        structure.kind, structure.aux, structure.inner = kind, aux, inner
        structure.can_wait = all(itertools.starmap(_can_wait, _nodes(inner)))
        structure.fields = cached_types[kind].lazy_fields(aux)
        structure.is_lazy = structure.can_wait and bool(structure.fields)
        structure.is_closed = False
        structure.programs = structure.canonical = None
        return structure

    def _has_open(self, treedef: Any) -> bool:
        """Whether a built node contains anything that can be changed in place."""
        pending = [treedef]
        while pending:
            treedef = pending.pop()
            node = treedef.node_data()
            if node is None:
                continue
            if node[0] is MutableChild:
                return True
            cached = node[0] in cached_types
            pending += [node[1].inner] if cached else treedef.children()
        return False

    def _as_built(self, treedef: Any) -> Any:
        """The treedef that `describe` gives for this output once it is built."""

        def whole(part):
            node = part.node_data()
            if node is None or node[0] in (MutableChild, type(None)):
                return part
            kind, aux = node
            if kind is StaticLeaf:
                return part if has_hash(aux.value) else self._open
            if kind in cached_types and cached_types[kind].is_immutable:
                return self._cached(aux.canonical or aux)
            return (
                None
                if kind is tuple or self._is_namedtuple_of_jax(kind)
                else self._open
            )

        return fold_treedef(treedef, whole, self._node)

    def adopt(self, nodes: Sequence[Any]) -> bool:
        """Registers the types of these nodes that are registered with JAX only.

        Returns whether there were any: if so, their tree must be flattened again.
        """
        found = False
        for kind, example in {type(node): node for node in nodes}.items():
            if kind in cached_types or kind in _BUILT_IN or kind in self._adopted:
                continue
            level = self._level(example)
            if level is not None and not _is_namedtuple(example, level):
                self._adopt(kind)
                found = True
        return found

    def _adopt(self, kind: type) -> None:
        with self._lock:
            if kind not in self._adopted:  # another thread may have adopted it
                # Never unflattened, since outputs describe such nodes as `UserNode`.
                self._nodes.register_node(kind, self._level, _not_flattened)
                self._adopted.add(kind)

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
            flat = [next(leaves) for _ in range(part.num_leaves)]
            statics = [None if is_array(x) else StaticLeaf(x) for x in flat]
            user_node = UserNode, UserNode(part, statics)
            return self._node(user_node, [self._leaf] * statics.count(None))

        def make(node, parts):
            kind, aux = node
            if kind in cached_types:
                return self._cached(self._structure_of_output(kind, aux, parts))
            return self._node(node, parts)

        return fold_treedef(treedef, whole, make)

    def _is_namedtuple_of_jax(self, kind: type) -> bool:
        """Whether a type is a named tuple that was not registered with JAX."""
        return _may_be_namedtuple(kind) and kind not in self._adopted

    def strict_treedef(self, treedef: Any) -> Any:
        """A key for a treedef of this registry, which is compared by the strict
        rule."""
        return strict_treedef(treedef, self._nodes)

    def structure_of(self, instance: Any) -> Structure | None:
        """The interned structure of a cached node."""
        _, structure = getattr(instance, FLAT)
        return structure.canonical or structure


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
    kind = data.kind if kind is UserNode else kind
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
