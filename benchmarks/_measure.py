"""How things are timed: interleaved, so that what else the machine does hits all alike.

Each round runs every contender once, for about the same short time; a contender's figure
is the median over rounds of its time divided by the baseline's time in the same round.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Contenders = dict[str, Callable[[], object]]


@dataclass
class Row:
    """One line of the table: the baseline's time, and ratios with their spread."""

    name: str
    baseline: str
    seconds: float
    ratios: dict[str, tuple[float, float, float]]
    goal: str = ""


def compare(name: str, contenders: Contenders, *, goal: str = "", rounds: int) -> Row:
    """Times the first of `contenders` and the others against it."""
    repeats = {key: _repeats(run) for key, run in contenders.items()}
    times = {key: [] for key in contenders}
    for _ in range(rounds):
        for key, run in contenders.items():
            start = time.perf_counter()
            for _ in range(repeats[key]):
                run()
            times[key].append((time.perf_counter() - start) / repeats[key])
    baseline, *others = contenders
    base = np.asarray(times[baseline])
    ratios = {
        key: tuple(np.percentile(np.asarray(times[key]) / base, [50, 10, 90]).tolist())
        for key in others
    }
    return Row(name, baseline, float(np.median(base)), ratios, goal)


def _repeats(run: Callable[[], object], target: float = 2e-3) -> int:
    """How often to call within one round; the first calls also warm up."""
    for _ in range(3):
        run()
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            run()
        if time.perf_counter() - start > target or count > 100_000:
            return count
        count *= 2


def show(title: str, rows: list[Row]) -> None:
    """Prints rows as a table."""
    columns = list(dict.fromkeys(key for row in rows for key in row.ratios))
    print(f"\n{title}")
    head = f"{'':34}{rows[0].baseline:>14}"
    print(head + "".join(f"{c:>26}" for c in columns) + f"{'goal':>10}")
    for row in rows:
        cells = "".join(f"{_cell(row.ratios.get(c)):>26}" for c in columns)
        print(f"{row.name:34}{_time(row.seconds):>14}{cells}{row.goal:>10}")


def _cell(ratio: tuple[float, float, float] | None) -> str:
    if ratio is None:
        return "-"
    middle, low, high = ratio
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e9:.1f} ns"
