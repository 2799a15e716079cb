"""Tools for a function: how often it is traced, and the memory that it needs."""

import copy
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax.tree_util as jtu

from .._annotations import signature_of
from .._core.base import (
    NOT_GIVEN,
    Transformed,
    frames_hidden,
    name_of,
    require_callable,
)
from .._jit import DonationReport, filter_jit
from .._jit.jit import Jitted, JittedMethod
from .._jit.layout import LayoutTable
from .._jit.retrace import Trace, explain, trace_to_be
from .._module import field
from .._tree.arrays import describe_array
from .._tree.nodes import STRING_KEY
from .._tree.require import require_integer
from .._tree.table import table_lines

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def assert_max_traces(
    fn: Callable[_P, _T], *, max_traces: int | None
) -> "Counted[_P, _T]": ...
@overload
def assert_max_traces(
    *, max_traces: int | None
) -> "Callable[[Callable[_P, _T]], Counted[_P, _T]]": ...
def assert_max_traces(fn: Any = NOT_GIVEN, *, max_traces: int | None) -> Any:
    """Raises an error when `fn` is called more than `max_traces` times.

    Python runs a function under `filter_jit`, `jax.jit` and the like only to trace it.
    So there it limits the number of traces, each of which costs a compilation.

    **Arguments:**

    - `fn`: any callable, also a method in the body of a class. Without it, a decorator
        is returned. Apply it before the transformation:
        `filter_jit(assert_max_traces(...))`.
    - `max_traces`: the largest number of calls; `None` only counts them, for
        [`equinox_like.debug.get_num_traces`][].

    **Returns:**

    A callable like `fn`. It shares its count with the copies that flattening and
    unflattening make; the count of a copy by `copy.deepcopy` starts at zero.

    **Raises:**

    `RuntimeError` on a call beyond `max_traces`, which says what differs from the
    earlier calls. Refused calls are counted.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        @eqx.debug.assert_max_traces(max_traces=1)
        def f(x, rate):
            return rate * x

        f(jnp.ones(3), 0.1)
        f(jnp.zeros(3), 0.1)
        try:
            f(jnp.ones(3), 0.2)
        except RuntimeError as error:
            assert "`rate` was the static value 0.1, and is now 0.2." in str(error)
        assert eqx.debug.get_num_traces(f) == 2
        ```
    """
    if fn is NOT_GIVEN:
        return lambda fn: Counted(fn, max_traces)
    return Counted(fn, max_traces)


def get_num_traces(fn: Any) -> int:
    """How often a function has been traced, if it is wrapped in
    [`equinox_like.debug.assert_max_traces`][].

    **Arguments:**

    - `fn`: what `assert_max_traces` returned, or a function whose `__wrapped__` leads to
        it, as `filter_jit` and `jax.jit` return; also a bound method, or a partial.

    **Raises:**

    `ValueError` if `fn` does not wrap such a function.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        @eqx.debug.assert_max_traces(max_traces=2)
        def f(x):
            return 2 * x

        for size in (3, 4, 3):
            f(jnp.ones(size))
        assert eqx.debug.get_num_traces(f) == 2
        ```
    """
    seen = set()
    inner = fn
    while not isinstance(inner, Counted):
        seen.add(id(inner))
        # A bound method, or another partial, has `func`.
        inner = getattr(inner, "func", None) or getattr(inner, "__wrapped__", None)
        if inner is None or id(inner) in seen:
            raise ValueError(
                f"{fn!r} does not count its traces. Wrap the function in "
                "`eqx.debug.assert_max_traces(max_traces=None)` first."
            )
    return inner._counter.count


class Counted(Transformed[_P, _T]):
    """The result of [`equinox_like.debug.assert_max_traces`][]."""

    _transformation_ = "assert_max_traces"

    _max_traces: int | None = field(static=True)
    _counter: "_Counter" = field(static=True)

    def __init__(self, fn: Any, max_traces: int | None):
        super().__init__(fn)
        if max_traces is not None:
            require_integer(max_traces, "assert_max_traces", "max_traces", least=0)
        self._max_traces = max_traces
        self._counter = _Counter()

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fn, counter = self.__wrapped__, self._counter
        with counter.lock:
            counter.count += 1
            is_allowed = self._max_traces is None or counter.count <= self._max_traces
        if self._max_traces is not None:
            trace = _trace_of((self._tree, args, kwargs), fn)
            if not is_allowed:
                # What `filter_jit` and `jax.jit` return has both.
                if hasattr(fn, "trace") and hasattr(fn, "lower"):
                    raise RuntimeError(
                        f"`assert_max_traces` of the compiled `{name_of(fn)}` counts all "
                        "calls. To count traces, apply it to the function: "
                        f"`filter_jit(assert_max_traces({name_of(fn)}, max_traces="
                        f"{self._max_traces}))`."
                    )
                raise RuntimeError(
                    _message(name_of(fn), self._max_traces, trace, counter.traces)
                )
            if trace is not None:
                counter.traces.append(trace)
        return fn(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "Counted[_P, _T]":
        return Counted(copy.deepcopy(self.__wrapped__, memo), self._max_traces)


class _Counter:
    """The number of calls, and the traces of those that were allowed."""

    def __init__(self) -> None:
        self.count = 0
        self.traces: list[Trace] = []
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _Counter, ()  # what is unpickled counts for itself


def _trace_of(call: tuple[Any, Any, Any], fn: Any) -> Trace | None:
    try:
        signature = signature_of(fn)
        layout = LayoutTable(signature, name_of(fn), lambda *_: False).make(call)
        return trace_to_be(layout, jtu.tree_leaves(call))
    except Exception:
        # There is nothing to compare: most such calls raise an error of their own.
        return None


def _message(name: str, most: int, trace: Trace | None, before: list[Trace]) -> str:
    head = f"`{name}` can only be traced {most} times."
    if trace is None or not before:
        return f"{head} What differs in this call is not known."
    if any(old.serves(trace) for old in before):
        return (
            f"{head} The arguments of this call do not differ from earlier ones. "
            "Perhaps the function is transformed again each time, as by `jax.jit` "
            "within a loop."
        )
    return f"{head} {explain(name, trace, before)}"


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
            *_sums(report.rows, depth),
            ("outputs", report.memory.outputs),
            *_sums(report.outputs, depth),
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
        labels = ["with donation", "without donation"]
        reports = self.with_donation, self.without_donation
        parts = [dict(_parts(report)) for report in reports]
        names = list(dict.fromkeys(name for part in parts for name in part))
        unit, factor = _unit(self.without_donation.memory.peak)
        left = [0.0, 0.0]
        for i, name in enumerate(names):
            widths = [part.get(name, 0) / factor for part in parts]
            color = plt.get_cmap("tab10")(i % 10)
            ax.barh(labels, widths, left=left, label=name, color=color)
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


def _sums(rows: Iterable[Any], depth: int | None) -> Iterator[tuple[str, int]]:
    """A line for each node and leaf, in order, with the sum of the bytes below it."""
    found: dict[tuple[str, ...], int] = {}
    for row in rows:
        components = _COMPONENT.findall(row.path)
        for end in range(1, len(components) + 1):
            if depth is None or end <= depth:
                node = tuple(components[:end])
                found[node] = found.get(node, 0) + row.bytes
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
    return [
        *shown.items(),
        *([("other arguments", others)] if others > 0 else []),
        ("new outputs", memory.outputs - memory.aliased),
        ("temporary", memory.temporary),
    ]


def _unit(size: int) -> tuple[str, float]:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return unit, float(factor)
    return "bytes", 1.0
