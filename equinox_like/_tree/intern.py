"""Interning: one object for equal values, so that they are compared by identity."""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar


class Contents:
    """A key with its hash, which is computed once.

    Keys whose comparison raises, or returns something other than a truth value, differ.
    """

    __slots__ = ("__weakref__", "_hash", "key")

    def __init__(self, key: Any, hash_: int):
        self.key = key
        self._hash = hash_

    def __eq__(self, other: object) -> bool:
        if type(other) is not Contents:
            return False
        try:
            return bool(self.key == other.key)
        except Exception:
            return False

    def __hash__(self) -> int:
        return self._hash


class Interned:
    """The base of what tables hold. Nothing else holds its `Contents`, so both die
    together."""

    __slots__ = ("__weakref__", "contents")

    contents: Contents


_T = TypeVar("_T", bound=Interned)


class InternTable(Generic[_T]):
    """Maps keys to objects, and holds them weakly."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Contents, weakref.ref[_T]]
        self._known = weakref.WeakKeyDictionary()
        # Reentrant: comparing keys may run user code that interns another object.
        self._lock = threading.RLock()

    def find(
        self, key: Hashable, make: Callable[[], _T], hash_: int | None = None
    ) -> _T:
        """The object of an equal key, or a new one: `make()`.

        `hash_` is for keys that cannot be hashed.

        **Raises:**

        `TypeError` if the key has no hash, and none is given.
        """
        contents = Contents(key, hash(key) if hash_ is None else hash_)
        with self._lock:
            known = self._known.get(contents)
            found = known and known()
            if found is None:
                found = make()
                found.contents = contents
                self._known[contents] = weakref.ref(found)
            return found
