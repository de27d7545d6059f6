"""How each figure is drawn: numbers by label in, a matplotlib ``Figure`` without global state out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from morecl.report.grid import Row
from morecl.report.labels import LINE, wrapped
from morecl.report.paper import method_title

Floats = NDArray[np.float64]
WIDE, NARROW = 7.6, 3.7  # inches: for a page and for a phone
INK, FAINT = "#1b1d22", "#d5d8de"  # a page replaces these two by its own colours
# Okabe and Ito's colours, safe for colour-blind readers; their yellow, too pale on white, is replaced by grey.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
_MARKERS = "osD^vP*X<>hpd"  # 13 markers and 7 colours: no pair repeats within 91 rows
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)))
_HATCHES = ("", "///", "...")
# Opacity of a heat map's blue at 0 to 100 %: zero looks like the page, light or dark. The step at 60 % leaves out the
# mid-tones on which neither dark nor white numbers are easy to read.
_OPACITY = np.concatenate([np.linspace(0, 0.58, 61), np.linspace(0.84, 1, 40)])
_BLUE = to_rgb("#14609e")
HEAT = ListedColormap([(*_BLUE, alpha) for alpha in _OPACITY])
SMOOTH = ListedColormap([(*_BLUE, alpha) for alpha in np.linspace(0, 1, 101)])  # for cells without numbers


@dataclass(frozen=True)
class Style:
    """How a row's line looks in every figure of a report."""

    colour: str
    marker: str
    dash: Any
    width: float = 1.5


def row_style(row: Row, place: int) -> Style:
    """MORE thick and in ink, the others by their place in colour, marker and dash."""
    style = Style(
        _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)], _DASHES[place // len(_COLOURS) % len(_DASHES)]
    )
    return replace(style, colour=INK, dash="-", width=2.6) if row == Row("more") else style


def far_below(lines: Mapping[str, Floats]) -> list[str]:
    """Labels of the few lines so low that the others would be squeezed: at most a quarter, and of four or more."""
    by_low = sorted(lines, key=lambda label: lines[label].min())
    lows = [float(lines[label].min()) for label in by_low]
    high = max((float(line.max()) for line in lines.values()), default=0.0)
    for count in range(1, len(lines) // 4 + 1):
        gap, spread = lows[count] - lows[count - 1], high - lows[count]
        if gap > max(0.5 * spread, 5):
            return by_low[:count]
    return []


def far_above(totals: Mapping[str, float]) -> list[str]:
    """Labels of the few bars so long that the others would be squeezed: at most a quarter, and of four or more."""
    by_length = sorted(totals, key=lambda label: -totals[label])
    for count in range(1, len(totals) // 4 + 1):
        if totals[by_length[count - 1]] > 2.5 * totals[by_length[count]] > 0:
            return by_length[:count]
    return []


def accuracy_lines(
    lines: Mapping[str, Floats], styles: Mapping[str, Style], clipped: Collection[str], width: float
) -> Figure:
    """Accuracy on the classes seen after each task; the legend is sorted by the last value.

    The axis ignores the ``clipped`` lines, which leave it at the bottom.
    """
    figure, axes = canvas(width, 3.1 if width < 5 else max(3.8, 0.8 + 0.22 * _legend_lines(lines)))
    steps = max(len(line) for line in lines.values())
    whole = np.concatenate([line for label, line in lines.items() if label not in clipped])
    margin = max(0.05 * float(np.ptp(whole)), 0.5)
    axes.set_ylim(max(float(whole.min()) - margin, -1), min(float(whole.max()) + margin, 101))
    for label in sorted(lines, key=lambda label: -lines[label][-1]):
        line = lines[label]
        text = f"{label}{' ↓' if label in clipped else ''}  {line[-1]:.1f}"
        # without clipping, a marker at 100 % is drawn whole
        _plot(axes, np.arange(1.0, len(line) + 1), line, text, styles[label], every=1, clip=label in clipped)
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("accuracy on the classes seen, %")
    axes.set_xticks(_task_ticks(steps))
    _legend(figure, width)
    return figure


def roc_curves(
    curves: Mapping[str, tuple[Floats, Floats]], areas: Mapping[str, float], styles: Mapping[str, Style], width: float
) -> Figure:
    """True against false positives, with unknown as the positive class; the legend is sorted by area."""
    figure, axes = canvas(width, 3.4 if width < 5 else max(4.2, 0.8 + 0.22 * _legend_lines(curves)))
    axes.plot([0, 100], [0, 100], color=FAINT, linewidth=1.2, zorder=1)
    for label in sorted(curves, key=lambda label: -areas[label]):
        _plot(axes, *curves[label], f"{label}  {areas[label]:.1f}", styles[label], every=(0.1, 0.2), clip=True)
    axes.set(xlim=(-1, 101), ylim=(-1, 101))
    axes.set_xlabel("known images reported as unknown, %")
    axes.set_ylabel("unknown images detected, %")
    _legend(figure, width)
    return figure


def error_bars(shares: Mapping[str, tuple[float, float]], width: float) -> Figure:
    """Bars to the left: errors to earlier tasks; to the right: errors to later ones."""
    figure, axes = _bars(list(shares), width)
    for place, (early, late) in enumerate(shares.values()):
        axes.barh(place, -early, color=_COLOURS[0], height=0.68)
        axes.barh(place, late, color=_COLOURS[1], height=0.68)
        for value, side in ((early, -1), (late, 1)):
            axes.annotate(
                f"{value:.0f}", (side * value, place), (side * 4, 0), textcoords="offset points",
                ha="right" if side < 0 else "left", va="center", fontsize=8, color=INK,
            )  # fmt: skip
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlim(-118, 118)
    axes.set_xticks([-100, -50, 0, 50, 100], ["100", "50", "0", "50", "100"])
    axes.set_xlabel(f"← to earlier · %{'' if width < 5 else ' of wrong tasks'} · to later →")
    return figure


def reduction_bars(falls: Mapping[str, Sequence[float]], width: float) -> Figure:
    """By how much a task's accuracy falls until the end: a bar to the mean over runs, a thin line over their range."""
    figure, axes = _bars(list(falls), width)
    ends = [0.0]
    for place, values in enumerate(falls.values()):
        mean = float(np.mean(values))
        axes.barh(place, mean, color=_COLOURS[1], height=0.68)
        if len(values) > 1:
            axes.plot([min(values), max(values)], [place, place], color=INK, linewidth=1.2)
        side = -1 if mean < 0 else 1
        end = min([mean, *values]) if mean < 0 else max([mean, *values])
        axes.annotate(
            f"{mean:.1f}", (end, place), (side * 4, 0), textcoords="offset points",
            ha="right" if side < 0 else "left", va="center", fontsize=8, color=INK,
        )  # fmt: skip
        ends += [*values, end]
    axes.axvline(0, color=INK, linewidth=0.8)
    room = 0.14 * max(max(ends) - min(ends), 1.0)
    axes.set_xlim(min(ends) - (room if min(ends) < 0 else 0), max(ends) + room)
    axes.set_xlabel("points of accuracy lost since a task was learned" if width >= 5 else "points of accuracy lost")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if width < 5 else 8))
    return figure


