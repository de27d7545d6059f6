"""Measures answers on labelled images."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from morecl import metrics
from morecl.classifier import calibration
from morecl.classifier.results import Answer, ClassResult, Evaluation, Promise

UNKNOWN = "unknown"  # the answer in the confusion matrix


def evaluate(answers: Iterable[Answer], names: Sequence[str], known: Sequence[str], promise: Promise) -> Evaluation:
    """Compare ``answers`` with the true classes ``names``; ``known``: the classes that were taught."""
    images: Counter[str] = Counter()
    right: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    confidence: list[float] = []
    first_right: list[bool] = []
    of_known: list[float] = []
    of_unknown: list[float] = []
    unreadable = []
    seen = 0
    new_right: list[bool] = []
    for answer, name in zip(answers, names, strict=True):
        if answer.error is not None or answer.ood_score is None or answer.confidence is None:
            unreadable.append(f"{answer.path or 'an image'}: {answer.error}")
            continue
        images[name] += 1
        right[name] += answer.label == name
        rejected[name] += answer.unknown
        seen += answer.seen
        if name in known and not answer.seen:
            new_right.append(answer.label == name)
        confusion[name][UNKNOWN if answer.label is None else answer.label] += 1
        if name in known:
            confidence.append(answer.confidence)
            first_right.append(answer.top[0].label == name)
        (of_known if name in known else of_unknown).append(answer.ood_score)
    classes = tuple(
        ClassResult(name, name in known, images[name], right[name] if name in known else 0, rejected[name])
        for name in dict.fromkeys([*(n for n in known if images[n]), *images])
    )
    taught, foreign = [c for c in classes if c.known], [c for c in classes if not c.known]
    bins = calibration.reliability(confidence, first_right)
    both = bool(of_known and of_unknown)
    roc = metrics.roc_curve_points(np.array(of_known), np.array(of_unknown)) if both else None
    return Evaluation(
        classes=classes,
        confusion={name: dict(row) for name, row in confusion.items()},
        accuracy=_percent(sum(c.right for c in taught), sum(c.images for c in taught)),
        accuracy_forced=_percent(sum(first_right), len(first_right)),
        known_rejected=_percent(sum(c.unknown for c in taught), sum(c.images for c in taught)),
        unknown_rejected=_percent(sum(c.unknown for c in foreign), sum(c.images for c in foreign)),
        auc=metrics.auc(np.array(of_known), np.array(of_unknown)) if both else None,
        roc=() if roc is None else tuple((float(a), float(b)) for a, b in zip(*roc, strict=True)),
        reliability=bins,
        calibration_error=calibration.calibration_error(bins),
        mean_confidence=float(np.mean(confidence)) if confidence else None,
        promise=promise,
        unreadable=tuple(unreadable),
        seen=seen,
        accuracy_new=_percent(sum(new_right), len(new_right)),
    )


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None
