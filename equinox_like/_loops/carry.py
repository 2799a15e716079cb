"""The carry of a loop, any pytree: its arrays may change, and static leaves stay.

JAX gets a flat list of arrays. Its errors name leaves by number; errors here name their
paths. A Python number that a step changes becomes an array from the start, as in JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.axes import varying_axes
from .._core.base import name_of
from .._core.difference import tree_differences
from .._core.flat_call import take_apart, take_apart_like
from .._tree.filters import is_array, is_number
from .._tree.nodes import describe_node, path_str
from .._tree.partitioning import map_nodes
from .._tree.strict import strictly_same
from .buffers import Buffer, is_buffer


def with_carry(loop: str, fun: Any, init: Any, run: Callable[["Carry"], Any]) -> Any:
    """`run(carry)`; runs again with arrays for the numbers that a step changes."""
    while True:
        carry, out = Carry(init, loop, fun), None
        try:
            out = run(carry)
        except Exception as e:
            if not carry.numbers_change:
                if isinstance(e, TypeError):
                    carry.raise_changed_type(e)
                raise
        if not carry.numbers_change:
            return out
        # The arrays are made outside the trace of a step. An array made within it may
        # become an argument of the compiled program, which the second call lacks.
        init = carry.with_arrays()


class Carry:
    """The initial carry of a loop, split into arrays and the rest."""

    def __init__(self, init: Any, loop: str, fun: Any):
        self.init = init
        # For each leaf, whether it is a Python number that a step has changed.
        self._number_changes: list[bool] = []
        self._where = f"`{loop}` of `{name_of(fun)}`"
        self._changed: str | None = None
        self.data, self._template = take_apart(init)
        self.is_buffer = [False] * len(self.data)

    def fill(self, data: Sequence[Any], pred: Any = None) -> Any:
        """The carry for the user's functions."""
        # A new step is traced, so drop what the last one has changed.
        self._changed = None
        return self._template.fill(data)

    whole = fill

    def step(self, before: Sequence[Any], carry: Any) -> Any:
        """The arrays of the carry that a step returned; `before` are its input arrays.

        `None` if the step has changed a Python number. JAX refuses that after the trace
        of the step. An exception within the trace would leak: JAX keeps a trace that
        was not completed, and all arrays that the step closes over.

        **Raises:**

        `TypeError` if the structure or another static leaf has changed.
        """
        data, template = take_apart_like(carry, self._template)
        if template != self._template:
            self._number_changes = self._changed_numbers(carry)
            if self.numbers_change:
                return None
            numbers = {
                path_str(path, "carry")
                for path, x in jtu.tree_leaves_with_path(self.init)
                if is_number(x)
            }
            found = tree_differences("carry", self.init, carry)
            # The first that is not of a number: these may change with a step.
            difference = min(found, key=lambda d: d.path in numbers, default=None)
            raise TypeError(
                f"{self._where}: only the arrays of the carry may change from step to "
                f"step. {difference or 'Its structure changed.'} Each step must return "
                "the structure of the initial carry, and a value that it computes must "
                "be an array from the start."
            )
        self._changed = self._change(before, data)
        return data

    @property
    def numbers_change(self) -> bool:
        """Whether a step has changed a Python number. The loop must then not run."""
        return any(self._number_changes)

    def with_arrays(self) -> Any:
        """The initial carry with arrays for the numbers that a step has changed."""
        leaves, treedef = jtu.tree_flatten(self.init)
        return treedef.unflatten(
            jnp.asarray(x) if changes else x
            for x, changes in zip(leaves, self._number_changes, strict=True)
        )

    def _changed_numbers(self, carry: Any) -> list[bool]:
        """For each leaf, whether it is a number that differs in `carry`."""
        before, treedef = jtu.tree_flatten(self.init)
        after, other = jtu.tree_flatten(carry)
        if treedef != other:
            return []
        return [
            is_number(x) and (is_array(y) or is_number(y)) and not strictly_same(x, y)
            for x, y in zip(before, after, strict=True)
        ]

    def raise_changed_type(self, error: TypeError) -> None:
        """Raises an error with the path, if JAX's `error` is for a changed array type.

        The check is left to JAX, because it converts arrays of a weak type.
        """
        if self._changed is not None:
            raise TypeError(
                f"{self._where}: each array of the carry must keep its shape and dtype. "
                f"{self._changed}"
            ) from error

    def _change(self, before: Sequence[Any], after: Sequence[Any]) -> str | None:
        types = [*zip(map(jax_type, before), map(jax_type, after), strict=True)]
        if all(old == new for old, new in types):
            return None
        paths = [
            path for path, x in jtu.tree_leaves_with_path(self.init) if is_array(x)
        ]
        pairs = zip(before, after, strict=True)
        return " ".join(
            f"`{path_str(path, 'carry')}` was {old}, and is now {new}.{_how_to_keep(*pair)}"
            for path, (old, new), pair in zip(paths, types, pairs, strict=True)
            if old != new
        )