def stacked_bars(
    parts: Mapping[str, Mapping[str, float]], unit: str, scale: float, cut: Collection[str], width: float
) -> Figure:
    """One bar per label, its parts in the same order and colours in all bars.

    The axis ignores the bars in ``cut``, which run out of it at the right; their number has an arrow.
    """
    figure, axes = _bars(list(parts), width)
    names = list(dict.fromkeys(name for amounts in parts.values() for name in amounts))
    left = np.zeros(len(parts))
    for index, name in enumerate(names):
        amounts = np.array([amounts.get(name, 0.0) for amounts in parts.values()]) / scale
        hatch = _HATCHES[index // len(_COLOURS) % len(_HATCHES)]
        axes.barh(
            range(len(parts)), amounts, left=left, height=0.68, label=name.replace("_", " "),
            color=_COLOURS[index % len(_COLOURS)], hatch=hatch, edgecolor="white" if hatch else "none", linewidth=0,
        )  # fmt: skip
        left += amounts
    longest = max(total for label, total in zip(parts, left, strict=True) if label not in cut)
    end = 1.14 * max(longest, 1e-9)
    for place, (label, total) in enumerate(zip(parts, left, strict=True)):
        text = f"{total:,.0f}" if total >= 100 else f"{total:#.3g}"
        text, x = (f"→ {text}", end) if label in cut else (text, total)
        axes.annotate(text, (x, place), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    axes.set_xlim(0, end)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if width < 5 else 8))
    most = 3 if width < 5 else 6
    columns = math.ceil(len(names) / math.ceil(len(names) / most))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8, labelcolor=INK)
    return figure


def time_lines(lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], width: float) -> Figure:
    """Seconds of a prediction against the number of tasks, both on logarithmic axes: a constant time is a flat line."""
    figure, axes = canvas(width, 3.1)
    axes.set(xscale="log", yscale="log")
    for place, (label, (tasks, times)) in enumerate(lines.items()):
        style = row_style(Row(label), place)
        _plot(axes, np.array(tasks, float), np.array(times), method_title(label), style, every=1, clip=False)
        for x, y in zip(tasks, times, strict=True):
            text = f"{1000 * y:,.0f} ms" if y >= 0.01 else f"{1000 * y:.1f} ms"
            above = place == 0  # so that the labels of two lines that meet do not
            axes.annotate(
                text, (x, y), (0, 7 if above else -7), textcoords="offset points", ha="center",
                va="bottom" if above else "top", fontsize=8, color=INK,
            )  # fmt: skip
    ticks = sorted({tasks for line, _ in lines.values() for tasks in line})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("seconds")
    axes.margins(0.08, 0.15)
    _legend(figure, width)
    return figure


