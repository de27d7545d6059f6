"""Tables from records: which runs are averaged together, what is compared, and how it differs from the paper."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from morecl import metrics
from morecl.catalogue import METHODS
from morecl.config import LearnerConfig
from morecl.records import Record
from morecl.report.paper import (
    BENCHMARKS,
    REFERENCE,
    UPPER_BOUND,
    method_title,
    paper,
    paper_number,
    paper_settings,
    setting,
    settings,
)

NOT_A_SETTING = LearnerConfig.with_role("repetition", "machine", "weights")
HELD_OUT = "held-out images"  # in the label of a row that is shown beside rows scored on the test set


@dataclass(frozen=True)
class Row:
    """A method, and the settings that tell it from other rows of the same method."""

    method: str
    variant: tuple[str, ...] = ()
    held_out: bool = False  # scored on held-out training images, and others are scored on the test set

    @property
    def label(self) -> str:
        name = method_title(self.method)
        return f"{name} ({', '.join(self.parts)})" if self.parts else name

    @property
    def parts(self) -> tuple[str, ...]:
        """What the label says beside the name."""
        return (*self.variant, HELD_OUT) if self.held_out else self.variant

    @property
    def competes(self) -> bool:
        return self.method not in (UPPER_BOUND, REFERENCE) and not self.held_out


@dataclass(frozen=True)
class Column:
    """A benchmark in a number of tasks."""

    benchmark: str
    tasks: int

    @property
    def label(self) -> str:
        name, usual = BENCHMARKS.get(self.benchmark, (self.benchmark, None))
        if self.tasks == usual:
            return name
        return f"{name} in {self.tasks} task{'s' if self.tasks > 1 else ''}"


Grid = dict[Row, dict[Column, list[Record]]]


@dataclass(frozen=True)
class Metric:
    key: str
    label: str
    value: Callable[[Record], float | None]
    best: Callable[[Iterable[float]], float] | None = max
    digits: int = 2
    averaged: bool = True
    of_reference: bool = False  # also meant for a model per task alone


@dataclass(frozen=True)
class Cell:
    """Mean over runs, sample standard deviation (``None`` for one run), and the paper's (mean, deviation)."""

    mean: float
    std: float | None
    n: int | None  # None: an average over benchmarks
    digits: int
    paper: tuple[float, float | None] | None = None
    best: bool = False

    def text(self, sign: str = " ± ") -> str:
        return _number(self.mean, self.std, self.digits, sign)

    def paper_text(self, sign: str = " ± ") -> str:
        return "" if self.paper is None else _number(*self.paper, self.digits, sign)


@dataclass(frozen=True)
class Table:
    """``cells[row][i]`` belongs to ``heads[i]`` = (benchmark or "Average", metric)."""

    key: str
    title: str
    caption: str
    heads: list[tuple[str, str]]
    rows: dict[Row, list[Cell | None]]
    same_n: int | None  # number of runs of every cell, None if they differ

    @property
    def full_caption(self) -> str:
        """The caption, how many runs a number stands for, and how to read the paper's numbers."""
        text = self.caption
        if self.same_n is None:
            text += " Mean ± sample standard deviation over n runs."
        elif self.same_n == 1:
            text += " One run each."
        else:
            text += f" Mean ± sample standard deviation over {self.same_n} runs each."
        if any(cell and cell.paper for cells in self.rows.values() for cell in cells):
            text += " In brackets: the paper."
        return text

    @property
    def groups(self) -> list[tuple[str, int]]:
        """(benchmark or "Average", number of its columns), from left to right."""
        return [(name, len(list(heads))) for name, heads in itertools.groupby(name for name, _ in self.heads)]

    def count(self, cell: Cell) -> str:
        """``n=3`` where cells differ in their number of runs."""
        return f"n={cell.n}" if self.same_n is None and cell.n else ""


def _of(name: str) -> Callable[[Record], float | None]:
    return lambda record: getattr(record.metrics, name)


