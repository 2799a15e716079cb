"""`Place`: an index of an array, of which some items are known only at run time."""

import dataclasses
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._tree.filters import is_array


@dataclasses.dataclass(frozen=True)
class Place:
    """The static part of an index, which is hashable.

    The arrays of the index are passed to each method, in order.
    """

    # A tree, because a `jax.ds` is a node with arrays below it.
    treedef: Any
    leaves: tuple[Any, ...]
    # Keyword arguments of `x.at[index].get` or `.set`.
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, index: Any, options: dict[str, Any]) -> tuple["Place", list[Any]]:
        items = index if isinstance(index, tuple) else (index,)
        leaves, treedef = jtu.tree_flatten(tuple(map(_as_node, items)))
        arrays = [x for x in leaves if is_array(x)]
        static = tuple(_Array if is_array(x) else x for x in leaves)
        return cls(treedef, static, tuple(sorted(options.items()))), arrays

    def read(self, x: Any, *arrays: Any) -> Any:
        return x.at[self._index(arrays)].get(**dict(self.options))

    def add_read(self, x: Any, value: Any, *arrays: Any) -> Any:
        """The transpose of `read`: adds the cotangent `value` where `read` reads."""
        options = {"mode": "clip"} | self._without("fill_value")
        return x.at[self._index(arrays)].add(value, **options)

    def write(self, x: Any, value: Any, *arrays: Any) -> Any:
        return x.at[self._index(arrays)].set(value, **dict(self.options))

    def written(self, x: Any, *arrays: Any) -> Any:
        """The old values where `write` writes, with zeros for indices out of bounds."""
        options = {"mode": "fill", "fill_value": 0} | self._without()
        return x.at[self._index(arrays)].get(**options)

    def _without(self, *names: str) -> dict[str, Any]:
        return {k: v for k, v in self.options if k not in names and v is not None}

    def _index(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        given = iter(arrays)
        leaves = [next(given) if x is _Array else x for x in self.leaves]
        items = self.treedef.unflatten(leaves)
        return tuple(slice(*x) if isinstance(x, _Slice) else x for x in items)


class _Slice(NamedTuple):
    """A slice as a node. JAX says why its bounds may not be arrays."""

    start: Any
    stop: Any
    step: Any


class _Array:
    """A placeholder for an array of the index."""


def _as_node(item: Any) -> Any:
    if isinstance(item, slice):
        return _Slice(item.start, item.stop, item.step)
    return item
