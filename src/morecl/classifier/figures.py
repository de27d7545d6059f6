"""The figures of an evaluation, in the style of the reports (:mod:`morecl.report.plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from morecl.classifier.results import Bin
from morecl.labels import printable
from morecl.report.plots import FAINT, HEAT, INK, canvas, heat_text_colour

ACCENT, SECOND = "#0072B2", "#D55E00"
NAMED = {True: 12, False: 32}  # classes up to which a narrow or a wide matrix names them
NUMBERED = {True: 12, False: 14}  # ... and writes the numbers
LONGEST_NAME = 14

Floats = NDArray[np.float64]


def is_narrow(width: float) -> bool:
    return width < 5


def confusion_matrix(matrix: Floats, rows: Sequence[str], columns: Sequence[str], width: float) -> Figure:
    """``matrix`` (R, C) in percent of each row: true class by answer."""
    narrow = is_narrow(width)
    most = max(len(rows), len(columns))
    side = width if narrow else min(width, max(3.6, 1.6 + 0.36 * most))
    figure, axes = canvas(side, side * (len(rows) + 2) / (len(columns) + 2) if most <= NAMED[narrow] else side)
    x, y = np.arange(len(columns) + 1) - 0.5, np.arange(len(rows) + 1) - 0.5
    axes.pcolormesh(x, y, matrix, cmap=HEAT, vmin=0, vmax=100, rasterized=most > 60)
    if most <= NUMBERED[narrow]:
        for i, j in zip(*np.nonzero(matrix >= 0.5), strict=True):
            value = float(matrix[i, j])
            colour = heat_text_colour(value)
            axes.text(j, i, f"{value:.0f}", color=colour, ha="center", va="center", fontsize=6.5 if narrow else 8)
    axes.invert_yaxis()
    axes.grid(False)
    if most <= NAMED[narrow]:
        size = 6 if narrow or most > 20 else 8
        axes.set_xticks(range(len(columns)), [_short(name) for name in columns], rotation=90, fontsize=size)
        axes.set_yticks(range(len(rows)), [_short(name) for name in rows], fontsize=size)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.set_xlabel("answer")
    axes.set_ylabel("true class")
    for texts in (axes.get_xticklabels(), axes.get_yticklabels()):
        for text in texts:
            text.set_parse_math(False)
    return figure


def roc_curve(points: Sequence[tuple[float, float]], chosen: tuple[float, float] | None, width: float) -> Figure:
    """Unknown images detected against known ones rejected, in percent; ``chosen``: at the threshold in use."""
    figure, axes = _square(width)
    axes.plot([0, 100], [0, 100], color=FAINT, linewidth=1.2, zorder=1)
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=ACCENT, linewidth=2.2, label="all thresholds")
    if chosen:
        axes.plot(*chosen, color=SECOND, marker="o", markersize=8, linestyle="none", label="the threshold in use")
    axes.set_xlabel("known images called unknown, %")
    axes.set_ylabel("images never taught called unknown, %")
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK)
    return figure


def reliability_curve(bins: Sequence[Bin], width: float) -> Figure:
    """Share of right answers against confidence, in percent; a larger dot stands for more images."""
    figure, axes = _square(width)
    axes.plot([0, 100], [0, 100], color=FAINT, linewidth=1.2, zorder=1)
    confidence = np.array([100 * each.confidence for each in bins])
    accuracy = np.array([100 * each.accuracy for each in bins])
    counts = np.array([each.count for each in bins])
    axes.plot(confidence, accuracy, color=ACCENT, linewidth=1.4, zorder=2)
    axes.scatter(confidence, accuracy, s=20 + 180 * counts / counts.max(), color=ACCENT, zorder=3, clip_on=False)
    axes.set_xlabel("confidence, %")
    axes.set_ylabel("right answers, %")
    return figure


def _square(width: float) -> tuple[Figure, Any]:
    side = min(width, 4.6)
    figure, axes = canvas(side, side)
    axes.set(xlim=(-1, 101), ylim=(-1, 101), aspect="equal")
    return figure, axes


def _short(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…"
