"""Figures from records, as matplotlib ``Figure`` objects without global state, and as SVG or PNG."""

from __future__ import annotations

import functools
import html
import io
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from morecl.errors import InputError, unknown_name
from morecl.files import atomic_path
from morecl.records import Record
from morecl.report.paper import REFERENCE, method_title
from morecl.report.tables import HELD_OUT, Column, Row, arrange, columns_of, entry_parts, stages

Floats = NDArray[np.float64]
FORMATS = ("svg", "png")
WIDE, NARROW = 7.6, 3.7  # inches: for a page and for a phone
_LABEL, _NAME, _PART, _BENCHMARK = 36, 12, 24, 80  # characters: a row's label, its method, one setting; a benchmark
_TITLES = {
    "accuracy": "Accuracy after each task",
    "matrix": "Accuracy matrix",
    "roc": "Detection of unknown classes (ROC)",
    "errors": "Where wrong task choices go",
    "time": "Time of a run by stage",
    "entries": "Numbers kept",
}
# Okabe and Ito's colours, told apart by the colour-blind; their yellow, too pale on white, is a grey here.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
_MARKERS = "osD^vP*X<>hpd"  # 13 and 7 colours: no pair repeats within 91 rows
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)))
_HATCHES = ("", "///", "...")
_INK, _FAINT = "#1b1d22", "#d5d8de"
_HEAT = LinearSegmentedColormap.from_list("heat", ["#f4f6fb", "#9cc3e0", "#3b82b8", "#123f6d"], N=40)


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn at any width; ``alt`` says in words what it shows."""

    key: str
    name: str
    title: str
    alt: str
    column: Column
    draw: Callable[[float], Figure]


def drawings(records: Sequence[Record]) -> list[Drawing]:
    """All figures that the records have data for, by benchmark."""
    grid = arrange([record for record in records if record.method != REFERENCE])
    labels = short_labels(grid)
    styles = {labels[row]: _style(row, place) for place, row in enumerate(grid)}
    found: list[Drawing] = []
    for column in columns_of(grid):
        runs = {labels[row]: cells[column] for row, cells in grid.items() if column in cells}
        found += _of_column(runs, column, styles)
    return found


def short_labels(rows: Iterable[Row]) -> dict[Row, str]:
    """Labels that figures have room for, no two alike; those that are short enough are as in the tables."""
    rows = list(rows)
    shared = Counter((row.method, part) for row in rows for part in row.parts if part != HELD_OUT)
    labels: dict[Row, str] = {}
    used: Counter[str] = Counter()
    for row in rows:
        label = _short_label(row, shared)
        used[label] += 1
        labels[row] = label if used[label] == 1 else f"{label} #{used[label]}"
    return labels


def _short_label(row: Row, shared: Counter[tuple[str, str]]) -> str:
    """A long label without the settings that most rows of the method share; an ellipsis says that some are missing."""
    if len(row.label) <= _LABEL:
        return row.label
    name = _cut(method_title(row.method), _NAME if row.parts else _LABEL)
    kept = list(row.parts)
    while kept:
        parts = [_cut(part, _PART) for part in kept] + ["…"] * (len(kept) < len(row.parts))
        label = f"{name} ({', '.join(parts)})"
        if len(label) <= _LABEL:
            return label
        kept.remove(max(reversed(kept), key=lambda part: shared[row.method, part]))
    return name


def _cut(text: str, length: int) -> str:
    """Without its middle: a setting's value is at the end."""
    end = length // 3
    return text if len(text) <= length else f"{text[: length - end - 1]}…{text[-end:]}"


def _tail(benchmark: str) -> str:
    """Of a long path the end: it says more than the beginning."""
    return benchmark if len(benchmark) <= _BENCHMARK else f"…{benchmark[1 - _BENCHMARK :]}"


