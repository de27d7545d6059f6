"""The HTML page of an evaluation: one file that holds its own style and figures and loads nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray

from morecl.classifier import figures
from morecl.classifier.evaluation import UNKNOWN
from morecl.classifier.results import ClassResult, Evaluation
from morecl.labels import printable
from morecl.report.plots import NARROW, WIDE
from morecl.report.render import inline_svg

MIX_UPS = 15  # rows of the table of confusions


@dataclass(frozen=True)
class Card:
    """A number of the summary, in percent."""

    title: str
    value: float | None
    meaning: str


@dataclass(frozen=True)
class Picture:
    """A figure, drawn for a wide and for a narrow window."""

    title: str
    alt: str
    draw: Callable[[float], Figure]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MixUp:
    """Images of one class that were answered with another."""

    true: str
    answer: str
    images: int
    share: float  # percent of the class


def html(found: Evaluation, model: str, data: str) -> str:
    """The page about ``found``; ``model`` and ``data`` are their names in it."""
    taught = [each for each in found.classes if each.known]
    foreign = [each for each in found.classes if not each.known]
    numbers = itertools.count()

    def images(picture: Picture) -> dict[str, Markup]:
        widths = {"wide": WIDE, "narrow": NARROW}
        return {size: inline_svg(picture.draw(width), f"f{next(numbers)}") for size, width in widths.items()}

    return (
        _environment()
        .get_template("evaluation.html")
        .render(
            model=model,
            data=data,
            count=found.images,
            cards=[card for card in _cards(found) if card.value is not None],
            taught=taught,
            foreign=foreign,
            confusion=_confusion_picture(found) if found.confusion else None,
            mix_ups=list(itertools.islice(mix_ups(found), MIX_UPS)),
            roc=_roc_picture(found) if found.roc else None,
            reliability=_reliability_picture(found) if found.reliability else None,
            promise=found.promise,
            found=found,
            unreadable=found.unreadable,
            images=images,
        )
    )


def _shown(value: object) -> object:
    """What the template writes: text as it may be shown, since names of files and folders may hold anything."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("morecl.classifier"), PackageLoader("morecl.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda value: "–" if value is None else f"{value:.1f}"
    return environment


def _cards(found: Evaluation) -> Iterator[Card]:
    yield Card("Known classes", found.accuracy, "right answers; “unknown” counts as wrong")
    yield Card("Known classes", found.known_rejected, "called unknown")
    yield Card("Never taught", found.unknown_rejected, "called unknown")
    yield Card("Known against never taught", found.auc, "AUC: area under the ROC curve")
    error = found.calibration_error
    yield Card("Confidence", None if error is None else 100 * error, "calibration error: mean gap to the right answers")


def mix_ups(found: Evaluation) -> Iterator[MixUp]:
    """Wrong answers, the most frequent first; "unknown" is none."""
    images = {each.name: each.images for each in found.classes}
    wrong = [
        MixUp(true, answer, count, 100 * count / images[true])
        for true, row in found.confusion.items()
        for answer, count in row.items()
        if answer not in (true, UNKNOWN)
    ]
    yield from sorted(wrong, key=lambda each: (-each.images, -each.share))


def confusion_shares(found: Evaluation) -> tuple[NDArray[np.float64], list[str], list[str]]:
    """The confusion matrix in percent of each row (R, C); its rows (true classes) and columns (answers)."""
    rows = [each.name for each in _taught_first(found.classes)]
    answers = {answer for row in found.confusion.values() for answer in row}
    known = [each.name for each in found.classes if each.known]
    columns = [*known, *sorted(answers - {*known, UNKNOWN}), UNKNOWN]
    matrix = np.array([[found.confusion.get(row, {}).get(column, 0) for column in columns] for row in rows], float)
    return 100 * matrix / np.maximum(matrix.sum(1, keepdims=True), 1), rows, columns


def _taught_first(classes: Sequence[ClassResult]) -> list[ClassResult]:
    return sorted(classes, key=lambda each: not each.known)


def _confusion_picture(found: Evaluation) -> Picture:
    matrix, rows, columns = confusion_shares(found)
    note = "Row: the true class. Column: the answer. Percent of the row."
    unnamed = "Rows and columns are in the order of the table above; “unknown” comes last."
    notes = (note, unnamed) if max(len(rows), len(columns)) > min(figures.NAMED.values()) else (note,)
    alt = f"Heat map of {len(rows)} true classes by {len(columns)} answers; the diagonal is right."
    return Picture("Confusion matrix", alt, lambda width: figures.confusion_matrix(matrix, rows, columns, width), notes)


def _roc_picture(found: Evaluation) -> Picture:
    chosen = None
    if found.promise.threshold is not None and found.known_rejected is not None and found.unknown_rejected is not None:
        chosen = found.known_rejected, found.unknown_rejected
    alt = f"ROC curve, area {found.auc:.1f} %." if found.auc is not None else "ROC curve."
    title = "ROC curve: every threshold there is"
    return Picture(title, alt, lambda width: figures.roc_curve(found.roc, chosen, width))


def _reliability_picture(found: Evaluation) -> Picture:
    alt = "; ".join(f"confidence {100 * b.confidence:.0f} %: {100 * b.accuracy:.0f} % right" for b in found.reliability)
    return Picture(
        "Reliability",
        alt,
        lambda width: figures.reliability_curve(found.reliability, width),
        ("On the line, confidence is the share of right answers; below it, it is too high. Larger dot: more images.",),
    )
