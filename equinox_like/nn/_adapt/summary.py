"""`summary`: a table of the arrays of a model, and of what its layers return."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._jit.report import table_lines
from ..._module.freezing import leaves_under, trainable
from ..._runtime.harvest import LayerRow, layer_rows
from ..._tree import is_array
from ..._tree.arrays import describe_array, is_typed_key
from ..._tree.filters import array_filter, is_array_or_struct
from ..._tree.nodes import describe_node, node_paths, path_within, plain_path
from ..._tree.paths import components, matches_above
from .._base.checks import as_size
from .._base.state import State, StateIndex
from .parameters import Place, places

_Status = Literal["trainable", "frozen", "state", "mixed"]
_Cells = tuple[str, ...]
_OF_ARRAYS: _Cells = ("path", "layer", "shape", "dtype", "params", "bytes", "status")
_OF_A_CALL: _Cells = ("output", "operations", "share")
_NUMBERS = 4, 5, 8, 9  # columns of the tree that are aligned on the right


class SummaryRow(NamedTuple):
    """One array of a [`equinox_like.nn.Summary`][], or several."""

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

    A notebook shows it as a table of the whole model, with its parts indented.

    **Attributes:**

    - `rows`: a list with a row for each array, or for several if `depth` is given. Each
        has the `path`, `shape` and `dtype` of the array; the class of its `layer`; the
        number of its elements, `params`, and their `bytes` (a typed PRNG key counts as the
        integers that it consists of); its `status`, which is `"trainable"`, `"frozen"` or
        `"state"`; and `tied_to`, the path at which the same array was counted, if it
        occurs there too. In a row for several arrays, `shape` is `None`, and a value that
        differs between them is `"mixed"`.
    - `total_params`, `trainable_params`: the number of elements of all arrays, and of
        those that are trained.
    - `total_bytes`: the size of all arrays in bytes.
    - `layers`: a list with a row for each layer that was called, if inputs were passed.
        Each has the `path` of the layer, which is empty for the model itself, and its
        class, `layer`; what it returned, `output`, with a `jax.ShapeDtypeStruct` for each
        array, and a tuple of its outputs if it was called more than once (arrays have the
        axes of `jax.vmap` and of the steps of a scan in front); the number of
        `operations` in its matrix products and convolutions, and in those of the layers
        within it; and their `share` of the whole call, from 0 to 1. A multiplication and
        an addition are two operations. Within `jax.shard_map` they are those of one
        device.
    - `total_operations`: the number of operations of a call with these inputs.
    """

    rows: list[SummaryRow]
    total_params: int
    trainable_params: int
    total_bytes: int
    layers: list[LayerRow]
    total_operations: int

    def __init__(
        self,
        rows: list[SummaryRow],
        arrays: list[SummaryRow],
        nodes: Callable[[], Iterable[tuple[str, SummaryRow | None]]],
    ):
        """**Arguments:**

        - `rows`: what to show.
        - `arrays`: one row for each array, for the totals.
        - `nodes`: returns the path of each part of the model, and its row, if it has
            arrays. It is called for the tree alone.
        """
        self.layers, self.total_operations = [], 0
        counted = [row for row in arrays if row.tied_to is None]
        self.rows, self._nodes = rows, nodes
        self.total_params = sum(row.params for row in counted)
        self.trainable_params = sum(
            row.params for row in counted if row.status == "trainable"
        )
        self.total_bytes = sum(row.bytes for row in counted)
        self._dtypes: Counter[str] = Counter()
        for row in counted:
            self._dtypes[row.dtype] += row.params

    def __str__(self) -> str:
        table = [_OF_ARRAYS, *(_cells(row) for row in self.rows)]
        lines = [*_ruled(table, right_aligned=(4, 5)), *self._of_arrays()]
        if self.layers:
            head = ("path", "layer", *_OF_A_CALL)
            table = [head, *(_layer_cells(row) for row in self.layers)]
            lines += ["", *_ruled(table, right_aligned=(3, 4)), *self._of_layers()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def tree(self) -> str:
        """The model as a tree: a line for each part of it, with its own parts below.

        A part has the numbers of all arrays in it. With inputs, a part that is called
        has its output, operations and share, too.

        !!! example

            ```python
            import equinox_like as eqx
            import jax

            model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
            print(eqx.nn.summary(model, jax.ShapeDtypeStruct((3,), "float32")).tree())
            ```
        """
        found = self._tree_rows()
        table = [("  " * level + cells[0], *cells[1:]) for level, cells in found]
        lines = _ruled(table, right_aligned=_NUMBERS)
        return "\n".join([*lines, *self._of_arrays(), *self._of_layers()])

    def _repr_html_(self) -> str:
        from html import escape

        lines = []
        for number, (level, cells) in enumerate(self._tree_rows()):
            tag = "td" if number else "th"
            line = ""
            for i, cell in enumerate(cells):
                style = f"text-align: {'right' if i in _NUMBERS else 'left'}"
                style += f"; padding-left: {1 + 1.5 * level}em" * (i == 0)
                line += f'<{tag} style="{style}">{escape(cell)}</{tag}>'
            lines.append(f"<tr>{line}</tr>\n")
        below = "<br>\n".join(map(escape, [*self._of_arrays(), *self._of_layers()]))
        return f"<table>\n{''.join(lines)}</table>\n<p>{below}</p>"

    def _tree_rows(self) -> Iterator[tuple[int, _Cells]]:
        """The cells of each line of the tree, and how many parts it is within."""
        called = {row.path: row for row in self.layers}
        yield 0, _OF_ARRAYS + _OF_A_CALL * bool(called)
        above: list[str] = []
        for path, row in self._nodes():
            layer = called.get(path)
            if row is None and layer is None:
                continue
            while above and not _is_below(path, above[-1]):
                above.pop()
            cells = [""] * len(_OF_ARRAYS) if row is None else [*_cells(row)]
            nearest = above[-1] if above else ""
            cells[0] = path.removeprefix(nearest).removeprefix(".") or "(model)"
            if layer is not None:
                cells[1], *call = _layer_cells(layer)[1:]
                cells += call
            elif called:
                cells += [""] * len(_OF_A_CALL)
            yield len(above), tuple(cells)
            above.append(path)

    def _of_arrays(self) -> Iterator[str]:
        yield (
            f"{self.total_params:,} parameters, {self.trainable_params:,} trainable, "
            f"{self.total_bytes:,} bytes"
        )
        if len(self._dtypes) > 1:
            each = (f"{number:,} {dtype}" for dtype, number in self._dtypes.items())
            yield f"of these {', '.join(each)}"

    def _of_layers(self) -> Iterator[str]:
        if self.layers:
            yield (
                f"{self.total_operations:,} operations of matrix products and "
                "convolutions, counted from the jaxpr"
            )


def summary(
    tree: Any, *inputs: Any, depth: int | None = None, where: Any = None, **kwargs: Any
) -> Summary:
    """A table of the arrays of a model; with inputs, also of the outputs of its layers.

    **Arguments:**

    - `tree`: any pytree. `jax.ShapeDtypeStruct`s count as arrays if there are no arrays,
        so a model that is too large to build can be summarised through
        [`equinox_like.filter_eval_shape`][]. Beside arrays they are static values.
    - `*inputs`, `**kwargs`: example arguments of the model, such as `x`, a
        [`equinox_like.nn.State`][] and `key=key`. A `jax.ShapeDtypeStruct` may stand for
        an array. For a batch, pass `eqx.filter_vmap(model)` as `tree`.
    - `depth`: the length of the paths in the table: deeper arrays are summed up in one
        row, and deeper layers are left out.
    - `where`: restricts the table to a part of the model: a function that returns it,
        as in [`equinox_like.tree_at`][], a class of layers, or a pattern for paths, as
        in [`equinox_like.trainable`][].

    **Returns:**

    A [`equinox_like.nn.Summary`][], with one row for each array: its path, the class of
    the layer, shape, dtype, number of elements, bytes, and whether it is trainable,
    frozen (or in a `field(trainable=False)`, or an integer), or state. An array that
    occurs at several places is counted once. No values are read from the device.

    With inputs, a second table has one row for each Module that is called: the shapes and
    dtypes of its output, its operations, and their share of all. Operations are the
    multiplications and additions of matrix products and convolutions, in the jaxpr of
    the call. The body of a `jax.lax.while_loop` counts once, and each branch of a
    `jax.lax.cond`, but of a `jax.lax.platform_dependent` only the default. The model is
    traced, and nothing is computed.

    **Raises:**

    `ValueError` if `depth` is negative or not an integer, or if `where` chooses nothing.
    `TypeError` if inputs are passed and `tree` cannot be called.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        summary = eqx.nn.summary(model)
        assert summary.total_params == 3 * 8 + 8 + 8 * 2 + 2
        assert summary.rows[0].path == "layers[0].weight"
        print(summary)

        summary = eqx.nn.summary(model, jax.ShapeDtypeStruct((3,), "float32"))
        assert [row.path for row in summary.layers] == ["layers[0]", "layers[1]", ""]
        assert summary.layers[0].output.shape == (8,)
        assert summary.total_operations == 2 * (3 * 8 + 8 * 2)
        ```
    """
    if depth is not None:
        depth = as_size("`summary`", "depth", depth)
    found = list(places(tree))
    flags = jtu.tree_leaves(trainable(tree))
    shown = [True] * len(found) if where is None else leaves_under(tree, where)
    if not any(shown) and where is not None:
        raise ValueError(f"`summary` found nothing in the tree for `where`, {where!r}.")
    is_counted = array_filter(place.leaf for place in found)
    firsts: dict[int, str] = {}
    kept, arrays = [], []
    for place, trained, is_shown in zip(found, flags, shown, strict=True):
        if is_shown and is_counted(place.leaf):
            kept.append(place._replace(leaf=None, owner=None))  # keeps no array alive
            arrays.append(_row(place, trained, firsts))
    pairs = list(zip(kept, arrays, strict=True))
    paths = node_paths(tree)

    def nodes() -> Iterator[tuple[str, SummaryRow | None]]:
        deepest = max((len(place.path) for place, _ in pairs), default=0)
        last = deepest if depth is None else min(depth, deepest)
        levels = range(last + 1)
        sums = {row.path: row for level in levels for row in _summed(pairs, level)}
        # Frozen parts have a path twice.
        for path in dict.fromkeys(map(path_within, paths)):
            yield path, sums.get(path or "<root>")

    rows = arrays if depth is None else _summed(pairs, depth)
    table = Summary(rows, arrays, nodes)
    if not inputs and not kwargs:
        return table
    if not callable(tree):
        raise TypeError(
            f"`summary` cannot call {describe_node(tree)}: pass a model, or no inputs."
        )
    layers, table.total_operations = layer_rows(tree, inputs, kwargs)
    flags = {plain_path(x.path): y for x, y in zip(found, shown, strict=True)}

    def is_chosen(path: str) -> bool:
        if depth is not None and components(path) > depth:
            return False
        parts = (y for x, y in flags.items() if where and matches_above(path, x))
        return where is None or {*parts} == {True}

    table.layers = [row for row in layers if is_chosen(row.path)]
    return table


def _layer_cells(row: LayerRow) -> tuple[str, ...]:
    parts = jtu.tree_leaves(row.output, is_leaf=lambda x: isinstance(x, State))
    # Calls with equal outputs are shown once, and a State is left out.
    shown = dict.fromkeys(describe_array(x) for x in parts if is_array_or_struct(x))
    numbers = f"{row.operations:,}", f"{row.share:.1%}"
    return row.path or "(model)", row.layer, ", ".join(shown), *numbers


def _is_below(path: str, above: str) -> bool:
    return not above or path.startswith((above + ".", above + "["))


def _ruled(table: Sequence[Sequence[str]], right_aligned: tuple[int, ...]) -> list[str]:
    """The lines of a table, with a rule below its head and at its end."""
    lines = table_lines(table, right_aligned)
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:], rule]


def _row(place: Place, trained: bool, firsts: dict[int, str]) -> SummaryRow:
    leaf, path = place.leaf, plain_path(place.path)
    is_state = isinstance(place.owner, State | StateIndex)
    status: _Status = "state" if is_state else "trainable" if trained else "frozen"
    first = path
    if is_array(leaf):  # a struct may occur twice without being one shared array
        first = firsts.setdefault(id(leaf), path)
    tied_to = None if first == path else first
    array = tuple(leaf.shape), str(leaf.dtype), *_measure(leaf)
    return SummaryRow(path, _class_name(place), *array, status, tied_to)


def _measure(leaf: Any) -> tuple[int, int]:
    """The number of elements of an array, and its size in bytes."""
    dtype, number = leaf.dtype, math.prod(leaf.shape)
    if is_typed_key(leaf):
        struct = jax.ShapeDtypeStruct(leaf.shape, dtype)
        data = jax.eval_shape(jax.random.key_data, struct)
        dtype, number = data.dtype, math.prod(data.shape)
    bits = 8 * np.dtype(dtype).itemsize
    for kind, info in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            bits = info(dtype).bits  # four for int4
    return number, -(-number * bits // 8)


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
