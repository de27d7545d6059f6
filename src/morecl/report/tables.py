"""The tables of a report: metrics by method and benchmark, with the paper's numbers where there are any."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from morecl.records import Record
from morecl.report.grid import Column, Grid, Row, arrange, columns_of, repetition_values
from morecl.report.paper import (
    AUTHORS,
    OTHER,
    OURS,
    PAPERS,
    REFERENCE,
    back_update,
    paper,
    paper_average,
    paper_number,
    same_backbone,
)
from morecl.report.parts import split
from morecl.report.transfer import with_fwt

OTHER_BACKBONE = "†"  # marks a number of the paper that is for another backbone


@dataclass(frozen=True)
class Metric:
    """A number of a record, and how tables show it."""

    key: str
    label: str
    meaning: str
    value: Callable[[Record], float | None]
    best: Callable[[Iterable[float]], float] | None = max
    digits: int = 2
    averaged: bool = True  # over benchmarks
    of_reference: bool = False  # also meaningful for one model per task


@dataclass(frozen=True)
class TableKind:
    """The metrics that stand together in one table."""

    title: str
    metrics: tuple[Metric, ...]
    unit: str
    before: str = ""

    @property
    def caption(self) -> str:
        """What the metrics mean and in which unit."""
        meanings = [f"{metric.label[0].upper()}{metric.label[1:]}: {metric.meaning}." for metric in self.metrics]
        return " ".join(part for part in (self.before, *meanings, self.unit) if part)

    def meaning(self, label: str) -> str:
        """What the metric with that label means."""
        return next(metric.meaning for metric in self.metrics if metric.label == label)


@dataclass(frozen=True)
class Cell:
    """Mean over runs, sample standard deviation (``None`` for one run), and the paper's (mean, deviation)."""

    mean: float
    std: float | None
    n: int | None  # distinct seeds and class orders; None: an average over benchmarks
    digits: int
    paper: tuple[float, float | None] | None = None
    best: bool = False
    same_backbone: bool = False  # as the paper's number is for
    note: str = ""  # stands behind the number
    signed: bool = False  # a difference

    @property
    def constant(self) -> bool:
        """Whether several runs have the same number."""
        return self.std == 0

    @property
    def texts(self) -> tuple[str, str]:
        """Mean and deviation, the latter empty if there is none."""
        mean, _, deviation = self.text("|").partition("|")
        return mean, deviation

    def text(self, sign: str = " ± ") -> str:
        """Mean and deviation in one text."""
        plus = "+" if self.signed and self.mean >= 0 else ""
        return plus + _number(self.mean, self.std, self.digits, sign)

    def paper_text(self, sign: str = " ± ") -> str:
        """The paper's mean and deviation, marked if for another backbone; empty if it has none."""
        if self.paper is None:
            return ""
        return _number(*self.paper, self.digits, sign) + ("" if self.same_backbone else OTHER_BACKBONE)


@dataclass(frozen=True)
class Table:
    """``rows[row][i]`` belongs to ``heads[i]`` = (benchmark or "Average", metric)."""

    key: str
    title: str
    caption: str
    heads: list[tuple[str, str]]
    rows: dict[Row, list[Cell | None]]
    same_n: int | None  # number of runs behind every cell, None if they differ

    @property
    def full_caption(self) -> str:
        """The caption, the number of runs behind a number, and how to read the paper's numbers."""
        text = self.caption
        if self.same_n is None:
            text += " Mean ± sample standard deviation over n runs."
        elif self.same_n == 1:
            text += " One run each."
        else:
            text += f" Mean ± sample standard deviation over {self.same_n} runs each."
        return f"{text} {self.paper_caption}" if self.has_paper else text

    @property
    def paper_caption(self) -> str:
        """How to read the paper's numbers; empty if there are none."""
        theirs = [cell for cells in self.rows.values() for cell in cells if cell and cell.paper]
        if not theirs:
            return ""
        if all(cell.same_backbone for cell in theirs):
            return "In brackets: the paper."
        return f"In brackets: the paper; {OTHER_BACKBONE} with its own backbone ({paper()['backbone']}), not this one."

    @property
    def has_paper(self) -> bool:
        """Whether the paper has one of the numbers."""
        return any(cell and cell.paper for cells in self.rows.values() for cell in cells)

    @property
    def has_constant(self) -> bool:
        """Whether a number is the same in several runs."""
        return any(cell and cell.constant for cells in self.rows.values() for cell in cells)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """(benchmark or "Average", number of its columns), from left to right."""
        return [(name, len(list(heads))) for name, heads in itertools.groupby(name for name, _ in self.heads)]

    def count(self, cell: Cell) -> str:
        """``n=3`` where cells differ in their number of runs, and the cell's note."""
        number = f"n={cell.n}" if self.same_n is None and cell.n else ""
        return ", ".join(part for part in (number, cell.note) if part)


