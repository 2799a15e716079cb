"""The aux data of nodes in our registry: what a node is, without its arrays.

A cached node, such as a Module, is one node in our registry (`registry.py`). Its children
are all arrays anywhere below it. Its aux data is a `Structure` if it has its fields, and a
`Waiting` if it is lazy. Interning makes one object for equal values, so that they are
compared by identity.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar, final

from .strict import strict_key, strict_types


class HashedKey:
    """A key with its hash, which is computed once.

    Keys whose comparison raises, or returns something other than a truth value, differ.
    """

    __slots__ = ("__weakref__", "_hash", "key")

    def __init__(self, key: Any, hash_: int):
        self.key = key
        self._hash = hash_

    def __eq__(self, other: object) -> bool:
        if type(other) is not HashedKey:
            return False
        try:
            return bool(self.key == other.key)
        except Exception:
            return False

    def __hash__(self) -> int:
        return self._hash


class Interned:
    """The base of what tables hold. Nothing else holds its `HashedKey`, so both die
    together."""

    __slots__ = ("__weakref__", "contents")

    contents: HashedKey


_T = TypeVar("_T", bound=Interned)


class InternTable(Generic[_T]):
    """Maps keys to objects, and holds them weakly."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[HashedKey, weakref.ref[_T]]
        self._known = weakref.WeakKeyDictionary()
        # Reentrant: comparing keys may run user code that interns another object.
        self._lock = threading.RLock()

    def find(
        self, key: Hashable, make: Callable[[], _T], hash_: int | None = None
    ) -> _T:
        """The object of an equal key, or a new one: `make()`.

        `hash_` is for keys that cannot be hashed.

        **Raises:**

        `TypeError` if the key has no hash, and none is given.
        """
        contents = HashedKey(key, hash(key) if hash_ is None else hash_)
        with self._lock:
            known = self._known.get(contents)
            found = known and known()
            if found is None:
                found = make()
                found.contents = contents
                self._known[contents] = weakref.ref(found)
            return found


class CachedType(NamedTuple):
    """How JAX's registry flattens and builds a cached node."""

    flatten: Callable[[Any], tuple[Sequence[Any], Any]]
    unflatten: Callable[[Any, Sequence[Any]], Any]
    # The names of the fields of a node with this aux data, if it may be lazy.
    lazy_fields: Callable[[Any], Sequence[str]]
    # Whether an instance never changes, so that its parent may cache its content.
    is_immutable: bool


cached_types: Final[dict[type, CachedType]] = {}

# The attribute in which a cached node stores its children and its structure.
FLAT: Final = "_flat_"


class StaticLeaf:
    """A static leaf as a node without children. It is its own aux data."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any):
        self.value = value
        self._key: Any = None

    @property
    def key(self) -> Any:
        if self._key is None:
            self._key = strict_key((self.value,))
        return self._key

    def __eq__(self, other: object) -> bool:
        return type(other) is StaticLeaf and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


class UserNode:
    """An output's node that is registered with JAX only, and everything below it."""

    __slots__ = ("_rest", "kind", "statics")

    def __init__(self, treedef: Any, statics: Sequence[StaticLeaf | None]):
        """`statics` has, for each leaf, a `StaticLeaf` or `None` for an array."""
        self.kind = treedef.node_data()[0]
        self._rest = treedef
        self.statics = statics

    def build(self, data: Sequence[Any]) -> Any:
        arrays = iter(data)
        return self._rest.unflatten(
            next(arrays) if x is None else x.value for x in self.statics
        )


strict_types.add(StaticLeaf)


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

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.inner})"


structures: Final[InternTable[Structure]] = InternTable()
