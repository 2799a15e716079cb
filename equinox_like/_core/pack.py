"""Any pytree as the output of a function that JAX transforms.

JAX lets a function return arrays only. Other leaves are part of the structure: `pack`
makes a pytree node of the arrays, whose structure holds the rest. So the rest comes
back through every cache of JAX. (The node cannot unflatten to the user's tree by
itself: JAX's fast path is for outputs that flatten to arrays only.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu

from .._tree.filters import is_array
from .parts import Rest, take_apart


class Packed:
    """A node with the arrays of a tree as children."""

    __slots__ = ("data", "rest")

    def __init__(self, rest: Rest, data: Any):
        self.rest = rest
        self.data = data

    def unpack(self, static: Callable[[Any], Any] | None = None) -> Any:
        """The user's tree; with `static(leaf)` for each leaf that is not an array."""
        if static is None:
            return self.rest.refill(self.data)
        return self.rest.fill(self.data, static)


class Grouped(Packed):
    """The same with the arrays in several lists, of a structure that is always the same.

    So it can be a prefix tree for an output that is not known yet.
    """

    __slots__ = ("groups", "packed")

    def __init__(self, groups: Sequence[Any], packed: Any):
        self.groups = groups
        # All but the arrays, as a child of its own.
        self.packed = packed

    @classmethod
    def of(cls, tree: Any, numbers: Sequence[int], count: int) -> "Grouped":
        """`numbers` says for each leaf which of `count` groups it is in if an array."""
        leaves, treedef = jtu.tree_flatten(tree)
        members = [
            [i for i, n in enumerate(numbers) if n == number and is_array(leaves[i])]
            for number in range(count)
        ]
        groups = [[leaves[i] for i in group] for group in members]
        rest = Rest(treedef, leaves, [i for group in members for i in group])
        return cls(groups, Packed(rest, ()))

    def unpack(self, static: Callable[[Any], Any] | None = None) -> Any:
        data = [x for group in self.groups for x in group]
        return Packed(self.packed.rest, data).unpack(static)


def pack(tree: Any) -> Any:
    """`tree` itself if all its leaves are arrays, else a `Packed` of it."""
    data, rest = take_apart(tree)
    return tree if len(data) == len(rest.leaves) else Packed(rest, data)


def unpack(out: Any, static: Callable[[Any], Any] | None = None) -> Any:
    return out.unpack(static) if isinstance(out, Packed) else out


jtu.register_pytree_node(Packed, lambda packed: (packed.data, packed.rest), Packed)
jtu.register_pytree_node(
    Grouped,
    lambda grouped: ((*grouped.groups, grouped.packed), None),
    lambda _, children: Grouped(children[:-1], children[-1]),
)