def stages(record: Record) -> dict[str, float]:
    """Seconds of each stage, without their sum."""
    return {name: value for name, value in record.seconds.items() if name != "total"}


def stored_numbers(record: Record) -> dict[str, int]:
    """How many numbers each part stores (the replay buffer is one part), without their sum."""
    return {name: value for name, value in record.entries.items() if name != "total"}


def _of(name: str) -> Callable[[Record], float | None]:
    return lambda record: getattr(record.metrics, name)


def _millions(buffer: bool) -> Callable[[Record], float]:
    return lambda record: (
        sum(value for name, value in stored_numbers(record).items() if buffer or name != "buffer") / 1e6
    )


_FWT = Metric(
    "fwt", "FWT", "accuracy on a task right after learning it, minus that of a model of this task alone", _of("fwt")
)

TABLE_KINDS = {
    "main": TableKind(
        "Accuracy",
        (
            Metric("aca", "ACA", "accuracy on all classes after the last task", _of("aca")),
            Metric("aia", "AIA", "accuracy on the classes seen so far, averaged over tasks", _of("aia")),
        ),
        "Percent, higher is better.",
    ),
    "ood": TableKind(
        "Detection of unknown classes",
        (
            Metric("auc", "AUC", "after the second-to-last task, against the classes still to come", _of("auc")),
            Metric("iauc", "IAUC", "mean AUC after each task but the last", _of("iauc")),
        ),
        "Percent, higher is better, 50 is chance.",
    ),
    "threshold": TableKind(
        "Detection at a threshold",
        (
            Metric(
                "fpr95", "FPR95", "unknowns accepted when 95 % of the knowns are, lower is better", _of("fpr95"), min
            ),
            Metric(
                "aupr", "AUPR", "average precision with unknown as the positive class, higher is better", _of("aupr")
            ),
        ),
        "Percent.",
        before="After the second-to-last task.",
    ),
    "tasks": TableKind(
        "Accuracy with the task given, and forgetting",
        (
            Metric(
                "til_accuracy", "TIL", "accuracy when the task is given, averaged over tasks, higher is better",
                _of("til_accuracy"), of_reference=True,
            ),
            Metric(
                "reduction_rate", "Reduction",
                "how much a task's accuracy falls from when it was learned to the end, on average, lower is better",
                _of("reduction_rate"), min,
            ),
        ),
        "Percent.",
    ),
    "transfer": TableKind(
        "Transfer",
        (_FWT, Metric("bwt", "BWT", "the negative of the reduction", _of("bwt"))),
        "Percent, higher is better.",
    ),
    "errors": TableKind(
        "Direction of errors",
        (
            Metric(
                "errors_to_earlier", "to earlier",
                "of the test images assigned to a wrong task, the share assigned to an earlier one",
                _of("errors_to_earlier"), None,
            ),
            Metric("errors_to_later", "to later", "the share assigned to a later one", _of("errors_to_later"), None),
        ),
        "Percent, after the last task; 50 and 50 is balanced.",
    ),
    "cost": TableKind(
        "Time and memory",
        (
            Metric(
                "seconds", "Seconds",
                "of training, back-update and evaluation; none if other runs used the same card or cores",
                lambda r: sum(stages(r).values()) if r.seconds_count else None, None, 1, False, True,
            ),
            Metric(
                "entries", "Entries", "millions of numbers stored, without the replay buffer", _millions(buffer=False),
                None, 2, False, True,
            ),
            Metric(
                "entries_with_buffer", "With buffer", "the same with the replay buffer", _millions(buffer=True),
                None, 2, False, True,
            ),
        ),
        "",
    ),
}  # fmt: skip


