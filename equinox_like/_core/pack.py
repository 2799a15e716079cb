"""`pack` lets a function that JAX transforms return any pytree.

JAX lets a function return arrays only. `pack` makes a pytree node whose children are
the arrays, and whose auxiliary data holds all other leaves. So JAX's caches return the
other leaves, too. (The node cannot unflatten directly to the user's tree, because JAX's
fast path needs outputs that flatten to arrays only.)
"""

from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu

from .._tree.filters import is_array
from .parts import Rest, take_apart


class Packed:
    """A pytree node with the arrays of a tree as children."""

    __slots__ = ("data", "rest")

    def __init__(self, rest: Rest, data: Any):
        self.rest = rest
        self.data = data

    def unpack(self) -> Any:
        """The user's tree."""
        return self.rest.fill(self.data)


class Grouped:
    """As `Packed`, with the arrays in several lists, always in the same structure.

    So a prefix tree can be written for it before the output is known.
    """

    __slots__ = ("groups", "packed")

    def __init__(self, groups: Sequence[Any], packed: Any):
        self.groups = groups
        # A `Packed` without arrays: the rest of the tree, as a child.
        self.packed = packed

    @classmethod
    def of(cls, tree: Any, numbers: Sequence[int], count: int) -> "Grouped":
        """Puts the arrays into `count` groups. `numbers` has the group of each leaf."""
        leaves, treedef = jtu.tree_flatten(tree)
        members = [
            [i for i, n in enumerate(numbers) if n == number and is_array(leaves[i])]
            for number in range(count)
        ]
        groups = [[leaves[i] for i in group] for group in members]
        rest = Rest(treedef, leaves, [i for group in members for i in group])
        return cls(groups, Packed(rest, ()))

    def unpack(self) -> Any:
        """The user's tree."""
        return self.packed.rest.fill([x for group in self.groups for x in group])


def pack(tree: Any) -> Any:
    """`tree` itself if all its leaves are arrays, else a `Packed` of it."""
    data, rest = take_apart(tree)
    return tree if len(data) == len(rest.leaves) else Packed(rest, data)


def unpack(out: Any) -> Any:
    return out.unpack() if isinstance(out, (Packed, Grouped)) else out


jtu.register_pytree_node(Packed, lambda packed: (packed.data, packed.rest), Packed)
jtu.register_pytree_node(
    Grouped,
    lambda grouped: ((*grouped.groups, grouped.packed), None),
    lambda _, children: Grouped(children[:-1], children[-1]),
)
