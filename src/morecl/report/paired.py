"""Is the best method really better? Differences on the same seeds and class orders, and a paired t-test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from morecl.records import Record
from morecl.report.grid import Column, Grid, Row, arrange, columns_of, repetitions
from morecl.report.paper import REFERENCE
from morecl.report.parts import split
from morecl.report.tables import TABLE_KINDS, Cell, Metric, Table, build_tables

FEWEST = 3  # pairs of runs that are worth a test
_METRICS = tuple(m for kind in ("main", "ood") for m in TABLE_KINDS[kind].metrics if m.key in ("aca", "iauc"))


def all_tables(records: Sequence[Record]) -> list[Table]:
    """The tables of :func:`build_tables`, with the differences after the first."""
    tables, differences = build_tables(records), difference_table(split(arrange(records))[0])
    return [*tables[:1], *([differences] if differences else []), *tables[1:]]


def difference_table(grid: Grid) -> Table | None:
    """The best row minus each other row; ``None`` without two rows that share at least :data:`FEWEST` pairs.

    The best row has the highest mean ACA of those that were run on the most benchmarks, bounds left out.
    """
    best = _best(grid)
    if best is None:
        return None
    body: dict[Row, list[Cell | None]] = {row: [] for row in grid if _comparable(row, best)}
    heads: list[tuple[str, str]] = []
    for column in columns_of(grid):
        for metric in _METRICS:
            cells = {row: _difference(grid, best, row, column, metric) for row in body}
            if any(cells.values()):
                heads.append((column.label, metric.label))
                for row in body:
                    body[row].append(cells[row])
    body = {row: cells for row, cells in body.items() if any(cells)}
    if not body:
        return None
    caption = (
        f"{best.label} minus the method of the row, on the same seeds and class orders: above 0, {best.label} is "
        "better. p: two-sided paired t-test, not corrected for the number of comparisons. Percentage points."
    )
    counts = {cell.n for cells in body.values() for cell in cells if cell}
    same = counts.pop() if len(counts) == 1 else None
    return Table("differences", f"{best.label} against the others", caption, heads, body, same)


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of a t-test of the mean of ``differences`` against 0."""
    from scipy.special import stdtr  # the t distribution; imported here because it takes a fifth of a second

    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    if spread == 0:
        return 0.0 if mean else 1.0
    return float(2 * stdtr(len(differences) - 1, -abs(mean) / (spread / math.sqrt(len(differences)))))


def _best(grid: Grid) -> Row | None:
    rows = [row for row in grid if row.competes]
    if not rows:
        return None
    most = max(len(grid[row]) for row in rows)
    aca = _METRICS[0]

    def mean(row: Row) -> float:
        values = [statistics.fmean(_by_repetition(runs, aca).values()) for runs in grid[row].values()]
        return statistics.fmean(values)

    return max((row for row in rows if len(grid[row]) == most), key=mean)


def _comparable(row: Row, best: Row) -> bool:
    return row != best and row.method != REFERENCE and not row.held_out


def _difference(grid: Grid, best: Row, row: Row, column: Column, metric: Metric) -> Cell | None:
    ours, theirs = (_by_repetition(grid[each].get(column, []), metric) for each in (best, row))
    found = [ours[key] - theirs[key] for key in ours if key in theirs]
    if len(found) < FEWEST:
        return None
    p = paired_p(found)
    note = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.0995 else f"p = {p:.1f}"
    return Cell(statistics.fmean(found), statistics.stdev(found), len(found), metric.digits, note=note, signed=True)


def _by_repetition(runs: Sequence[Record], metric: Metric) -> dict[tuple[int, ...], float]:
    """The metric of each seed and class order; the mean where a run was repeated."""
    found = {}
    for group in repetitions(runs):
        values = [value for record in group if (value := metric.value(record)) is not None]
        if values:
            found[group[0].seed, *group[0].class_order] = statistics.fmean(values)
    return found