_EARLIER = Metric("errors_to_earlier", "to earlier", _of("errors_to_earlier"), None)
_LATER = Metric("errors_to_later", "to later", _of("errors_to_later"), None)
_FWT, _BWT = Metric("fwt", "FWT", _of("fwt")), Metric("bwt", "BWT", _of("bwt"))

TABLES: dict[str, tuple[str, str, tuple[Metric, ...]]] = {
    "main": (
        "Accuracy",
        "ACA: accuracy on all classes after the last task. AIA: mean over tasks of the accuracy on the classes seen "
        "so far. Percent, higher is better.",
        (Metric("aca", "ACA", _of("aca")), Metric("aia", "AIA", _of("aia"))),
    ),
    "ood": (
        "Detection of unknown classes",
        "AUC: after the second last task, against the classes still to come. IAUC: mean of the AUC after each task "
        "but the last. Percent, higher is better, 50 is chance.",
        (Metric("auc", "AUC", _of("auc")), Metric("iauc", "IAUC", _of("iauc"))),
    ),
    "threshold": (
        "Detection at a threshold",
        "After the second last task. FPR95: unknowns accepted when 95 % of the knowns are, lower is better. AUPR: "
        "average precision with the unknown as positive, higher is better. Percent.",
        (Metric("fpr95", "FPR95", _of("fpr95"), min), Metric("aupr", "AUPR", _of("aupr"))),
    ),
    "tasks": (
        "Task known, and loss over time",
        "TIL: mean over tasks of the accuracy when the task is told, higher is better. Reduction: mean fall of a "
        "task's accuracy from when it was learned to the end, lower is better. Percent.",
        (
            Metric("til_accuracy", "TIL", _of("til_accuracy"), of_reference=True),
            Metric("reduction_rate", "Reduction", _of("reduction_rate"), min),
        ),
    ),
    "transfer": (
        "Transfer",
        "FWT: accuracy on a task when it is learned, minus that of a model of this task alone. BWT: the negative of "
        "the reduction. Percent, higher is better.",
        (_FWT, _BWT),
    ),
    "errors": (
        "Direction of errors",
        "Of the test images assigned to a wrong task after the last task: the share sent to an earlier and to a "
        "later one. Percent; 50 and 50 is balanced.",
        (_EARLIER, _LATER),
    ),
    "cost": (
        "Time and memory",
        "Seconds of a whole run. Entries: millions of numbers kept, without and with the replay buffer.",
        (
            Metric("seconds", "Seconds", lambda r: sum(stages(r).values()), None, 1, False, True),
            Metric("entries", "Entries", lambda r: _millions(r, buffer=False), None, 2, False, True),
            Metric("entries_with_buffer", "With buffer", lambda r: _millions(r, buffer=True), None, 2, False, True),
        ),
    ),
}


def stages(record: Record) -> dict[str, float]:
    """Seconds of each stage, without their sum."""
    return {name: value for name, value in record.seconds.items() if name != "total"}


def entry_parts(record: Record) -> dict[str, int]:
    """Numbers kept by each part (the replay buffer is one), without their sum."""
    return {name: value for name, value in record.entries.items() if name != "total"}


def _millions(record: Record, buffer: bool) -> float:
    parts = entry_parts(record)
    return sum(value for name, value in parts.items() if buffer or name != "buffer") / 1e6