def write_figures(records: Sequence[Record], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Every figure as a file in ``folder``; the paths written."""
    for name in formats:
        if name not in FORMATS:
            raise unknown_name("figure format", name, FORMATS)
    written = []
    for drawing in drawings(records):
        figure = titled(drawing)
        for name in formats:
            path = folder / f"{drawing.name}.{name}"
            data = svg(figure, drawing.title, text=False).encode() if name == "svg" else _png(figure)
            try:
                with atomic_path(path) as temporary:
                    temporary.write_bytes(data)
            except OSError as error:
                raise InputError(f"cannot write the figure {path}: {error}") from error
            written.append(path)
    return written


def titled(drawing: Drawing) -> Figure:
    """The wide figure with its title above; it grows by the lines that a long title takes beyond the first."""
    figure = drawing.draw(WIDE)
    lines = textwrap.wrap(f"{drawing.title}, {_tail(drawing.column.label)}", width=int(11 * figure.get_figwidth()))
    figure.set_figheight(figure.get_figheight() + 0.17 * (len(lines) - 1))
    figure.suptitle("\n".join(lines), fontsize=10, color=_INK, parse_math=False)
    return figure


def svg(figure: Figure, title: str, text: bool = True) -> str:
    """The figure as SVG, the same bytes every time. ``text``: letters as text (for a page), else as outlines."""
    options = {"svg.hashsalt": "morecl", "svg.fonttype": "none" if text else "path"}
    buffer = io.StringIO()
    with rc_context(options):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Title": title})
    return buffer.getvalue()


def inline_svg(figure: Figure, alt: str, prefix: str) -> str:
    """SVG to put into a page: fills its box, takes the page's colours; ``prefix`` keeps its ids apart from others."""
    image = svg(figure, alt)
    image = re.sub(r"<(metadata|title)>.*?</\1>", "", image[image.index("<svg") :], flags=re.DOTALL)
    head, _, rest = image.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    head = head.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"')
    image = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", f"{head}>{rest}")
    return image.replace(_INK, "currentColor").replace(_FAINT, "var(--line)")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.set_facecolor("white")
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    figure.set_facecolor("none")
    return buffer.getvalue()


@dataclass(frozen=True)
class _Style:
    colour: str
    marker: str
    dash: Any
    width: float = 1.5


def _style(row: Row, place: int) -> _Style:
    """MORE in ink and thick, the others by place in colour, marker and dash."""
    style = _Style(
        _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)], _DASHES[place // len(_COLOURS) % len(_DASHES)]
    )
    return replace(style, colour=_INK, dash="-", width=2.6) if row == Row("more") else style


def _of_column(runs: dict[str, list[Record]], column: Column, styles: dict[str, _Style]) -> Iterator[Drawing]:
    def drawing(key: str, alt: str, draw: Callable[[float], Figure], of: str = "") -> Drawing:
        name = re.sub(r"[^a-z0-9+]+", "-", f"{key} {_tail(column.label)} {of}".lower()).strip("-")
        return Drawing(key, name, of or _TITLES[key], f"{_TITLES[key]}, {column.label}: {alt}.", column, draw)

    lines = {label: _mean([record.aca_per_step for record in many]) for label, many in runs.items()}
    alt = "at the end " + ", ".join(f"{label} {line[-1]:.1f} %" for label, line in lines.items())
    yield drawing("accuracy", alt, lambda width: _lines(lines, styles, width))

    curves = {label: curve for label, many in runs.items() if (curve := _mean_roc(many)) is not None}
    if curves:
        areas = {
            label: statistics.fmean(r.metrics.auc for r in runs[label] if r.metrics.auc is not None) for label in curves
        }
        alt = ", ".join(f"{label} AUC {area:.1f} %" for label, area in areas.items())
        yield drawing("roc", alt, lambda width: _roc(curves, areas, styles, width))

    shares = {label: share for label, many in runs.items() if (share := _mean_errors(many)) is not None}
    if shares:
        alt = ", ".join(f"{label} {early:.0f} % to earlier tasks" for label, (early, _) in shares.items())
        yield drawing("errors", alt, lambda width: _errors(shares, width))

    seconds = {label: _mean_parts([stages(record) for record in many]) for label, many in runs.items()}
    if any(seconds.values()):
        alt = ", ".join(f"{label} {sum(parts.values()):.0f} s" for label, parts in seconds.items())
        yield drawing("time", alt, lambda width: _stacked(seconds, "seconds", 1.0, width))

    entries = {label: _mean_parts([entry_parts(record) for record in many]) for label, many in runs.items()}
    if any(entries.values()):
        alt = ", ".join(f"{label} {sum(parts.values()) / 1e6:.2f} million" for label, parts in entries.items())
        yield drawing("entries", alt, lambda width: _stacked(entries, "millions of numbers", 1e6, width))

    for label, many in runs.items():
        matrix = _mean([_floats(record.accuracy_matrix) for record in many])
        last = ", ".join(f"{value:.0f}" for value in matrix[-1])
        alt = f"{label}, after the last task {last} % on tasks 1 to {len(matrix)}"
        yield drawing("matrix", alt, functools.partial(_heat, matrix), label)


