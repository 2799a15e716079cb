"""How `filter_jit` flattens its arguments, and builds its outputs.

It uses a registry of our own (`_compat/registry.py`). In it, cached nodes store their
flattened form, and are built lazily:

    leaves, structure = registry.flatten(tree)
    registry.adopt(nodes)                   # if it registers new types, flatten again
    registry.expand(structure)              # what each leaf of JAX's registry is here
    arrays, build = registry.describe_output(tree)
    build(arrays)                           # the tree, with lazy nodes

A node that may be changed in place (a list, a dict, a node of a user's type) is
flattened in each call. Types that users register with JAX are registered here when they
first occur.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._compat.registry import new_registry
from .._environment import REGISTRY
from .filters import is_array
from .own_registry import OwnRegistry
from .strict import strict_treedef
from .structure import CachedType, StaticLeaf, cached_types


class PublicRegistry:
    """As `OwnRegistry`, but uses JAX's registry, node by node; nothing is lazy."""

    def __init__(self) -> None:
        self.flatten = jtu.tree_flatten

    def register_cached(self, kind: type) -> None:
        pass

    def strict_treedef(self, treedef: Any) -> Any:
        return strict_treedef(treedef)

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
        data = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        statics = [None if is_array(leaf) else StaticLeaf(leaf) for leaf in leaves]

        def build(arrays):
            filled = [s and s.value for s in statics]
            for i, x in zip(data, arrays, strict=True):
                filled[i] = x
            return treedef.unflatten(filled)

        return [leaves[i] for i in data], build


def _find() -> Any:
    nodes = new_registry() if REGISTRY == "own" else None
    return PublicRegistry() if nodes is None else OwnRegistry(nodes)


registry: Final[Any] = _find()


def register_cached(
    kind: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    lazy_fields: Callable[[Any], Sequence[str]],
    is_immutable: bool = True,
) -> None:
    """Lets instances of `kind`, a node of JAX's registry, cache their flattened form.

    `kind` derives from `Cached`. `flatten` and `unflatten` are its functions for JAX's
    registry. `lazy_fields(aux)` gives the field names of an instance with this aux
    data, or nothing if some field has no `Attribute` on the class.
    """
    cached_types[kind] = CachedType(flatten, unflatten, lazy_fields, is_immutable)
    registry.register_cached(kind)
