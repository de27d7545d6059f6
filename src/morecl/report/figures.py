"""The figures of a report: which ones the records have data for, and the numbers that each one shows."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from morecl.records import Record
from morecl.report import plots
from morecl.report.grid import Column, arrange, columns_of, repetition_values, repetitions
from morecl.report.labels import figure_labels
from morecl.report.paper import REFERENCE
from morecl.report.parts import split
from morecl.report.plots import Floats, Style
from morecl.report.tables import stages, stored_numbers

_TITLES = {
    "accuracy": "Accuracy after each task",
    "roc": "Detection of unknown classes (ROC)",
    "reduction": "Performance reduction rate",
    "errors": "Direction of task errors",
    "time": "Seconds of a run, by stage",
    "entries": "Numbers stored, by part",
    "matrix": "Accuracy matrix",
}
_BENCHMARK = 80  # characters of a benchmark's name in titles and file names


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn at any width."""

    key: str  # of _TITLES
    name: str  # of its file
    title: str
    alt: str  # what it shows, in words
    column: Column
    plot: Callable[[float], Figure]
    notes: tuple[str, ...] = ()  # what its labels stand for, and what lies outside the axes

    def draw(self, width: float) -> Figure:
        """The figure ``width`` inches wide; a dollar sign in a name is just that."""
        with rc_context({"text.parse_math": False}):
            return self.plot(width)


def drawings(records: Sequence[Record]) -> list[Drawing]:
    """All figures that the records have data for, by benchmark, without what tables show apart."""
    grid, _ = split(arrange([record for record in records if record.method != REFERENCE]))
    row_styles = {row: plots.row_style(row, place) for place, row in enumerate(grid)}
    found: list[Drawing] = []
    for column in columns_of(grid):
        labels = figure_labels([row for row, cells in grid.items() if column in cells])
        runs = {label: grid[row][column] for row, label in labels.of.items()}
        styles = {label: row_styles[row] for row, label in labels.of.items()}
        full = {label: row.label for row, label in labels.of.items()}
        found += _of_column(column, runs, styles, full, labels.key)
    return _with_distinct_names(found)


def short_name(benchmark: str) -> str:
    """The end of a long path, which says more than its beginning."""
    return benchmark if len(benchmark) <= _BENCHMARK else f"…{benchmark[1 - _BENCHMARK :]}"


def _with_distinct_names(found: Sequence[Drawing]) -> list[Drawing]:
    """File names leave out most signs, so that two labels may give the same one: number the later ones."""
    used: set[str] = set()
    named = []
    for drawing in found:
        name = drawing.name
        for number in itertools.count(2):
            if name not in used:
                break
            name = f"{drawing.name}-{number}"
        used.add(name)
        named.append(replace(drawing, name=name))
    return named


