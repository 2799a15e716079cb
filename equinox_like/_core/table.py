"""Text tables for reports."""

from collections.abc import Collection, Sequence


def table_lines(
    rows: Sequence[Sequence[str]], right_aligned: Collection[int] = ()
) -> list[str]:
    """One line for each row. The columns `right_aligned` are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(cells, widths, right_aligned) for cells in rows]


def _line(
    cells: Sequence[str], widths: list[int], right_aligned: Collection[int]
) -> str:
    parts = [
        cell.rjust(width) if i in right_aligned else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()