def heat_map(matrix: Floats, width: float) -> Figure:
    """``matrix`` (T, T): row i after task i, column j on the images of task j. Colours from 0 to 100 everywhere."""
    side, tasks = min(width, 3.2), len(matrix)
    numbered = tasks <= 10
    figure, axes = canvas(side, height=side if numbered else 0.8 * side)
    edges = np.arange(tasks + 1) + 0.5
    mesh = axes.pcolormesh(edges, edges, matrix, cmap=HEAT if numbered else SMOOTH, vmin=0, vmax=100)
    if numbered:
        size = 10 if tasks <= 5 else 6.5
        for i, j in zip(*np.nonzero(np.isfinite(matrix)), strict=True):
            value = float(matrix[i, j])
            colour = heat_text_colour(value)
            axes.text(j + 1, i + 1, f"{value:.0f}", color=colour, ha="center", va="center", fontsize=size)
    else:  # cells too small for numbers: a scale instead
        bar = figure.colorbar(mesh, ax=axes, shrink=0.7, aspect=14)
        bar.ax.set_facecolor("none")  # the colours are transparent: on white they would not be those of a dark page
        bar.ax.tick_params(colors=INK, labelsize=7, length=0)
        bar.outline.set_visible(False)
    axes.invert_yaxis()
    axes.set(aspect="equal", xlabel="accuracy on task", ylabel="after task")
    axes.grid(False)
    axes.set_xticks(_task_ticks(tasks))
    axes.set_yticks(_task_ticks(tasks))
    return figure


def heat_text_colour(value: float) -> str:
    """Ink or white, whichever contrasts more with the cell of ``value`` percent on a white page.

    On a dark page ink is light and every cell is dark, so that both are readable there.
    """
    cell = heat_colour(value, page="#ffffff")
    return max((INK, "white"), key=lambda colour: contrast(to_rgb(colour), cell))


def heat_colour(value: float, page: str) -> tuple[float, ...]:
    """The colour (R, G, B), each 0 to 1, of a heat map's cell of ``value`` percent on a page of that colour."""
    red, green, blue, alpha = HEAT(value / 100)
    return tuple(alpha * top + (1 - alpha) * below for top, below in zip((red, green, blue), to_rgb(page), strict=True))


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Contrast ratio, 1 to 21, of two colours (R, G, B), each 0 to 1, as WCAG 2 defines it."""
    dark, light = sorted(_luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Sequence[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    """Empty axes in the style of all figures; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8, length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(9)
        label.set_color(INK)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(FAINT)
    return figure, axes


def _bars(labels: Sequence[str], width: float) -> tuple[Figure, Any]:
    """Axes with a place for each label, which may take several lines."""
    labels = [wrapped(label, 18 if width < 5 else LINE) for label in labels]
    lines = 1 + max(label.count("\n") for label in labels)
    figure, axes = canvas(width, height=1.2 + max(0.27, 0.13 * lines) * len(labels))
    axes.set_yticks(range(len(labels)), labels, fontsize=8 if lines == 1 else 7)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(False, axis="y")
    return figure, axes


def _plot(axes: Any, x: Floats, y: Floats, label: str, style: Style, every: Any, clip: bool) -> None:
    axes.plot(
        x, y, label=wrapped(label, LINE + 6), color=style.colour, linestyle=style.dash, linewidth=style.width,
        marker=style.marker, markersize=5, markevery=every, zorder=3 if style.width > 2 else 2, clip_on=clip,
    )  # fmt: skip


def _legend_lines(labels: Collection[str]) -> int:
    return sum(1 + wrapped(label, LINE).count("\n") for label in labels)


def _legend(figure: Figure, width: float) -> None:
    """At the right of a wide figure; below a narrow one, which grows by the legend's height."""
    labels = figure.axes[0].get_legend_handles_labels()[1]
    columns = 2 if width < 5 and max(map(len, labels)) < 20 else 1
    if width < 5:
        lines = sum(1 + label.count("\n") for label in labels)
        figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(lines / columns))
    place = "outside lower left" if width < 5 else "outside right center"
    figure.legend(loc=place, ncols=columns, frameon=False, fontsize=8, labelcolor=INK, handlelength=3.2)


def _task_ticks(tasks: int) -> list[int]:
    return list(range(1, tasks + 1)) if tasks <= 10 else [1, *range(5, tasks + 1, 5)]