def arrange(records: Sequence[Record]) -> Grid:
    """Records by row and column; those that differ only in seed, class order or machine share a place.

    A setting splits the rows of a method if it takes several values within one of its columns, or if the paper varies
    it (memory size, back-update, coefficient). Such a setting is named unless it is the paper's for that benchmark
    (or, where the paper has none, a switch that is on). What the config does not tell (backbone, number of images) is
    named only where it still makes a difference. Scores on held-out training images and on the test set never share a
    row.
    """
    mixed = len({record.data.scored_on for record in records}) > 1
    by_method: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_method[record.method].append(record)
    grid: Grid = {}
    for method, runs in by_method.items():
        config = [_settings(record) for record in runs]
        columns = [Column(record.benchmark, len(record.task_sizes)) for record in runs]
        keys = _varying(config, list(zip(columns, strict=True)))
        places = [
            (column, record.data.scored_on, *_values(values, keys))
            for record, column, values in zip(runs, columns, config, strict=True)
        ]
        extra = [_facts(record) for record in runs]
        more_keys = _varying(extra, places)
        for record, column, values, facts in zip(runs, columns, config, extra, strict=True):
            ablated = [key for key in values if key not in keys and _is_ablated(record, key, values[key])]
            named = [_describe(record, key, values.get(key)) for key in sorted([*keys, *ablated])]
            named += [f"{key} {facts[key]}" for key in more_keys]
            held_out = mixed and record.data.scored_on == "validation"
            row = Row(method, tuple(text for text in named if text), held_out)
            grid.setdefault(row, {}).setdefault(column, []).append(record)
    return dict(sorted(grid.items(), key=lambda item: _row_order(item[0])))


def columns_of(grid: Grid) -> list[Column]:
    """All columns, benchmarks of the paper first."""
    names = list(BENCHMARKS)
    columns = {column for row in grid.values() for column in row}
    return sorted(
        columns, key=lambda c: (names.index(c.benchmark) if c.benchmark in names else 99, c.benchmark, c.tasks)
    )


def build_tables(records: Sequence[Record]) -> list[Table]:
    """All tables that the records have numbers for."""
    grid = arrange(with_fwt(records))
    built = [_table(grid, key) for key in TABLES]
    return [table for table in built if table.rows and (table.key != "transfer" or _has(grid, _FWT))]


def _table(grid: Grid, key: str) -> Table:
    title, caption, wanted = TABLES[key]
    heads: list[tuple[str, str]] = []
    body: dict[Row, list[Cell | None]] = {row: [] for row in grid}
    by_metric: dict[Metric, list[dict[Row, Cell]]] = {metric: [] for metric in wanted}
    for column in columns_of(grid):
        for metric in wanted:
            meant = [row for row in grid if row.method != REFERENCE or metric.of_reference]
            cells = {row: cell for row in meant if (cell := _cell(grid[row].get(column, []), metric))}
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
            averages = {row: _average([cells[row] for cells in columns]) for row in complete}
            heads.append(("Average", metric.label))
            marked = _mark_best(averages, metric)
            for row in grid:
                body[row].append(marked.get(row))
    body = {row: cells for row, cells in body.items() if any(cells)}
    counts = {cell.n for cells in body.values() for cell in cells if cell and cell.n}
    return Table(key, title, caption, heads, body, counts.pop() if len(counts) == 1 else None)


def _cell(runs: Sequence[Record], metric: Metric) -> Cell | None:
    values = [value for record in runs if (value := metric.value(record)) is not None]
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else None
    theirs = {paper_number(record, metric.key) for record in runs}
    return Cell(statistics.fmean(values), std, len(values), metric.digits, theirs.pop() if len(theirs) == 1 else None)


def _average(cells: Sequence[Cell]) -> Cell:
    theirs = [cell.paper[0] for cell in cells if cell.paper]
    mean_there = (statistics.fmean(theirs), None) if len(theirs) == len(cells) else None
    return Cell(statistics.fmean(cell.mean for cell in cells), None, None, cells[0].digits, mean_there)


def _mark_best(cells: dict[Row, Cell], metric: Metric) -> dict[Row, Cell]:
    """The best of at least two competing rows, as printed: equal after rounding is equally good."""
    shown = {row: round(cell.mean, cell.digits) for row, cell in cells.items() if row.competes}
    if metric.best is None or len(shown) < 2:
        return cells
    top = metric.best(shown.values())
    return {row: Cell(c.mean, c.std, c.n, c.digits, c.paper, best=shown.get(row) == top) for row, c in cells.items()}


