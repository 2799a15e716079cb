"""The static side of a cached node: the node without its arrays.

A cached node, such as a Module, is one node in our registry (`registry.py`). Its children
are all arrays anywhere below it, and its aux data is a `Structure`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from .intern import Interned, InternTable
from .strict import strict_key, strict_types


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


class Fixed:
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
        return type(other) is Fixed and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


class Foreign:
    """An output's node that is registered with JAX only, and everything below it."""

    __slots__ = ("_rest", "kind", "statics")

    def __init__(self, treedef: Any, statics: Sequence[Fixed | None]):
        """`statics` has, for each leaf, a `Fixed` or `None` for an array."""
        self.kind = treedef.node_data()[0]
        self._rest = treedef
        self.statics = statics

    def build(self, data: Sequence[Any]) -> Any:
        arrays = iter(data)
        return self._rest.unflatten(
            next(arrays) if x is None else x.value for x in self.statics
        )


strict_types.add(Fixed)


class Open:
    """In `Structure.inner`, a node around a child that can be any pytree, not an
    array."""


class Structure(Interned):
    """A cached node without its children.

    Structures of nodes that users have built are interned: equal ones are the same
    object. Structures of outputs are not interned, since nodes are built from them,
    which must have the identical static values that the function returned.

    **Attributes:**

    - `kind`, `aux`: type and aux data of the node, as JAX's registry has them.
    - `inner`: the tuple of the node's own children, as a treedef of our registry. Its
        leaves are the children in our registry.
    - `fields`: the names of the attributes of a lazy instance once it is built.
    - `can_wait`: whether building such a node runs no user code.
    - `is_lazy`: whether instances are lazy: it can wait, and there are fields.
    - `is_closed`: whether nothing in it can be changed in place once it is built.
    - `canonical`: the interned structure of the same node once it is built. `None` if
        this structure is interned.
    - `programs`: the compiled programs of callables with this structure.
    """

    __slots__ = (
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
        """The node from its children. Cached nodes below it are lazy in turn."""
        unflatten = cached_types[self.kind].unflatten
        return unflatten(self.aux, self.inner.unflatten(children))

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.inner})"


structures: Final[InternTable[Structure]] = InternTable()
