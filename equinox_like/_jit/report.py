"""What a call would donate, and what XLA makes of it: a table by leaf, of nothing run."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.tree_util as jtu
import numpy as np

from .._compat.lowered import Buffer, buffers_of
from .._tree.arrays import describe_array
from .._tree.paths import path_str
from .stages import Lowered

Outcome = Literal["aliased", "donor", "unusable", "unused", "kept", "unknown"]


class DonationRow(NamedTuple):
    """What becomes of one array of the arguments."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    #: Of the array, or of its part on one device.
    bytes: int
    outcome: Outcome
    #: The path of the output that takes its buffer, if it is aliased.
    output: str | None = None
    #: Why no output takes it, if it is unusable; or why it is kept, if that may surprise.
    reason: str | None = None

    def __str__(self) -> str:
        more = f" with {self.output}" if self.output else ""
        return f"{self.outcome}{more}" + (f": {self.reason}" if self.reason else "")


class DonationReport:
    """What a call would donate, by leaf; from `filter_jit(f).donation_report(...)`.

    `rows` has one [`equinox_like.DonationRow`][] for each array of the arguments, in the
    order of the signature. Their `outcome` is

    - `"aliased"`: an output takes over the buffer; `output` is its path;
    - `"donor"`: no output takes the buffer, but it is XLA's, which may use it for
        anything or for nothing. `"warn"` and `"strict"` report it like an unusable one;
    - `"unusable"`: donated, but no output can take the buffer; `reason` says why;
    - `"unused"`: donated, but the program does not use it;
    - `"kept"`: not donated;
    - `"unknown"`: donated, and this version of JAX does not say what became of it.

    `donated_bytes` is the sum over those that are donated, and `aliased_bytes` over
    those of them whose buffer an output takes. `temporary_bytes` and `peak_bytes` are
    what XLA reports. All of them, and the bytes of the rows, are per device.
    `str(report)` is a table.
    """

    def __init__(self, function: str, rows: Sequence[DonationRow], memory: Any):
        self.function = function
        self.rows = tuple(rows)
        self.donated_bytes = sum(r.bytes for r in rows if r.outcome != "kept")
        # XLA also counts the copies of NumPy arrays, which are nobody's.
        self.aliased_bytes = sum(r.bytes for r in rows if r.outcome == "aliased")
        if any(r.outcome == "unknown" for r in rows):
            self.aliased_bytes = min(memory.alias_size_in_bytes, self.donated_bytes)
        self.temporary_bytes: int = memory.temp_size_in_bytes
        self.peak_bytes: int = memory.peak_memory_in_bytes

    def __str__(self) -> str:
        cells = [("array", "", "bytes", "outcome")] + [
            (r.path, describe_array(r), f"{r.bytes:,}", str(r)) for r in self.rows
        ]
        first, second, third = (
            max(len(row[i]) for row in cells) for i in range(len("abc"))
        )
        lines = [
            f"{a:<{first}}  {b:<{second}}  {c:>{third}}  {d}" for a, b, c, d in cells
        ]
        return "\n".join(
            [
                f"Donation by {self.function}:",
                *lines,
                f"{self.donated_bytes:,} bytes are donated, of which outputs take "
                f"{self.aliased_bytes:,}. XLA needs {self.temporary_bytes:,} for temporary "
                f"values, and {self.peak_bytes:,} at the peak.",
            ]
        )

    __repr__ = __str__


def report_on(lowered: Lowered[..., Any], function: str) -> DonationReport:
    """Compiles, but does not run."""
    named = lowered._call.named
    compiled = lowered.lowered.compile()
    buffers = buffers_of(lowered.lowered, compiled) or [None] * len(named)
    fill = lowered._call.specialization.outputs.fill
    outputs = _outputs(lowered.lowered.out_info, compiled.output_shardings, fill)
    rows = [
        _row(name, x, outputs, is_donated, fate)
        for (name, x, is_donated), fate in zip(named, buffers, strict=True)
    ]
    if lowered._call.jitted._program.donation.is_any:
        for i in range(lowered._call.layout.number_of_own_data):
            rows[i] = rows[i]._replace(reason=_OWN)
    return DonationReport(function, rows, compiled.memory_analysis())


_OWN = "an array of the callable itself; one that is an argument can be donated"


class _Output(NamedTuple):
    path: str
    info: Any
    bytes: int


def _outputs(infos: Any, shardings: Any, fill: Any) -> list[_Output]:
    """Of each output its path, in the order of the compiled program."""
    leaves, treedef = jtu.tree_flatten(infos)
    numbers = {_Number(): i for i in range(len(leaves))}
    # What is not an array is in the structure, and gets its place by filling.
    tree = fill(treedef.unflatten(numbers))
    paths = [""] * len(leaves)
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, _Number):
            paths[numbers[leaf]] = path_str(path, "output")
    return [
        _Output(path, x, _bytes_on_a_device(x, sharding))
        for path, x, sharding in zip(
            paths, leaves, jtu.tree_leaves(shardings), strict=True
        )
    ]


class _Number:
    """Stands for an output."""


def _row(
    name: str, x: Any, outputs: list[_Output], is_donated: bool, fate: Any
) -> DonationRow:
    row = DonationRow(name, x.shape, x.dtype, _bytes_on_a_device(x), "kept")
    if not is_donated:
        return row
    if isinstance(x, np.ndarray | np.generic):
        return row._replace(reason="an array of NumPy is copied for the call")
    if isinstance(fate, int):
        return row._replace(outcome="aliased", output=outputs[fate].path)
    if fate is Buffer.KEPT:
        return row._replace(outcome="unusable", reason=_why_unusable(row, outputs))
    outcomes: dict[Any, Outcome] = {Buffer.PRUNED: "unused", Buffer.DONOR: "donor"}
    return row._replace(outcome=outcomes.get(fate, "unknown"))


def _why_unusable(row: DonationRow, outputs: list[_Output]) -> str:
    for output in outputs:
        is_alike = output.info.shape == row.shape and output.info.dtype == row.dtype
        if is_alike and output.bytes != row.bytes:
            return f"the sharding of {output.path} differs"
    return "no output of that size and dtype is left"


def _bytes_on_a_device(x: Any, sharding: Any = None) -> int:
    sharding = sharding or getattr(x, "sharding", None)
    shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
    return math.prod(shape) * x.dtype.itemsize
