"""When to say "unknown": a threshold with a promise (split conformal prediction).

With n held-back images, the threshold for accepting a share 1 - a of known images is the k-th smallest of their OOD
scores, k = ceil((n + 1)(1 - a)). A new image like those held back then exceeds it with probability at most a. The
promise is about images of *known* classes only; how many unknown ones exceed it can only be measured.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from morecl.classifier.arguments import check_number
from morecl.classifier.results import NOTHING_UNKNOWN, Promise
from morecl.errors import InputError

ACCEPT = 0.95


def promise(ood_scores: ArrayLike, accept: float = ACCEPT, *, missing: int = 0) -> Promise:
    """The threshold for these held-back images, and what it promises.

    Args:
        ood_scores: (n,) of held-back images; higher = less known.
        accept: share of known images to accept, 1 - a.
        missing: classes without a held-back image, for which nothing can be promised.
    """
    check_number("the share of known images to accept", accept)
    if not 0 < accept < 1:
        raise InputError(f"the share of known images to accept must lie between 0 and 1, not {accept}")
    scores = np.sort(np.asarray(ood_scores, np.float64))
    n = len(scores)
    if not suffice(n, accept):
        images = "1 held-back image" if n == 1 else f"{n} held-back images"
        possible = f"with {images} at least {100 / (n + 1):.1f} % of known images must be allowed as unknown"
        why = possible if n else "no images were held back"
        return Promise(accept, None, None, n, f"{why}{NOTHING_UNKNOWN}")
    threshold = float(scores[_rank(n, accept) - 1])
    if missing:
        classes = "one class has" if missing == 1 else f"{missing} classes have"
        return Promise(accept, threshold, None, n, f"{classes} no held-back images, so nothing is promised")
    return Promise(accept, threshold, float(1 - Fraction(str(accept))), n)


def suffice(images: int, accept: float = ACCEPT) -> bool:
    """Whether this many held-back images set a threshold."""
    return _rank(images, accept) <= images


def fewest(accept: float = ACCEPT) -> int:
    """How many held-back images set a threshold."""
    share = Fraction(str(accept))
    return math.ceil(share / (1 - share))


def _rank(images: int, accept: float) -> int:
    return math.ceil((images + 1) * Fraction(str(accept)))  # exact: 0.95 * 20 in floating point is not 19