def with_fwt(records: Sequence[Record]) -> list[Record]:
    """The records with forward transfer, where a run of ``single`` with the same data, order and backbone exists.

    A reference is the diagonal of its task-told matrix, averaged over its seeds. References of several settings are
    not mixed: there, forward transfer stays undefined (:func:`notes` says so).
    """
    references: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record.method == REFERENCE:
            references[_same_tasks(record)].append(record)
    filled = []
    for record in records:
        alone = references.get(_same_tasks(record), [])
        if record.method != REFERENCE and record.metrics.fwt is None and alone and not _several_settings(alone):
            diagonals = np.array([np.diag(np.array(single.til_matrix, dtype=np.float64)) for single in alone])
            diagonal = diagonals.mean(axis=0)
            update = {"fwt": metrics.fwt(record.accuracy_matrix, diagonal)}
            record = record.model_copy(update={"metrics": record.metrics.model_copy(update=update)})
        filled.append(record)
    return filled


def notes(records: Sequence[Record]) -> list[str]:
    """In plain words: what differs from the paper, and what a reader could take for more than it is."""
    grid = arrange(records)
    columns = columns_of(grid)
    found = []
    compared = [column for column in columns if paper_settings(column.benchmark)]
    if compared:
        found.append(f"Numbers of the paper: {paper()['source']}.")
    runs_of = {column: [r for row in grid.values() for r in row.get(column, [])] for column in columns}
    for label, ours, theirs in _DIFFERENCES:
        parts = []
        for column in compared:
            there = theirs(column.benchmark)
            here = {value for record in runs_of[column] if (value := ours(record)) is not None}
            if here and there is not None and here != {there}:
                parts.append((column.label, f"{_range(here)} (paper: {_range({there})})"))
        if parts:
            texts = {text for _, text in parts}
            everywhere = len(texts) == 1 and len(parts) == len(compared)
            listed = parts[0][1] if everywhere else "; ".join(f"{name} {text}" for name, text in parts)
            found.append(f"{label}: {listed}.")
    counts = {len(runs) for row in grid.values() for column, runs in row.items() if column in compared}
    if counts and counts != {paper()["runs"]}:
        found.append(f"Runs per number: {_range(counts)} (paper: {paper()['runs']}).")
    absent = [column.label for column in columns if column not in compared]
    if absent:
        found.append(f"Not in the paper: {', '.join(absent)}.")
    variants = {row.method for row in grid if row.variant}
    if compared and any(row.method in variants and not row.variant for row in grid):
        found.append("Where a method has several rows, the one without a setting in brackets has the paper's values.")
    found += held_out_note(grid)
    repeated = [
        f"{row.label} on {column.label}"
        for row, cells in grid.items()
        for column, runs in cells.items()
        if len({(r.seed, tuple(r.class_order)) for r in runs}) < len(runs)
    ]
    if repeated:
        found.append(f"The same seed and class order more than once, so no fair deviation: {', '.join(repeated)}.")
    if any(row.method == UPPER_BOUND for row in grid):
        found.append(f"{method_title(UPPER_BOUND)} keeps all data: an upper bound, never in bold.")
    if len([row for row in grid if row.method == REFERENCE]) > 1:
        found.append(
            f"{method_title(REFERENCE)} was run with several settings; forward transfer is left out where they mix."
        )
    return found


def held_out_note(grid: Grid) -> list[str]:
    """Which numbers are not of the test set; nothing if all are."""
    if any(row.held_out for row in grid):
        return [
            f"Rows of {HELD_OUT} are scored on training images kept from training, not on the test set: never ranked."
        ]
    if any(r.data.scored_on == "validation" for row in grid.values() for runs in row.values() for r in runs):
        labels = ", ".join(column.label for column in columns_of(grid))
        return [f"Scored on held-out training images, not on the test set: {labels}."]
    return []