def _how_to_keep(before: Any, after: Any) -> str:
    """How to keep the type of an array of the carry, if it changes only in the mesh."""
    old, new = jax.typeof(before), jax.typeof(after)
    axes = varying_axes(new) - varying_axes(old)
    if not axes:
        same_shape = (old.shape, old.dtype) == (new.shape, new.dtype)
        if not same_shape or old.sharding.spec == new.sharding.spec:
            return ""
        return (
            " A step splits it over the mesh in another way: return "
            f"`jax.sharding.reshard(x, {old.sharding.spec})`."
        )
    names = tuple(sorted(map(str, axes)))
    return (
        f" It varies over the axes {names} of the mesh after a step: mark its initial "
        f"value `x` as varying, by `jax.lax.pcast(x, {names}, to='varying')`."
    )


def jax_type(x: Any) -> str:
    """JAX's type of an array as text, without `~` for a weak type, which may change."""
    return str(jax.typeof(x)).lstrip("~")


def arrays_of(tree: Any, name: str) -> Any:
    """The tree, with numbers and NumPy arrays converted to JAX arrays.

    **Raises:**

    `TypeError` for any other leaf, naming its path, which starts with `name`.
    """

    def as_array(path, x):
        if is_array(x) or is_number(x):
            return jnp.asarray(x)
        raise TypeError(
            f"`{path_str(path, name)}` is {describe_node(x)}: the carry of this loop must "
            "hold only arrays and numbers. `filter_while_loop` and `filter_scan` take any "
            "tree."
        )

    return jtu.tree_map_with_path(as_array, tree)


class BufferCarry:
    """A carry of arrays only, some of which are buffers for the user's functions.

    The loop sees the arrays of each leaf. A leaf that is a buffer of an outer loop has
    more than one: its array and its bools.
    """

    numbers_change = False

    def __init__(self, init: Any, buffers: Callable[[Any], Any] | None, where: str):
        self.init = init
        self._where = where
        self._leaves, self._treedef = jtu.tree_flatten(init, is_buffer)
        self._named = self._find(buffers)
        # Also of the buffers of outer loops.
        self.data, whole = jtu.tree_flatten(init)
        self.whole: Callable[[Any], Any] = whole.unflatten
        """The carry with arrays in place of this loop's buffers."""
        self.is_buffer: list[bool] = []
        for i, leaf in enumerate(self._leaves):
            self.is_buffer += [i in self._named]
            self.is_buffer += [False] * (len(jtu.tree_leaves(leaf)) - 1)

    def _find(self, buffers: Callable[[Any], Any] | None) -> set[int]:
        """The indices of the leaves that `buffers` selects."""
        if buffers is None:
            return set()
        placeholders = [_Placeholder(i) for i in range(len(self._leaves))]
        named = jtu.tree_leaves(buffers(self._treedef.unflatten(placeholders)))
        if not all(isinstance(x, _Placeholder) for x in named):
            raise ValueError(
                f"{self._where}: Only arrays can be buffers. `buffers` must return a node "
                "of the carry, or a sequence of them."
            )
        return {x.place for x in named}

    def fill(self, data: Sequence[Any], pred: Any = None) -> Any:
        """The carry for the user's functions, with buffers."""
        leaves = jtu.tree_leaves(self.whole(data), is_buffer)
        return self._treedef.unflatten(
            Buffer(x, pred) if i in self._named else x for i, x in enumerate(leaves)
        )

    def step(self, before: Sequence[Any], out: Any) -> list[Any]:
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
            return jtu.tree_leaves(unwrapped)
        after = treedef.unflatten(leaves)
        after = map_nodes(lambda x: Buffer(x._array, None), after, is_buffer)
        old = self.fill(self.data)
        found = tree_differences("carry", old, after, is_array, jax_type)
        lines = "".join(f"\n- {difference}" for difference in found)
        raise ValueError(
            f"{self._where} must have the same input and output structure, except for "
            f"the values of arrays:{lines}"
        )


class _Placeholder:
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
    return jax_type(x).partition("{V:")[0]
