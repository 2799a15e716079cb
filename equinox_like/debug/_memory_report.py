"""`memory_report`: the memory of a compiled function, leaf by leaf."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._core.base import frames_hidden, require_callable
from .._jit import DonationReport, filter_jit
from .._jit.jit import Jitted, JittedMethod
from .._tree.arrays import describe_array
from .._tree.nodes import STRING_KEY
from .._tree.table import table_lines

_TOTALS = ("arguments", "outputs", "aliased", "temporary", "peak")


class MemoryReport:
    """The memory of one call; from [`equinox_like.debug.memory_report`][].

    **Attributes:**

    - `without_donation`, `with_donation`: an [`equinox_like.DonationReport`][] each, with a
        row for every array of the arguments (`.rows`) and of the output (`.outputs`), and
        with the totals by XLA's account (`.memory`).

    All numbers of bytes are those on one device. `str(report)` is a table, `report.tree()`
    sums up along the paths, and `report.plot()` draws a picture.
    """

    def __init__(self, without_donation: DonationReport, with_donation: DonationReport):
        self.without_donation = without_donation
        self.with_donation = with_donation

    def __str__(self) -> str:
        before, after = self.without_donation.memory, self.with_donation.memory
        totals = [("", "without donation", "with donation")] + [
            (name, f"{getattr(before, name):,}", f"{getattr(after, name):,}")
            for name in _TOTALS
        ]
        report = self.with_donation
        arguments = [("argument", "", "bytes", "with donation")] + [
            (r.path, describe_array(r), f"{r.bytes:,}", str(r)) for r in report.rows
        ]
        outputs = [("output", "", "bytes")] + [
            (r.path, describe_array(r), f"{r.bytes:,}") for r in report.outputs
        ]
        return "\n".join(
            [
                f"Memory of one call of {report.function}, in bytes on one device:",
                *table_lines(totals, right_aligned=(1, 2)),
                "",
                *table_lines(arguments, right_aligned=(2,)),
                "",
                *table_lines(outputs, right_aligned=(2,)),
            ]
        )

    __repr__ = __str__

    def tree(self, depth: int | None = None) -> str:
        """The bytes with donation, summed up along the paths, as an indented tree.

        **Arguments:**

        - `depth`: the length of the longest path that is shown. `None` shows every array.
        """
        report = self.with_donation
        lines = [
            ("arguments", report.memory.arguments),
            *_sums(((r.path, r.bytes) for r in report.rows), depth),
            ("outputs", report.memory.outputs),
            *_sums(((r.path, r.bytes) for r in report.outputs), depth),
            ("outputs that reuse an argument", -report.memory.aliased),
            ("temporary", report.memory.temporary),
            ("peak", report.memory.peak),
        ]
        cells = [(name, f"{size:,}") for name, size in lines]
        return "\n".join(table_lines(cells, right_aligned=(1,)))

    def plot(self, ax: Any = None) -> Any:
        """Draws the peak without and with donation as two bars; needs matplotlib.

        **Arguments:**

        - `ax`: the axes of matplotlib to draw on; new ones by default.

        **Returns:**

        The axes.
        """
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
        bars = (
            ("with donation", self.with_donation),
            ("without donation", self.without_donation),
        )
        parts = [dict(_parts(report)) for _, report in bars]
        names = list(dict.fromkeys(name for part in parts for name in part))
        unit, factor = _unit(self.without_donation.memory.peak)
        left = [0.0, 0.0]
        for i, name in enumerate(names):
            widths = [part.get(name, 0) / factor for part in parts]
            color = plt.get_cmap("tab10")(i % 10)
            ax.barh(
                [label for label, _ in bars], widths, left=left, label=name, color=color
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        ax.set_xlabel(f"{unit} on one device")
        ax.set_title(
            f"Memory of one call of {self.with_donation.function}", fontsize=10
        )
        ax.legend(
            loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False
        )
        return ax


@frames_hidden
def memory_report(
    fun: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> MemoryReport:
    """Reports the memory that one call of a function needs, with and without donation.

    Compiles twice for these arguments, but runs and deletes nothing.

    **Arguments:**

    - `fun`: what [`equinox_like.filter_jit`][] returns, or any other function, which is
        then compiled as by `filter_jit(fun)`. A function that donates nothing is compared
        with `donate="all"`.
    - `*args`, `**kwargs`: as for a call of `fun`; a `jax.ShapeDtypeStruct`, with a sharding
        if it matters, may stand for an array.

    **Returns:**

    A [`equinox_like.debug.MemoryReport`][]. The bytes of sharded arrays are those on one
    device.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        @eqx.filter_jit(donate="all")
        def step(params, batch):
            return jax.tree.map(lambda p: p - 0.1 * batch.mean(), params)

        report = eqx.debug.memory_report(step, {"w": jnp.ones((64, 64))}, jnp.ones(8))
        saved = report.without_donation.peak_bytes - report.with_donation.peak_bytes
        assert saved == 64 * 64 * 4
        print(report)
        ```
    """
    require_callable(fun, "memory_report")
    if isinstance(fun, JittedMethod) and not fun.keywords:
        fun, args = fun.func, (*fun.args, *args)
    jitted: Any = fun if isinstance(fun, Jitted) else filter_jit(fun)
    donates = jitted._program.donation.is_any
    donating = jitted if donates else jitted._with_donation("all")
    return MemoryReport(
        jitted._with_donation("none").donation_report(*args, **kwargs),
        donating.donation_report(*args, **kwargs),
    )


# One component of a path. The key of a dictionary may contain dots and brackets.
_COMPONENT = re.compile(STRING_KEY + r"|\[[^\]]*\]|\.?[^.\[]+")


def _sums(
    sizes: Iterable[tuple[str, int]], depth: int | None
) -> Iterator[tuple[str, int]]:
    """A line for each node and leaf, in order, with the sum of the bytes below it."""
    found: dict[tuple[str, ...], int] = {}
    for path, size in sizes:
        components = _COMPONENT.findall(path)
        for end in range(1, len(components) + 1):
            if depth is None or end <= depth:
                node = tuple(components[:end])
                found[node] = found.get(node, 0) + size
    for node, size in found.items():
        yield "  " * len(node) + node[-1], size


# How many arguments the legend shows by name; the others are summed up.
_SHOWN = 7


def _parts(report: DonationReport) -> Sequence[tuple[str, int]]:
    """The parts of the peak: each argument, outputs with a new buffer, temporaries."""
    arguments: dict[str, int] = {}
    for row in filter(lambda row: row.is_used, report.rows):
        name = _COMPONENT.findall(row.path)[0]
        arguments[name] = arguments.get(name, 0) + row.bytes
    largest = sorted(arguments, key=lambda name: -arguments[name])[:_SHOWN]
    shown = {name: size for name, size in arguments.items() if name in largest}
    memory = report.memory
    # Includes what XLA counts in addition to the leaves, such as copies.
    others = memory.arguments - sum(shown.values())
    parts = (
        [*shown.items(), ("other arguments", others)] if others > 0 else shown.items()
    )
    return [
        *parts,
        ("new outputs", memory.outputs - memory.aliased),
        ("temporary", memory.temporary),
    ]


def _unit(size: int) -> tuple[str, float]:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return unit, float(factor)
    return "bytes", 1.0
