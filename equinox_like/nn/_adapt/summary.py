"""`summary`: a table of the arrays in a model."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._module.freezing import leaves_under, trainable_leaves
from ..._tree import is_array
from ..._tree.arrays import is_typed_key
from ..._tree.filters import is_array_or_struct
from ..._tree.nodes import plain_path
from ..._tree.table import table_lines
from .._base.shape import as_size
from .._base.state import State, StateIndex
from .places import Place, places

_Status = Literal["trainable", "frozen", "state", "mixed"]


class SummaryRow(NamedTuple):
    """One row of a [`equinox_like.nn.Summary`][].

    **Attributes:**

    - `path`, `shape`, `dtype`: of the array; `layer`: the class of its layer.
    - `params`, `bytes`: the number of its elements, and their size. A typed PRNG key
        counts as the integers that it consists of.
    - `status`: `"trainable"`, `"frozen"` or `"state"`.
    - `tied_to`: the path at which the same array was counted, if it occurs there too.

    In a row for several arrays, `shape` is `None`, and a value that differs between them
    is `"mixed"`.
    """

    path: str
    layer: str
    shape: tuple[int, ...] | None
    dtype: str
    params: int
    bytes: int
    status: _Status
    tied_to: str | None = None


class Summary:
    """The result of [`equinox_like.nn.summary`][]: `print` it, or read its attributes.

    **Attributes:**

    - `rows`: a list of [`equinox_like.nn.SummaryRow`][].
    - `total_params`, `trainable_params`: the number of elements of all arrays, and of
        those that are trained.
    - `total_bytes`: the size of all arrays in bytes.
    """

    rows: list[SummaryRow]
    total_params: int
    trainable_params: int
    total_bytes: int

    def __init__(self, rows: list[SummaryRow], arrays: list[SummaryRow]):
        """**Arguments:** the rows to show, and one row for each array, for the totals."""
        counted = [row for row in arrays if row.tied_to is None]
        self.rows = rows
        self.total_params = sum(row.params for row in counted)
        self.trainable_params = sum(
            row.params for row in counted if row.status == "trainable"
        )
        self.total_bytes = sum(row.bytes for row in counted)
        self._dtypes: Counter[str] = Counter()
        for row in counted:
            self._dtypes[row.dtype] += row.params

    def __str__(self) -> str:
        head = ("path", "layer", "shape", "dtype", "params", "bytes", "status")
        table = [head, *(_cells(row) for row in self.rows)]
        lines = table_lines(table, right_aligned=(4, 5))
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(lines[1])
        lines.append(
            f"{self.total_params:,} parameters, {self.trainable_params:,} trainable, "
            f"{self.total_bytes:,} bytes"
        )
        if len(self._dtypes) > 1:
            each = (f"{number:,} {dtype}" for dtype, number in self._dtypes.items())
            lines.append(f"of these {', '.join(each)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def summary(tree: Any, *, depth: int | None = None, where: Any = None) -> Summary:
    """A table of the arrays of a model.

    **Arguments:**

    - `tree`: any pytree. `jax.ShapeDtypeStruct`s count as arrays if there are no arrays,
        so a model that is too large to build can be summarised through
        [`equinox_like.filter_eval_shape`][]. Beside arrays they are static values.
    - `depth`: the length of the paths in the table: deeper arrays are summed up in one
        row.
    - `where`: restricts the table to a part of the model: a function that returns it,
        as in [`equinox_like.tree_at`][], a class of layers, or a pattern for paths, as
        in [`equinox_like.trainable`][].

    **Returns:**

    A [`equinox_like.nn.Summary`][], with one row for each array: its path, the class of
    the layer, shape, dtype, number of elements, bytes, and whether it is trainable,
    frozen (or in a `field(trainable=False)`, or an integer), or state. An array that
    occurs at several places is counted once. No values are read from the device.

    **Raises:**

    `ValueError` if `depth` is negative or not an integer, or if `where` chooses nothing.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        summary = eqx.nn.summary(model)
        assert summary.total_params == 3 * 8 + 8 + 8 * 2 + 2
        assert summary.rows[0].path == "layers[0].weight"
        print(summary)
        ```
    """
    if depth is not None:
        depth = as_size("`summary`", "depth", depth)
    found = list(places(tree))
    flags = trainable_leaves(tree, _is_parameter)
    shown = [True] * len(found) if where is None else leaves_under(tree, where)
    if not any(shown) and where is not None:
        raise ValueError(f"`summary` found nothing in the tree for `where`, {where!r}.")
    # A struct stands for an array in a tree of structs, and is a value beside arrays.
    is_counted = (
        is_array if any(is_array(p.leaf) for p in found) else is_array_or_struct
    )
    firsts: dict[int, str] = {}
    kept, arrays = [], []
    for place, trained, is_shown in zip(found, flags, shown, strict=True):
        if is_shown and is_counted(place.leaf):
            kept.append(place)
            arrays.append(_row(place, trained, firsts))
    rows = arrays if depth is None else _summed(zip(kept, arrays, strict=True), depth)
    return Summary(rows, arrays)


def _is_parameter(leaf: Any) -> bool:
    return is_array_or_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _row(place: Place, trained: bool, firsts: dict[int, str]) -> SummaryRow:
    leaf, path = place.leaf, plain_path(place.path)
    is_state = isinstance(place.owner, State | StateIndex)
    status: _Status = "state" if is_state else "trainable" if trained else "frozen"
    first = path
    if is_array(leaf):  # a struct may occur twice without being one shared array
        first = firsts.setdefault(id(leaf), path)
    number, size = _measure(leaf)
    return SummaryRow(
        path,
        _class_name(place),
        tuple(leaf.shape),
        str(leaf.dtype),
        number,
        size,
        status,
        None if first == path else first,
    )


def _measure(leaf: Any) -> tuple[int, int]:
    """The number of elements of an array, and its size in bytes."""
    dtype, number = leaf.dtype, math.prod(leaf.shape)
    if is_typed_key(leaf):
        struct = jax.ShapeDtypeStruct(leaf.shape, dtype)
        data = jax.eval_shape(jax.random.key_data, struct)
        dtype, number = data.dtype, math.prod(data.shape)
    return number, -(-number * _bits(dtype) // 8)


def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * np.dtype(dtype).itemsize


def _class_name(place: Place) -> str:
    if place.owner is not None:
        return type(place.owner).__name__
    return place.classes[-1].__name__ if place.classes else ""


def _summed(pairs: Iterable[tuple[Place, SummaryRow]], depth: int) -> list[SummaryRow]:
    groups: dict[str, list[tuple[Place, SummaryRow]]] = {}
    for place, row in pairs:
        groups.setdefault(plain_path(place.path[:depth]), []).append((place, row))
    return [_sum(path, group, depth) for path, group in groups.items()]


def _sum(path: str, group: list[tuple[Place, SummaryRow]], depth: int) -> SummaryRow:
    place, first = group[0]
    if len(group) == 1 and len(place.path) <= depth:
        return first
    rows = [row for _, row in group]
    counted = [row for row in rows if row.tied_to is None]
    dtypes, statuses = {row.dtype for row in rows}, {row.status for row in rows}
    return SummaryRow(
        path,
        place.classes[depth].__name__ if depth < len(place.classes) else first.layer,
        None,
        first.dtype if len(dtypes) == 1 else "mixed",
        sum(row.params for row in counted),
        sum(row.bytes for row in counted),
        first.status if len(statuses) == 1 else "mixed",
    )


def _cells(row: SummaryRow) -> tuple[str, ...]:
    status = row.status if row.tied_to is None else f"{row.status}, = {row.tied_to}"
    shape = "" if row.shape is None else str(row.shape)
    numbers = f"{row.params:,}", f"{row.bytes:,}"
    return row.path, row.layer, shape, row.dtype, *numbers, status