def _lines(lines: dict[str, Floats], styles: dict[str, _Style], width: float) -> Figure:
    """Accuracy on the classes seen, after each task; the legend in the order of the last values."""
    figure, axes = _canvas(width, 3.1 if width < 5 else max(3.8, 0.8 + 0.22 * len(lines)))
    steps = max(len(line) for line in lines.values())
    for label in sorted(lines, key=lambda label: -lines[label][-1]):
        line = lines[label]
        _plot(axes, np.arange(1.0, len(line) + 1), line, f"{label}  {line[-1]:.1f}", styles[label], markers=True)
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("accuracy on the classes seen, %")
    axes.set_xticks(range(1, steps + 1) if steps <= 10 else [1, *range(5, steps + 1, 5)])
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -1), min(high, 101))
    _legend(figure, width)
    return figure


def _roc(
    curves: dict[str, tuple[Floats, Floats]], areas: dict[str, float], styles: dict[str, _Style], width: float
) -> Figure:
    """True against false positives, the unknown being positive; the legend in the order of the areas."""
    figure, axes = _canvas(width, 3.4 if width < 5 else max(4.2, 0.8 + 0.22 * len(curves)))
    axes.plot([0, 100], [0, 100], color=_FAINT, linewidth=1.2, zorder=1)
    for label in sorted(curves, key=lambda label: -areas[label]):
        _plot(axes, *curves[label], f"{label}  {areas[label]:.1f}", styles[label], markers=False)
    axes.set(xlim=(-1, 101), ylim=(-1, 101))
    axes.set_xlabel("known taken for unknown, %")
    axes.set_ylabel("unknown detected, %")
    _legend(figure, width)
    return figure


def _errors(shares: dict[str, tuple[float, float]], width: float) -> Figure:
    """Bars to the left: errors to earlier tasks; to the right: to later ones."""
    figure, axes = _bars(list(shares), width)
    for place, (early, late) in enumerate(shares.values()):
        axes.barh(place, -early, color=_COLOURS[0], height=0.68)
        axes.barh(place, late, color=_COLOURS[1], height=0.68)
        for value, side in ((early, -1), (late, 1)):
            axes.annotate(
                f"{value:.0f}", (side * value, place), (side * 4, 0), textcoords="offset points",
                ha="right" if side < 0 else "left", va="center", fontsize=8, color=_INK,
            )  # fmt: skip
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.set_xlim(-118, 118)
    axes.set_xticks([-100, -50, 0, 50, 100], ["100", "50", "0", "50", "100"])
    axes.set_xlabel(f"← to earlier · %{'' if width < 5 else ' of wrong tasks'} · to later →")
    return figure


def _stacked(parts: dict[str, dict[str, float]], unit: str, scale: float, width: float) -> Figure:
    """One bar a label, its parts in the same order and colours in all rows."""
    figure, axes = _bars(list(parts), width)
    names = list(dict.fromkeys(name for amounts in parts.values() for name in amounts))
    left = np.zeros(len(parts))
    for index, name in enumerate(names):
        amounts = np.array([amounts.get(name, 0.0) for amounts in parts.values()]) / scale
        axes.barh(
            range(len(parts)), amounts, left=left, height=0.68, label=name.replace("_", " "),
            color=_COLOURS[index % len(_COLOURS)], hatch=_HATCHES[index // len(_COLOURS) % len(_HATCHES)],
            edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        left += amounts
    for place, total in enumerate(left):
        text = f"{total:,.0f}" if total >= 100 else f"{total:.3g}"
        axes.annotate(text, (total, place), (4, 0), textcoords="offset points", va="center", fontsize=8, color=_INK)
    axes.set_xlim(0, 1.14 * max(left.max(), 1e-9))
    axes.set_xlabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if width < 5 else 8))
    figure.legend(loc="outside lower center", ncols=3 if width < 5 else 6, frameon=False, fontsize=8, labelcolor=_INK)
    return figure


