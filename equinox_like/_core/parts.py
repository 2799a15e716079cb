"""A tree taken apart for the length of one call: the data that JAX gets, and the rest.

    data, rest = take_apart(tree, is_data)
    rest.fill(data)   # the tree again
    rest.alone(data)  # the data in their places, and `None` for everything else

This is `split` without its demands: leaves that are not data need no hash, since none
of our caches depends on them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._tree.filters import is_array
from .._tree.nodes import describe_node
from .._tree.strict import strict_key, strict_treedef
from .base import name_of


class Rest:
    """A tree without its data. Two are equal if that is so by the strict rule."""

    __slots__ = ("few", "leaves", "places", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Any], places: Sequence[int]):
        self.treedef = treedef
        # All leaves, with `None` for the data, and the indices of the data.
        self.leaves = list(leaves)
        self.places = tuple(places)
        for i in places:
            self.leaves[i] = None
        self.few: Any = None  # not known yet

    def fill(
        self, data: Sequence[Any], static: Callable[[Any], Any] | None = None
    ) -> Any:
        """The tree, with `data` where its data were, and `static(leaf)` for the others."""
        leaves = (
            self.leaves.copy() if static is None else list(map(static, self.leaves))
        )
        return self._put(leaves, data)

    def refill(self, data: Sequence[Any]) -> Any:
        """As `fill(data)`, quicker if it is done again and again."""
        if self.few is None:
            self.few = self._find_few()
        if self.few is False:
            return self.fill(data)
        leaves = list(data)
        for i, x in self.few:
            leaves.insert(i, x)
        return self.treedef.unflatten(leaves)

    def _find_few(self) -> list[tuple[int, Any]] | bool:
        """The leaves that are not data, with their indices, if they are so few beside
        data in order that inserting them is cheaper than a step of Python for each
        datum."""
        others = len(self.leaves) - len(self.places)
        if others > max(2, len(self.places) // 16) or list(self.places) != sorted(
            self.places
        ):
            return False
        data = set(self.places)
        return [(i, x) for i, x in enumerate(self.leaves) if i not in data]

    def alone(self, data: Sequence[Any]) -> Any:
        """Nothing but `data`: a tree of the same structure with `None` elsewhere."""
        return self._put([None] * len(self.leaves), data)

    def _put(self, leaves: list[Any], data: Sequence[Any]) -> Any:
        for i, x in zip(self.places, data, strict=True):
            leaves[i] = x
        return self.treedef.unflatten(leaves)

    def has_places_of(self, other: "Rest") -> bool:
        """Whether structure and places of the data are the same."""
        return self.places == other.places and (
            self.treedef is other.treedef
            or strict_treedef(self.treedef) == strict_treedef(other.treedef)
        )

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is Rest
            and self.has_places_of(other)
            and strict_key(self.leaves) == strict_key(other.leaves)
        )

    def __hash__(self) -> int:
        return hash((self.treedef, self.places))


def take_apart(
    tree: Any, is_data: Callable[[Any], bool] = is_array
) -> tuple[list[Any], Rest]:
    """The leaves that are data, and what is left of the tree without them."""
    leaves, treedef = jtu.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_data(leaf)]
    return [leaves[i] for i in places], Rest(treedef, leaves, places)


def take_apart_like(tree: Any, like: Rest) -> tuple[list[Any], Rest]:
    """The same, with an array for a Python number where `like` lacks one, as JAX has it."""
    leaves, treedef = jtu.tree_flatten(tree)
    if treedef == like.treedef:
        for i in like.places:
            if is_number(leaves[i]):
                leaves[i] = jnp.asarray(leaves[i])
    return take_apart(treedef.unflatten(leaves))


def is_number(x: Any) -> bool:
    return isinstance(x, bool | int | float | complex)


def is_array_or_struct(x: Any) -> bool:
    """Whether `x` is an array, or has the shape and dtype of one."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def as_arrays(data: Sequence[Any]) -> list[Any]:
    """Python numbers as arrays.

    JAX hands the number itself to a rule if that is what the user differentiates at.
    """
    return [x if is_array(x) else jnp.asarray(x) for x in data]


def value_and_aux(fun: Any, out: Any) -> tuple[Any, Any]:
    """What a function returned that was wrapped with `has_aux=True`."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    raise TypeError(
        f"`{name_of(fun)}` must return a pair `(value, aux)`, because of "
        f"`has_aux=True`; it returned {describe_node(out)}."
    )