def build_tables(records: Sequence[Record]) -> list[Table]:
    """All tables that the records have numbers for; those of :func:`morecl.report.parts.split` come last."""
    grid, parts = split(arrange(with_fwt(records)))
    built = [_table(grid, key, kind) for key, kind in TABLE_KINDS.items()]
    for part in parts:
        for key, metrics_shown in part.tables.items():
            kind = TABLE_KINDS[key]
            shown = tuple(m for m in kind.metrics if not metrics_shown or m.key in metrics_shown)
            titled = replace(kind, title=f"{kind.title}, {part.title}", metrics=shown)
            built.append(_table(part.grid, f"{key}-{part.key}", titled))
    return [table for table in built if table.rows and (table.key != "transfer" or _has(grid, _FWT))]


def _table(grid: Grid, key: str, kind: TableKind) -> Table:
    heads: list[tuple[str, str]] = []
    body: dict[Row, list[Cell | None]] = {row: [] for row in grid}
    by_metric: dict[Metric, list[dict[Row, Cell]]] = {metric: [] for metric in kind.metrics}
    for column in columns_of(grid):
        beside = _beside_the_paper(grid, column)
        for metric in kind.metrics:
            meant = [row for row in grid if row.method != REFERENCE or metric.of_reference]
            cells = {row: cell for row in meant if (cell := _cell(grid[row].get(column, []), metric))}
            if not beside:
                cells = {row: replace(cell, paper=None) for row, cell in cells.items()}
            if not cells:
                continue
            by_metric[metric].append(cells)
            heads.append((column.label, metric.label))
            marked = _mark_best(cells, metric)
            for row in grid:
                body[row].append(marked.get(row))
    for metric, columns in by_metric.items():
        if metric.averaged and len(columns) > 1:
            complete = [row for row in grid if all(row in cells for cells in columns)]
            averages = {
                row: _average(
                    [cells[row] for cells in columns], [r for runs in grid[row].values() for r in runs], metric
                )
                for row in complete
            }
            if not all(_beside_the_paper(grid, column) for column in columns_of(grid)):
                averages = {row: replace(cell, paper=None) for row, cell in averages.items()}
            if not averages:
                continue
            heads.append(("Average", metric.label))
            marked = _mark_best(averages, metric)
            for row in grid:
                body[row].append(marked.get(row))
    body = {row: cells for row, cells in body.items() if any(cells)}
    counts = {cell.n for cells in body.values() for cell in cells if cell and cell.n}
    return Table(key, kind.title, kind.caption, heads, body, counts.pop() if len(counts) == 1 else None)


def _beside_the_paper(grid: Grid, column: Column) -> bool:
    """Whether the paper's numbers may stand in a column: not if its only MORE has a back-update that is not theirs.

    Readers would take that row for the MORE of the paper. One without any back-update is an ablation, and no remedy.
    """
    more = [record for cells in grid.values() for record in cells.get(column, []) if record.method == "more"]
    whose = {back_update(record) for record in more}
    return not whose & {OURS, OTHER} or bool(whose & {PAPERS, AUTHORS})


def _cell(runs: Sequence[Record], metric: Metric) -> Cell | None:
    values = repetition_values(runs, metric.value)
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else None
    theirs = {paper_number(record, metric.key) for record in runs}
    there = theirs.pop() if len(theirs) == 1 else None
    return Cell(
        statistics.fmean(values), std, len(values), metric.digits, there, same_backbone=all(map(same_backbone, runs))
    )


def _average(cells: Sequence[Cell], runs: Sequence[Record], metric: Metric) -> Cell:
    theirs = [cell.paper[0] for cell in cells if cell.paper]
    there = (statistics.fmean(theirs), None) if len(theirs) == len(cells) else paper_average(runs, metric.key)
    same = all(cell.same_backbone for cell in cells)
    return Cell(statistics.fmean(cell.mean for cell in cells), None, None, metric.digits, there, same_backbone=same)


def _mark_best(cells: dict[Row, Cell], metric: Metric) -> dict[Row, Cell]:
    """Mark the best of at least two competing rows; rows that print the same number are equally good."""
    shown = {row: round(cell.mean, cell.digits) for row, cell in cells.items() if row.competes}
    if metric.best is None or len(shown) < 2:
        return cells
    top = metric.best(shown.values())
    return {row: replace(cell, best=shown.get(row) == top) for row, cell in cells.items()}


def _has(grid: Grid, metric: Metric) -> bool:
    return any(metric.value(r) is not None for row in grid.values() for runs in row.values() for r in runs)


def _number(mean: float, std: float | None, digits: int, sign: str) -> str:
    return f"{mean:.{digits}f}" + ("" if std is None else f"{sign}{std:.{digits}f}")