def _of_column(
    column: Column,
    runs: Mapping[str, Sequence[Record]],
    styles: Mapping[str, Style],
    full_labels: Mapping[str, str],
    key: tuple[str, ...],
) -> Iterator[Drawing]:
    """The figures of one benchmark. The mappings are by label; ``key`` completes the labels."""

    def drawing(kind: str, alt: str, plot: Callable[[float], Figure], *notes: str, of: str = "") -> Drawing:
        name = re.sub(r"[^a-z0-9+]+", "-", f"{kind} {short_name(column.label)} {of}".lower()).strip("-")
        alt = f"{_TITLES[kind]}, {column.label}: {alt}."
        return Drawing(kind, name, full_labels.get(of, _TITLES[kind]), alt, column, plot, notes)

    lines = {label: _mean_over(many, lambda r: r.aca_per_step) for label, many in runs.items()}
    alt = "at the end " + ", ".join(f"{label} {line[-1]:.1f} %" for label, line in lines.items())
    clipped = plots.far_below(lines)
    note = [f"{label} (↓) leaves the axis and falls to {lines[label].min():.1f} %." for label in clipped]
    yield drawing("accuracy", alt, partial(plots.accuracy_lines, lines, styles, clipped), *note, *key)

    curves = {label: curve for label, many in runs.items() if (curve := _mean_roc(many)) is not None}
    if curves:
        areas = {label: statistics.fmean(repetition_values(runs[label], lambda r: r.metrics.auc)) for label in curves}
        alt = ", ".join(f"{label} AUC {area:.1f} %" for label, area in areas.items())
        yield drawing("roc", alt, partial(plots.roc_curves, curves, areas, styles), *key)

    falls = {label: values for label, many in runs.items() if (values := _reductions(many))}
    if falls:
        alt = ", ".join(f"{label} {statistics.fmean(values):.1f}" for label, values in falls.items())
        several = any(len(values) > 1 for values in falls.values())
        ranges = ["Bars: mean over runs; thin lines: from the smallest to the largest."] if several else []
        yield drawing("reduction", alt, partial(plots.reduction_bars, falls), *ranges, *key)

    shares = {label: share for label, many in runs.items() if (share := _mean_errors(many)) is not None}
    if shares:
        alt = ", ".join(f"{label} {early:.0f} % to earlier tasks" for label, (early, _) in shares.items())
        yield drawing("errors", alt, partial(plots.error_bars, shares), *key)

    alone = {label: [record for record in many if record.seconds_count] for label, many in runs.items()}
    seconds = {label: _mean_parts(many, stages) for label, many in alone.items() if many}
    if any(seconds.values()):
        alt = ", ".join(f"{label} {sum(parts.values()):.0f} s" for label, parts in seconds.items())
        cut, note = _cut(seconds)
        yield drawing("time", alt, lambda w: plots.stacked_bars(seconds, "seconds", 1.0, cut, w), *note, *key)

    stored = {label: _mean_parts(many, stored_numbers) for label, many in runs.items()}
    if any(stored.values()):
        alt = ", ".join(f"{label} {sum(parts.values()) / 1e6:.2f} million" for label, parts in stored.items())
        long, note = _cut(stored)
        yield drawing(
            "entries", alt, lambda w: plots.stacked_bars(stored, "millions of numbers", 1e6, long, w), *note, *key
        )

    for label, many in runs.items():
        matrix = _mean_over(many, lambda r: _floats(r.accuracy_matrix))
        last = ", ".join(f"{value:.0f}" for value in matrix[-1])
        alt = f"{full_labels[label]}, after the last task {last} % on tasks 1 to {len(matrix)}"
        yield drawing("matrix", alt, partial(plots.heat_map, matrix), of=label)


def _cut(parts: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[str]]:
    """Labels of the bars that run out of the axis, and the note that says so."""
    cut = plots.far_above({label: sum(amounts.values()) for label, amounts in parts.items()})
    return cut, [f"Cut off at the axis (→): {', '.join(cut)}."] if cut else []


def _mean_over(runs: Sequence[Record], value: Callable[[Record], ArrayLike]) -> Floats:
    """The mean of an array over seeds and class orders; runs with the same seed and order count as one."""
    means = [
        np.mean([np.asarray(value(record), dtype=np.float64) for record in same], axis=0) for same in repetitions(runs)
    ]
    return np.asarray(np.mean(means, axis=0))


def _floats(matrix: Sequence[Sequence[float | None]]) -> Floats:
    return np.array([[np.nan if value is None else value for value in row] for row in matrix])


def _mean_parts(runs: Sequence[Record], parts_of: Callable[[Record], Mapping[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for record in runs for name in parts_of(record)))
    means = _mean_over(runs, lambda record: [parts_of(record).get(name, 0.0) for name in names])
    return dict(zip(names, means.tolist(), strict=True))


def _reductions(runs: Sequence[Record]) -> list[float]:
    """One for each seed and class order; none with a single task."""
    return repetition_values(runs, lambda r: r.metrics.reduction_rate)


def _mean_errors(runs: Sequence[Record]) -> tuple[float, float] | None:
    early = repetition_values(runs, lambda r: r.metrics.errors_to_earlier)
    late = repetition_values(runs, lambda r: r.metrics.errors_to_later)
    return (statistics.fmean(early), statistics.fmean(late)) if early and late else None


def _mean_roc(runs: Sequence[Record]) -> tuple[Floats, Floats] | None:
    """The curve of a single run as it is; of several, the mean detection at each of 201 false positive rates."""
    with_curve = [record for record in runs if record.roc and record.metrics.auc is not None]
    if not with_curve:
        return None
    if len(with_curve) == 1:
        return _roc(with_curve[0])
    x = np.linspace(0, 100, 201)
    y = _mean_over(with_curve, lambda record: np.interp(x, *_roc(record)))
    return np.append(0.0, x), np.append(0.0, y)


def _roc(record: Record) -> tuple[Floats, Floats]:
    assert record.roc is not None
    return np.array(record.roc.false_positive_rate), np.array(record.roc.true_positive_rate)
