"""Takes a tree apart for one call: into the data leaves, which JAX gets, and the rest.

    data, rest = take_apart(tree, is_data)
    rest.fill(data)   # the tree again
    rest.alone(data)  # the tree with `None` for all other leaves

Unlike in `split`, leaves that are not data need not be hashable, since none of our
caches depends on them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._tree.filters import is_array, is_number
from .._tree.nodes import describe_node
from .._tree.strict import strict_key, strict_treedef
from .base import name_of


class Rest:
    """A tree without its data leaves. `==` compares static leaves by `strict_key`."""

    __slots__ = ("leaves", "places", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Any], places: Sequence[int]):
        self.treedef = treedef
        # All leaves, with `None` for the data; `places` are the indices of the data.
        self.leaves = list(leaves)
        self.places = tuple(places)
        for i in places:
            self.leaves[i] = None

    def fill(
        self, data: Sequence[Any], static: Callable[[Any], Any] | None = None
    ) -> Any:
        """The tree with these data leaves, and `static(leaf)` for each other leaf."""
        leaves = (
            self.leaves.copy() if static is None else list(map(static, self.leaves))
        )
        return self._put(leaves, data)

    def alone(self, data: Sequence[Any]) -> Any:
        """The tree with these data leaves, and `None` for each other leaf."""
        return self._put([None] * len(self.leaves), data)

    def _put(self, leaves: list[Any], data: Sequence[Any]) -> Any:
        for i, x in zip(self.places, data, strict=True):
            leaves[i] = x
        return self.treedef.unflatten(leaves)

    def has_places_of(self, other: "Rest") -> bool:
        """Whether the structure, and the places of the data, are the same."""
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
    """The data leaves, and the tree without them."""
    leaves, treedef = jtu.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_data(leaf)]
    return [leaves[i] for i in places], Rest(treedef, leaves, places)


def take_apart_like(tree: Any, like: Rest) -> tuple[list[Any], Rest]:
    """As `take_apart`, but Python numbers become arrays where `like` has data."""
    leaves, treedef = jtu.tree_flatten(tree)
    if treedef == like.treedef:
        for i in like.places:
            if is_number(leaves[i]):
                leaves[i] = jnp.asarray(leaves[i])
    return take_apart(treedef.unflatten(leaves))


def as_arrays(data: Sequence[Any]) -> list[Any]:
    """Python numbers and NumPy arrays as JAX arrays.

    JAX passes them to a rule as they are, if the user gave them as the primal. A rule would
    then compute in other dtypes than the function: NumPy makes bfloat16 times 2.0 float32.
    """
    # Unlike `jnp.asarray`, `device_put` is not refused by `jax.transfer_guard`.
    return [x if isinstance(x, jax.Array) else jax.device_put(x) for x in data]


def pair_of(returned: Any, function: str, pair: str) -> tuple[Any, Any]:
    """The two values that a user's function returned; `TypeError` for anything else."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return returned[0], returned[1]
    raise TypeError(
        f"{function} must return a pair `{pair}`; it returned {describe_node(returned)}."
    )


def value_and_aux(fun: Any, out: Any) -> tuple[Any, Any]:
    """The pair that `fun` must return under `has_aux=True`."""
    return pair_of(out, f"With `has_aux=True`, `{name_of(fun)}`", "(value, aux)")
