"""`Place`: an index of an array, of which some items are known only at run time."""

import dataclasses
from typing import Any

from .._tree.filters import is_array


@dataclasses.dataclass(frozen=True)
class Place:
    """The static part of an index, which is hashable.

    The arrays of the index are passed to each method, in order.
    """

    items: tuple[Any, ...]
    # Keyword arguments of `x.at[index].get` or `.set`.
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, index: Any, options: dict[str, Any]) -> tuple["Place", list[Any]]:
        items = index if isinstance(index, tuple) else (index,)
        arrays = [item for item in items if is_array(item)]
        return cls(tuple(map(_hashable, items)), tuple(sorted(options.items()))), arrays

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
        return tuple(_item(item, given) for item in self.items)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A hashable slice. Python 3.11 cannot hash `slice`."""

    start: Any
    stop: Any
    step: Any


class _Array:
    """A placeholder for an array of the index."""


def _hashable(item: Any) -> Any:
    if is_array(item):
        return _Array
    if isinstance(item, slice):
        return _Slice(item.start, item.stop, item.step)
    return item


def _item(item: Any, arrays: Any) -> Any:
    if item is _Array:
        return next(arrays)
    if isinstance(item, _Slice):
        return slice(item.start, item.stop, item.step)
    return item
