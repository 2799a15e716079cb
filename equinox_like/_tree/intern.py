"""The same object for equal values, so that to compare is to look at identity."""

import weakref


class Contents:
    """By what interned objects are the same. Only such an object keeps it, and its key."""

    __slots__ = ("__weakref__", "hash", "key")

    def __init__(self, key: object, hash: int):
        self.key = key
        self.hash = hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contents) and self.key == other.key

    def __hash__(self) -> int:
        return self.hash


class StandIn:
    """What `stand_in` returns: compared by identity."""

    __slots__ = ("__weakref__", "contents")

    def __init__(self, contents: Contents | None):
        self.contents = contents


def stand_in(*key: object) -> StandIn:
    """The same object for equal keys, hashable or not; one of its own if it cannot tell.

    Two threads at once may get two objects for equal keys.
    """
    contents = Contents(key, _hash(key))
    try:
        known = _stand_ins.get(contents)
    except Exception:
        return StandIn(None)
    found = known and known()
    if found is None:
        found = StandIn(contents)
        _stand_ins[contents] = weakref.ref(found)
    return found


def _hash(value: object) -> int:
    try:
        return hash(value)
    except Exception:
        if isinstance(value, tuple):
            return hash(tuple(map(_hash, value)))
        return hash(type(value))


_stand_ins: weakref.WeakKeyDictionary[Contents, weakref.ref[StandIn]]
_stand_ins = weakref.WeakKeyDictionary()