def _heat(matrix: Floats, width: float) -> Figure:
    """Row i: after task i; column j: on the images of task j. The same colours, 0 to 100, in every figure."""
    side = min(width, 3.2)
    figure, axes = _canvas(side, height=side)
    tasks = len(matrix)
    edges = np.arange(tasks + 1) + 0.5
    mesh = axes.pcolormesh(edges, edges, matrix, cmap=_HEAT, vmin=0, vmax=100)
    if tasks <= 10:
        for i, j in zip(*np.nonzero(np.isfinite(matrix)), strict=True):
            value = matrix[i, j]
            colour = "white" if value > 66 else "#1a1c20"  # not the page's ink: the cell's colour is fixed
            size = 10 if tasks <= 5 else 6.5
            axes.text(j + 1, i + 1, f"{value:.0f}", color=colour, ha="center", va="center", fontsize=size)
    else:  # too small to read: a scale instead
        bar = figure.colorbar(mesh, ax=axes, shrink=0.6, aspect=14)
        bar.ax.tick_params(colors=_INK, labelsize=7, length=0)
        bar.outline.set_visible(False)
    axes.invert_yaxis()
    axes.set(aspect="equal", xlabel="accuracy on task", ylabel="after task")
    axes.grid(False)
    ticks = range(1, tasks + 1) if tasks <= 10 else [1, *range(5, tasks + 1, 5)]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(9)
        label.set_color(_INK)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_FAINT)
    return figure, axes


def _bars(labels: Sequence[str], width: float) -> tuple[Figure, Any]:
    """Axes with a place for each label; on a narrow figure long ones take several lines."""
    labels = [textwrap.fill(label, 20 if width < 5 else 40) for label in labels]
    lines = 1 + max(label.count("\n") for label in labels)
    figure, axes = _canvas(width, height=1.2 + max(0.27, 0.13 * lines) * len(labels))
    axes.set_yticks(range(len(labels)), labels, fontsize=8 if lines == 1 else 7)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(False, axis="y")
    return figure, axes


def _plot(axes: Any, x: Floats, y: Floats, label: str, style: _Style, markers: bool) -> None:
    axes.plot(
        x, y, label=label, color=style.colour, linestyle=style.dash, linewidth=style.width,
        marker=style.marker, markersize=5, markevery=1 if markers else (0.1, 0.2), zorder=3 if style.width > 2 else 2,
        clip_on=not markers,  # a marker at 100 % is drawn whole
    )  # fmt: skip


def _legend(figure: Figure, width: float) -> None:
    """At the right of a wide figure; below a narrow one, which grows by what the legend takes."""
    labels = figure.axes[0].get_legend_handles_labels()[1]
    columns = 2 if width < 5 and max(map(len, labels)) < 20 else 1
    if width < 5:
        figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(labels) / columns))
    place = "outside lower left" if width < 5 else "outside right center"
    figure.legend(loc=place, ncols=columns, frameon=False, fontsize=8, labelcolor=_INK, handlelength=3.2)


def _mean(values: Sequence[Sequence[float]] | Sequence[Floats]) -> Floats:
    return np.asarray(np.mean(np.array(values, dtype=np.float64), axis=0))


def _floats(matrix: Sequence[Sequence[float | None]]) -> Floats:
    return np.array([[np.nan if value is None else value for value in row] for row in matrix])


def _mean_parts(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for parts in runs for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in runs) / len(runs) for name in names}


def _mean_errors(runs: Sequence[Record]) -> tuple[float, float] | None:
    early = [r.metrics.errors_to_earlier for r in runs if r.metrics.errors_to_earlier is not None]
    late = [r.metrics.errors_to_later for r in runs if r.metrics.errors_to_later is not None]
    return (statistics.fmean(early), statistics.fmean(late)) if early and late else None


def _mean_roc(runs: Sequence[Record]) -> tuple[Floats, Floats] | None:
    """The curve of one run as it is; of several the mean detection at each of 201 false positive rates."""
    rocs = [record.roc for record in runs if record.roc and record.metrics.auc is not None]
    curves = [(np.array(roc.false_positive_rate), np.array(roc.true_positive_rate)) for roc in rocs]
    if len(curves) < 2:
        return curves[0] if curves else None
    x = np.linspace(0, 100, 201)
    y = np.mean([np.interp(x, *curve) for curve in curves], axis=0)
    return np.append(0.0, x), np.append(0.0, y)
