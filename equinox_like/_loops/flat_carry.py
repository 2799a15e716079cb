"""The carry of the internal loops: arrays only, some of which may be buffers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from .._core.difference import tree_differences
from .._tree.filters import is_array, is_number
from .._tree.nodes import describe_node, path_str
from .._tree.partitioning import map_nodes
from .buffers import Buffer, is_buffer
from .carry import type_of


def arrays_of(tree: Any, name: str) -> Any:
    """The tree, with numbers and NumPy arrays converted to JAX arrays.

    **Raises:**

    `TypeError` for any other leaf, naming its path, which starts with `name`.
    """
    return jtu.tree_map_with_path(
        lambda path, x: _as_array(x, path_str(path, name)), tree
    )


def _as_array(x: Any, path: str) -> Any:
    if is_array(x) or is_number(x):
        return jnp.asarray(x)
    raise TypeError(
        f"`{path}` is {describe_node(x)}: the carry of this loop must hold only arrays "
        "and numbers. `filter_while_loop` and `filter_scan` take any tree."
    )


class FlatCarry:
    """A tree of arrays, flattened for a loop.

    The loop sees the arrays of each leaf. A leaf that is a buffer of an outer loop has
    more than one: its array and its bools.
    """

    def __init__(self, carry: Any, buffers: Callable[[Any], Any] | None, where: str):
        self._where = where
        self._leaves, self._treedef = jtu.tree_flatten(carry, is_buffer)
        self._whole = jtu.tree_structure(carry)  # also of the buffers of outer loops
        self._named = self._find(buffers)
        self.data: list[Any] = []
        self.is_buffer: list[bool] = []
        for i, leaf in enumerate(self._leaves):
            arrays = jtu.tree_leaves(leaf)
            self.data += arrays
            self.is_buffer += [i in self._named, *([False] * (len(arrays) - 1))]

    def _find(self, buffers: Callable[[Any], Any] | None) -> set[int]:
        """The indices of the leaves that `buffers` selects."""
        if buffers is None:
            return set()
        marks = [_Mark(i) for i in range(len(self._leaves))]
        named = jtu.tree_leaves(buffers(self._treedef.unflatten(marks)))
        if not all(isinstance(mark, _Mark) for mark in named):
            raise ValueError(
                f"{self._where}: Only arrays can be buffers. `buffers` must return a node "
                "of the carry, or a sequence of them."
            )
        return {mark.place for mark in named}

    def fill(self, pred: Any, data: Sequence[Any]) -> Any:
        """The carry for the user's functions, with buffers."""
        leaves = [
            Buffer(x, pred) if i in self._named else x
            for i, x in enumerate(jtu.tree_leaves(self.refill(data), is_buffer))
        ]
        return self._treedef.unflatten(leaves)

    def refill(self, data: Sequence[Any]) -> Any:
        """The carry with arrays in place of this loop's buffers."""
        return self._whole.unflatten(data)

    def flatten(self, out: Any) -> list[Any]:
        """The arrays of the carry that a step returned.

        **Raises:**

        `ValueError` if the structure or the type of an array has changed.
        """
        leaves, treedef = jtu.tree_flatten(out, is_buffer)
        leaves = [jnp.asarray(x) if is_number(x) else x for x in leaves]
        unwrapped = [
            _unwrapped(x) if i in self._named else x for i, x in enumerate(leaves)
        ]
        if treedef == self._treedef and all(
            _same_type(x, y) for x, y in zip(self._leaves, unwrapped, strict=True)
        ):
            return [x for leaf in unwrapped for x in jtu.tree_leaves(leaf)]
        raise self._mismatch(treedef.unflatten(leaves))

    def _mismatch(self, out: Any) -> ValueError:
        before = self.fill(None, self.data)
        after = map_nodes(lambda x: Buffer(x._array, None), out, is_buffer)
        found = tree_differences("carry", before, after, is_array, type_of)
        lines = "".join(f"\n- {difference}" for difference in found)
        return ValueError(
            f"{self._where} must have the same input and output structure, except for "
            f"the values of arrays:{lines}"
        )


class _Mark:
    """A placeholder for a leaf, for `buffers` to select."""

    def __init__(self, place: int):
        self.place = place


def _unwrapped(x: Any) -> Any:
    return x._array if isinstance(x, Buffer) else None


def _same_type(before: Any, after: Any) -> bool:
    if isinstance(before, Buffer):
        return isinstance(after, Buffer) and jtu.tree_all(
            jtu.tree_map(_same_type, before._array, after._array)
        )
    return is_array(after) and _comparable(before) == _comparable(after)


def _comparable(x: Any) -> str:
    # Without the axes over which it varies: `stage` adds those of a step to the carry.
    return type_of(x).partition("{V:")[0]
