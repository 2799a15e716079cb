"""Any pytree as the output of a function that JAX transforms.

JAX lets a function return arrays only. What is none travels in the structure: `pack` makes
a pytree node of the arrays, whose structure holds the rest. So the rest comes back through
every cache of JAX. (The node cannot unflatten to the user's tree by itself: JAX's fast
path is for outputs that flatten to arrays only.)
"""

from typing import Any

import jax.tree_util as jtu

from .parts import Rest, take_apart


class Packed:
    """A node with the arrays of a tree as children."""

    __slots__ = ("data", "rest")

    def __init__(self, rest: Rest, data: Any):
        self.rest = rest
        self.data = data

    def unpack(self) -> Any:
        return self.rest.fill(self.data)


def pack(tree: Any) -> Any:
    """`tree` itself if all its leaves are arrays, else a `Packed` of it."""
    data, rest = take_apart(tree)
    return tree if len(data) == len(rest.leaves) else Packed(rest, data)


def unpack(out: Any) -> Any:
    return out.unpack() if isinstance(out, Packed) else out


jtu.register_pytree_node(Packed, lambda packed: (packed.data, packed.rest), Packed)
