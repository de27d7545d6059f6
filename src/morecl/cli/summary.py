"""The table of results in the terminal. Never imports torch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from morecl.cli.terminal import printable
from morecl.records import Record
from morecl.report.grid import Column, arrange, repetition_mean, repetition_values, repetitions
from morecl.report.notes import caveats

_MEANINGS = {  # of the metric columns
    "ACA": "accuracy on all classes after the last task",
    "AIA": "accuracy on all classes seen so far, mean over tasks",
    "TIL": "accuracy with the task given, mean over tasks (ACA: over images)",
    "AUC": "unknown against known classes, after the second-last task",
    "IAUC": "the same AUC, mean over tasks",
}
_DROPPED_FIRST = ("s", "IAUC", "AIA", "AUC", "TIL", "runs")  # if the terminal is too narrow
_NAME_WIDTH = 12  # characters of a method's or benchmark's name before it wraps, at least


def print_summary(records: Sequence[Record], console: Console, lost: Sequence[str] = ()) -> None:
    """Print one line per method and benchmark: means over runs, as many columns as fit, each benchmark's best green.

    Only ACA has its deviation; documents (:mod:`morecl.report.formats`) have all.

    ``lost``: notes on records that are not among them.
    """
    grid = arrange(records)
    ranked: dict[Column, list[float]] = defaultdict(list)
    for row, places in grid.items():
        for column, runs in places.items():
            if row.competes:
                ranked[column].append(repetition_mean(runs, lambda r: r.metrics.aca) or 0.0)
    lines: list[dict[str, str]] = []
    is_best: list[bool] = []
    for row, places in grid.items():
        for column, runs in places.items():
            names = ("aca", "aia", "til_accuracy", "auc", "iauc")
            means = [repetition_mean(runs, attrgetter(f"metrics.{name}")) for name in names]
            cells = ["-" if value is None else f"{value:.2f}" for value in means]
            acas = repetition_values(runs, lambda r: r.metrics.aca)
            if len(acas) > 1:
                cells[0] += f" ± {statistics.stdev(acas):.2f}"
            seconds = repetition_mean(runs, lambda r: r.seconds.get("total") if r.seconds_count else None)
            lines.append(
                {"method": row.label, "benchmark": column.label, "runs": str(len(repetitions(runs)))}
                | dict(zip(_MEANINGS, cells, strict=True))
                | {"s": "-" if seconds is None else f"{seconds:.0f}"}
            )
            is_best.append(row.competes and len(ranked[column]) > 1 and means[0] == max(ranked[column]))
    heads = _fitting_columns(lines, console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        name = head in ("method", "benchmark")
        style = "bold" if head == "method" else None
        table.add_column(head, style=style, justify="left" if name else "right", no_wrap=not name, overflow="fold")
    for line, best in zip(lines, is_best, strict=True):
        table.add_row(*(Text(line[head]) for head in heads), style="green" if best else None)
    console.print(table)
    legend = [f"{head}: {meaning}." for head, meaning in _MEANINGS.items() if head in heads]
    if any("±" in line["ACA"] for line in lines):
        legend.insert(0, "Means over runs; ±: sample standard deviation.")
    console.print(f"Percent. {' '.join(legend)}", style="dim", highlight=False)
    for note in (*map(printable, lost), *caveats(grid)):
        console.print(note, style="dim", markup=False, emoji=False)


def _fitting_columns(lines: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that fit into ``width``. Names may wrap, numbers may not."""
    widths = {head: max(len(line[head]) for line in (*lines, {head: head})) + 3 for head in lines[0]}
    for head in ("method", "benchmark"):
        widths[head] = min(widths[head], _NAME_WIDTH + 3)
    for head in _DROPPED_FIRST:
        if sum(widths.values()) > width:
            del widths[head]
    return list(widths)
