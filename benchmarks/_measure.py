"""Timing: runs are interleaved, so that other load on the machine affects all alike.

Each round runs every contender once, for about the same short time. The result of a
contender is the median over rounds of its time divided by the baseline's time in the
same round.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

Contenders = dict[str, Callable[[], object]]
Spread = tuple[float, float, float]


@dataclass
class Row:
    """One row of the table: the baseline's time and the ratios to it, with spreads."""

    name: str
    baseline: str
    seconds: Spread
    ratios: dict[str, Spread]
    goal: str = ""


def compare(
    name: str,
    contenders: Contenders,
    *,
    goal: str = "",
    rounds: int,
    repeats: int | None = None,
) -> Row:
    """Times all contenders. The first one is the baseline of the ratios.

    In each round a contender is called `repeats` times. By default that is often enough
    for an exact measurement.
    """
    counts = {key: repeats or _repeats(run) for key, run in contenders.items()}
    times = {key: [] for key in contenders}
    for i in range(rounds):
        # Alternate the order, so that no contender always follows the same one.
        for key in list(contenders)[:: -1 if i % 2 else 1]:
            times[key].append(_turn(contenders[key], counts[key]))
    baseline, *others = contenders
    base = np.asarray(times[baseline])
    ratios = {key: spread(np.asarray(times[key]) / base) for key in others}
    return Row(name, baseline, spread(base), ratios, goal)


def spread(values: np.ndarray | list[float]) -> Spread:
    """The median, and the range of the middle 80 % of the values."""
    middle, low, high = np.percentile(values, [50, 10, 90]).tolist()
    return middle, low, high


def _turn(run: Callable[[], object], count: int) -> float:
    # The first call is not timed. It warms the caches, which the previous contender has
    # filled. Otherwise `jax.jit` on 2000 leaves is a fifth slower after a slow
    # contender than after itself; as it is the baseline, all others would look faster.
    jax.block_until_ready(run())
    start = time.perf_counter()
    for _ in range(count):
        out = run()
    taken = time.perf_counter() - start
    jax.block_until_ready(out)  # or it would still run in the next contender's turn
    return taken / count


def _repeats(run: Callable[[], object], target: float = 2e-3) -> int:
    """How often to call `run` in one turn. The first calls also warm up."""
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
    head = f"{'':34}{rows[0].baseline:>30}"
    print(head + "".join(f"{c:>26}" for c in columns) + f"{'goal':>10}")
    for row in rows:
        cells = "".join(f"{_ratio(row.ratios.get(c)):>26}" for c in columns)
        print(f"{row.name:34}{_time(row.seconds):>30}{cells}{row.goal:>10}")


def _ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return "-"
    middle, low, high = ratio
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def _time(seconds: Spread) -> str:
    units = ("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)
    fitting = (u for u in units if seconds[0] * u[1] >= 1)
    unit, scale = next(fitting, units[-1])
    middle, low, high = (x * scale for x in seconds)
    return f"{middle:.2f} {unit} ({low:.2f}-{high:.2f})"
