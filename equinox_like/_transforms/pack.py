"""Any pytree as the output of a function that JAX transforms.

JAX lets a function return arrays only. What is none travels in the structure: `pack` makes
a pytree node of the arrays, whose structure holds the rest. So the rest comes back through
every cache of JAX. (The node cannot unflatten to the user's tree by itself: JAX's fast
path is for outputs that flatten to arrays only.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu

from .._tree.filters import is_array
from .._tree.strict import strict_key


class _Structure:
    """A tree without its arrays. Unlike a `Skeleton` it may hold what has no hash."""

    __slots__ = ("few", "leaves", "places", "treedef")

    def __init__(self, treedef, leaves, places):
        self.treedef = treedef
        # All leaves, with `None` for each array, and the indices of the arrays.
        self.leaves = leaves
        self.places = places
        # The others with their indices, if they are so few beside arrays in order that
        # inserting them is cheaper than a step of Python for each array.
        self.few: list[tuple[int, Any]] | None = None
        others = len(leaves) - len(places)
        if others <= max(2, len(places) // 16) and list(places) == sorted(places):
            arrays = set(places)
            self.few = [(i, x) for i, x in enumerate(leaves) if i not in arrays]

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is _Structure
            and self.treedef == other.treedef
            and self.places == other.places
            and strict_key(self.leaves) == strict_key(other.leaves)
        )

    def __hash__(self) -> int:
        return hash((self.treedef, self.places))


class Packed:
    """A node with the arrays of a tree as children."""

    __slots__ = ("data", "structure")

    def __init__(self, structure: _Structure, data: Any):
        self.structure = structure
        self.data = data

    def unpack(self, static: Callable[[Any], Any] | None = None) -> Any:
        """The user's tree; with `static(leaf)` for each leaf that is no array."""
        structure = self.structure
        if structure.few is not None and static is None:
            leaves = list(self.data)
            for i, x in structure.few:
                leaves.insert(i, x)
            return structure.treedef.unflatten(leaves)
        leaves = structure.leaves.copy()
        if static is not None:
            leaves = list(map(static, leaves))
        for i, x in zip(structure.places, self.data, strict=True):
            leaves[i] = x
        return structure.treedef.unflatten(leaves)


class Grouped(Packed):
    """The same with the arrays in several lists, of a structure that is always the same.

    So it can be a prefix tree for an output that is not known yet.
    """

    __slots__ = ("groups", "rest")

    def __init__(self, groups: Sequence[Any], rest: Any):
        self.groups = groups
        self.rest = rest

    @classmethod
    def of(cls, tree: Any, numbers: Sequence[int], count: int) -> "Grouped":
        """`numbers` says for each leaf which of `count` groups it is in if an array."""
        leaves, treedef = jtu.tree_flatten(tree)
        members = [
            [i for i, n in enumerate(numbers) if n == number and is_array(leaves[i])]
            for number in range(count)
        ]
        groups = [[leaves[i] for i in group] for group in members]
        places = tuple(i for group in members for i in group)
        for i in places:
            leaves[i] = None
        return cls(groups, Packed(_Structure(treedef, leaves, places), ()))

    def unpack(self, static: Callable[[Any], Any] | None = None) -> Any:
        data = [x for group in self.groups for x in group]
        return Packed(self.rest.structure, data).unpack(static)


def pack(tree: Any) -> Any:
    """`tree` itself if all its leaves are arrays, else a `Packed` of it."""
    leaves, treedef = jtu.tree_flatten(tree)
    places = tuple(i for i, leaf in enumerate(leaves) if is_array(leaf))
    if len(places) == len(leaves):
        return tree
    data = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None
    return Packed(_Structure(treedef, leaves, places), data)


def unpack(out: Any, static: Callable[[Any], Any] | None = None) -> Any:
    return out.unpack(static) if isinstance(out, Packed) else out


jtu.register_pytree_node(Packed, lambda packed: (packed.data, packed.structure), Packed)
jtu.register_pytree_node(
    Grouped,
    lambda grouped: ((*grouped.groups, grouped.rest), None),
    lambda _, children: Grouped(children[:-1], children[-1]),
)
