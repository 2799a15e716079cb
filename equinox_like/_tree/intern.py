"""The same object for equal values, so that to compare is to look at identity."""

import weakref
from collections.abc import Callable, Hashable


class Contents:
    """By what interned objects are the same. Only such an object keeps it, and its key.

    **Raises:**

    `TypeError` if the key has no hash.
    """

    __slots__ = ("__weakref__", "hash", "key")

    def __init__(self, key: Hashable):
        self.key = key
        self.hash = hash(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contents) and self.key == other.key

    def __hash__(self) -> int:
        return self.hash


class StandIn:
    """What stands for equal values: compared by identity."""

    __slots__ = ("__weakref__", "contents")

    def __reduce__(self):  # with a `PyTreeDef`
        return stand_in, (self.contents.key,)


def stand_in(key: Hashable) -> StandIn:
    """The same object for equal keys. What the key holds may hold the object.

    Two threads at once may get two objects for equal keys.

    **Raises:**

    `TypeError` if the key has no hash.
    """
    contents = Contents(key)
    known = _stand_ins.get(contents)
    found = known and known()
    if found is None:
        found = StandIn()
        found.contents = contents
        _stand_ins[contents] = weakref.ref(found)
    return found


_stand_ins: weakref.WeakKeyDictionary[Contents, weakref.ref[StandIn]]
_stand_ins = weakref.WeakKeyDictionary()


def interner() -> Callable[[Hashable], StandIn]:
    """A `stand_in` of its own, quicker; it keeps the key for as long as the object is."""
    known: weakref.WeakValueDictionary[Hashable, StandIn]
    known = weakref.WeakValueDictionary()

    def stand_in(key: Hashable) -> StandIn:
        found = known.get(key)
        return known.setdefault(key, StandIn()) if found is None else found

    return stand_in
