"""Confidence that can be believed: a temperature fitted on held-back images, and curves that show how well it fits.

The confidence in class c is softmax(scores / T)_c; T minimises the cross-entropy of held-back images (Guo et al., ICML
2017). One parameter needs few images, and it never changes which class is answered. If all of n held-back images are
answered rightly, T = 0 would be best and every answer certain. So the runner-up counts for one image in n + 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from morecl.classifier.results import Bin

Floats = NDArray[np.float64]

SMALLEST = 10  # held-back images below which no temperature is fitted
_GOLDEN = (5**0.5 - 1) / 2


def softmax(scores: Floats, temperature: float = 1.0) -> Floats:
    """(N, C) -> (N, C)."""
    shifted = (scores - scores.max(1, keepdims=True)) / temperature
    weights = np.exp(shifted)
    return weights / weights.sum(1, keepdims=True)


def cross_entropy(scores: Floats, columns: NDArray[np.int64], temperature: float) -> float:
    """Mean of -log softmax(scores / T) at ``columns`` (N,)."""
    shifted = (scores - scores.max(1, keepdims=True)) / temperature
    logs = shifted[np.arange(len(columns)), columns] - np.log(np.exp(shifted).sum(1))
    return float(-logs.mean())


def runners_up(scores: Floats, columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class with the largest score besides the one in ``columns``: (N, C), (N,) -> (N,)."""
    others = scores.copy()
    others[np.arange(len(columns)), columns] = -np.inf
    return others.argmax(1)


def fit_temperature(scores: ArrayLike, columns: ArrayLike) -> float:
    """The best temperature; 1 with fewer than ``SMALLEST`` images or a single class.

    Args:
        scores: (N, C), the largest wins.
        columns: (N,) the true classes.
    """
    s, c = np.asarray(scores, np.float64), np.asarray(columns, np.int64)
    if len(c) < SMALLEST or s.shape[1] < 2:
        return 1.0
    second, share = runners_up(s, c), 1 / (len(c) + 2)

    def loss(log_t: float) -> float:
        t = float(np.exp(log_t))
        return (1 - share) * cross_entropy(s, c, t) + share * cross_entropy(s, second, t)

    # The cross-entropy is convex in 1 / T, so it has one valley in log T: golden section finds it. T = 100 times the
    # scores' spread is as good as "every class alike", a ten-thousandth of it as "always certain".
    spread = float(np.median(s.max(1) - np.median(s, axis=1)))
    middle = np.log(spread) if spread > 0 else 0.0
    low, high = middle - np.log(1e4), middle + np.log(1e2)
    while high - low > 1e-4:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return float(np.exp((low + high) / 2))


def reliability(confidence: Sequence[float], right: Sequence[bool], bins: int = 10) -> tuple[Bin, ...]:
    """Answers in ``bins`` of equal width of confidence, empty ones left out."""
    c, r = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    place = np.clip(np.ceil(c * bins).astype(int) - 1, 0, bins - 1)
    found = [np.flatnonzero(place == b) for b in range(bins)]
    return tuple(Bin(len(i), float(c[i].mean()), float(r[i].mean())) for i in found if len(i))


def calibration_error(bins: Sequence[Bin]) -> float | None:
    """Expected calibration error: the mean gap between confidence and accuracy, weighted by the bins' sizes."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / total if total else None
