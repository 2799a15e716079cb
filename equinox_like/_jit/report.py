"""The donation report: what a call would donate, and the memory it needs; text tables."""

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._compat.compiled import Buffer, buffers_of
from .._tree.arrays import describe_array
from .._tree.nodes import path_str
from .stages import Lowered

Outcome = Literal["aliased", "donor", "unusable", "unused", "kept", "unknown"]


class DonationRow(NamedTuple):
    """What happens to one array of the arguments."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    outcome: Outcome
    output: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        more = f" with {self.output}" if self.output else ""
        return f"{self.outcome}{more}" + (f": {self.reason}" if self.reason else "")


class OutputRow(NamedTuple):
    """One array of the output."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int


class DonationReport:
    """What a call would donate, by leaf; from `filter_jit(f).donation_report(...)`.

    `rows` has a row for each array of the arguments, in the order of the signature: its
    `path`, `shape` and `dtype`, the `bytes` of its part on one device, its `outcome`, and
    as `reason` why it is unusable, or why it is kept if that is not obvious. `outcome` is

    - `"aliased"`: an output reuses the buffer; `output` is its path. If NumPy holds the
        buffer when the function is called, JAX copies it, and the array stays alive;
    - `"donor"`: no output reuses the buffer, but XLA may use it for temporary values.
        `"warn"` and `"strict"` treat it as unusable;
    - `"unusable"`: donated, but no output can reuse the buffer; `reason` says why;
    - `"unused"`: donated, but the program does not use it;
    - `"kept"`: not donated;
    - `"unknown"`: donated, and this version of JAX does not tell what becomes of it.

    `outputs` has a row for each array of the output: its `path`, `shape`, `dtype` and
    `bytes`. `donated_bytes` is the sum over the rows that are donated, and
    `aliased_bytes` over those whose buffer an output reuses. `memory` is what
    `.memory_analysis()` of JAX's compiled function returns: XLA's account. From it are
    `temporary_bytes` and `peak_bytes`, which is all that is allocated while the call
    runs. (XLA's own `peak_memory_in_bytes` leaves out temporary values on some
    platforms.) All numbers of bytes are those on one device. `str(report)` is a table.
    """

    def __init__(
        self,
        function: str,
        rows: Sequence[DonationRow],
        outputs: Sequence[OutputRow],
        memory: Any,
    ):
        self.function = function
        self.rows = tuple(rows)
        self.outputs = tuple(outputs)
        self.memory = memory
        self.donated_bytes = sum(r.bytes for r in rows if r.outcome != "kept")
        # XLA's own count includes its copies of NumPy arrays, which are not donated.
        self.aliased_bytes = sum(r.bytes for r in rows if r.outcome == "aliased")
        if any(r.outcome == "unknown" for r in rows):
            self.aliased_bytes = min(memory.alias_size_in_bytes, self.donated_bytes)
        self.temporary_bytes: int = memory.temp_size_in_bytes
        self.peak_bytes: int = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )

    def __str__(self) -> str:
        cells = [("array", "", "bytes", "outcome")] + [
            (r.path, describe_array(r), f"{r.bytes:,}", str(r)) for r in self.rows
        ]
        return "\n".join(
            [
                f"Donation by {self.function}:",
                *table_lines(cells, right_aligned=(2,)),
                f"{self.donated_bytes:,} bytes are donated, of which outputs reuse "
                f"{self.aliased_bytes:,}. XLA needs {self.temporary_bytes:,} for temporary "
                f"values, and {self.peak_bytes:,} at the peak.",
            ]
        )

    __repr__ = __str__


def report_on(lowered: Lowered[..., Any], function: str) -> DonationReport:
    """The report for a lowered call. Compiles it, but does not run it."""
    named = lowered._call.named
    compiled = lowered.lowered.compile()
    buffers = buffers_of(lowered.lowered, compiled) or [None] * len(named)
    fill = lowered._call.specialization.fill
    outputs = _outputs(lowered.lowered.out_info, compiled.output_shardings, fill)
    rows = [
        _row(name, x, outputs, is_donated, buffer)
        for (name, x, is_donated), buffer in zip(named, buffers, strict=True)
    ]
    if lowered._call.jitted._program.donation.is_any:
        for i in range(lowered._call.layout.number_of_own_data):
            rows[i] = rows[i]._replace(reason=_OWN)
    return DonationReport(function, rows, outputs, compiled.memory_analysis())


_OWN = "an array of the callable itself; only arguments can be donated"


def _outputs(infos: Any, shardings: Any, fill: Any) -> list[OutputRow]:
    """A row for each array of the output, in the order of the compiled program."""
    leaves, treedef = jtu.tree_flatten(infos)
    # `fill` makes the user's output, here with `None` in place of static leaves.
    tree = fill(treedef.unflatten(range(len(leaves))), lambda _: None)
    path_of = {
        i: path_str(path, "output") for path, i in jtu.tree_leaves_with_path(tree)
    }
    return [
        OutputRow(
            path_of[i], x.shape, x.dtype, _bytes_on_a_device(x.shape, x.dtype, sharding)
        )
        for i, (x, sharding) in enumerate(
            zip(leaves, jtu.tree_leaves(shardings), strict=True)
        )
    ]


def _row(
    name: str, x: Any, outputs: list[OutputRow], is_donated: bool, buffer: Any
) -> DonationRow:
    is_numpy = isinstance(x, np.ndarray | np.generic)
    # JAX may pass a NumPy array in a narrower dtype, int32 for int64.
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if is_numpy else x.dtype
    row = DonationRow(
        name,
        x.shape,
        dtype,
        _bytes_on_a_device(x.shape, dtype, getattr(x, "sharding", None)),
        "kept",
    )
    if not is_donated:
        return row
    if is_numpy:
        return row._replace(reason="a NumPy array is copied for the call")
    if isinstance(buffer, int):
        return row._replace(outcome="aliased", output=outputs[buffer].path)
    if buffer is Buffer.NOT_DONATED:
        return row._replace(reason="JAX donates nothing while `jax_debug_nans` is set")
    if buffer is Buffer.UNUSABLE:
        return row._replace(outcome="unusable", reason=_why_unusable(row, outputs))
    outcomes: dict[Any, Outcome] = {Buffer.PRUNED: "unused", Buffer.DONOR: "donor"}
    return row._replace(outcome=outcomes.get(buffer, "unknown"))


def _why_unusable(row: DonationRow, outputs: list[OutputRow]) -> str:
    for output in outputs:
        is_alike = output.shape == row.shape and output.dtype == row.dtype
        if is_alike and output.bytes != row.bytes:
            return f"the sharding of {output.path} differs"
    return "no output of that size is left"


def _bytes_on_a_device(shape: Any, dtype: Any, sharding: Any) -> int:
    part = sharding.shard_shape(shape) if sharding is not None else shape
    return math.prod(part) * dtype.itemsize


def table_lines(
    rows: Sequence[Sequence[str]], right_aligned: Collection[int] = ()
) -> list[str]:
    """One line for each row. The columns `right_aligned` are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = [
            cell.rjust(width) if i in right_aligned else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