_DIFFERENCES: list[tuple[str, Callable[[Record], Any], Callable[[str], Any]]] = [
    ("Backbone", lambda record: record.backbone.name, lambda benchmark: paper()["backbone"]),
    ("Image size", lambda record: setting(record, "image_size"), lambda benchmark: paper()["image_size"]),
    ("Tasks", lambda record: len(record.task_sizes), lambda benchmark: paper_settings(benchmark).get("tasks")),
    *(
        (label, lambda record, key=key: setting(record, key), lambda name, key=key: paper_settings(name).get(key))
        for label, key in [
            ("Epochs", "epochs"),
            ("Learning rate (the paper's is that of MORE)", "lr"),
            ("Bottleneck", "bottleneck"),
            ("Memory size", "memory_size"),
            ("Back-update", "back_update"),
        ]
    ),
    *(
        (label, lambda record, key=key: getattr(record.data, key), lambda name, key=key: paper_settings(name).get(key))
        for label, key in [("Training images", "train_images"), ("Test images", "test_images")]
    ),
]


def _settings(record: Record) -> dict[str, Any]:
    flat = {"freeze_backbone": True} | settings(record)  # a record that does not say so is of the time before
    return {path: value for path, value in flat.items() if path.split(".")[-1] not in NOT_A_SETTING}


def _facts(record: Record) -> dict[str, Any]:
    """What tells experiments apart beside the config."""
    return {
        "backbone": record.backbone.name,
        "weights": record.backbone.sha256[:8],
        "train images": record.data.train_images,
        "test images": record.data.test_images,
        # images held out for validation are others with every seed
        "data": record.data.fingerprint[:8] if record.data.scored_on == "test" else "",
    }


def _values(values: dict[str, Any], keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(json.dumps(values.get(key), sort_keys=True) for key in keys)


def _varying(settings: Sequence[dict[str, Any]], places: Sequence[tuple[Any, ...]]) -> list[str]:
    """Keys with more than one value among records of the same place, sorted."""
    seen: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    all_keys = sorted({key for values in settings for key in values})
    for values, place in zip(settings, places, strict=True):
        for key, value in zip(all_keys, _values(values, all_keys), strict=True):
            seen[*place, key].add(value)
    return sorted({place[-1] for place, values in seen.items() if len(values) > 1})


def _is_ablated(record: Record, path: str, value: Any) -> bool:
    """Whether the paper varies this setting and its usual value is known."""
    key = path.split(".")[-1]
    if key == "memory_size":
        return bool(value) and key in paper_settings(record.benchmark)
    return key in ("back_update", "coefficient")


def _describe(record: Record, path: str, value: Any) -> str | None:
    """A setting in words, ``None`` for the usual one."""
    key = path.split(".")[-1]
    words = key.replace("_", " ")
    theirs = paper_settings(record.benchmark).get(key)
    if value == theirs and theirs is not None:
        return None
    if isinstance(value, bool):
        return f"no {words}" if not value else (words if theirs is not None else None)
    if key == "memory_size" and value and theirs == 2 * value:
        return "half memory"
    return f"{words} {'none' if value is None else value}"


def _row_order(row: Row) -> tuple[float, str, bool, int, tuple[str, ...]]:
    places = {name: float(place) for place, name in enumerate(METHODS)}
    just_before_more = places["more"] - 0.5
    return places.get(row.method, just_before_more), row.method, row.held_out, len(row.variant), row.variant


def _same_tasks(record: Record) -> tuple[Any, ...]:
    order, sizes, data = tuple(record.class_order), tuple(record.task_sizes), record.data
    return record.benchmark, order, sizes, record.backbone.sha256, data.train_images, data.test_images, data.scored_on


def _several_settings(runs: Sequence[Record]) -> bool:
    return len({json.dumps(_settings(record), sort_keys=True) for record in runs}) > 1


def _has(grid: Grid, metric: Metric) -> bool:
    return any(metric.value(r) is not None for row in grid.values() for runs in row.values() for r in runs)


def _number(mean: float, std: float | None, digits: int, sign: str) -> str:
    return f"{mean:.{digits}f}" + ("" if std is None else f"{sign}{std:.{digits}f}")


def _range(values: Iterable[Any]) -> str:
    """``on``/``off``, a number with thousands, several values in order."""

    def show(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:,}" if isinstance(value, int) else str(value)

    return ", ".join(show(value) for value in sorted(values))
