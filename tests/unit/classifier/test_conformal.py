"""The threshold of "unknown": against MAPIE, and what it promises."""

from __future__ import annotations

import numpy as np
import pytest
from mapie.regression import SplitConformalRegressor
from sklearn.dummy import DummyRegressor

from morecl.classifier.conformal import fewest, promise, suffice
from morecl.errors import InputError


@pytest.mark.parametrize("accept", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("count", [101, 120, 333])
def test_threshold_is_mapies(count: int, accept: float) -> None:
    """Split conformal regression around 0 with absolute residuals has the same quantile as its interval's end."""
    scores = np.random.default_rng(count).gamma(2.0, size=count)
    x = np.zeros((count, 1))
    zero = DummyRegressor(strategy="constant", constant=0.0).fit(x, np.zeros(count))
    reference = SplitConformalRegressor(zero, confidence_level=accept).conformalize(x, scores)
    _, interval = reference.predict_interval(x[:1])
    assert promise(scores, accept).threshold == pytest.approx(interval[0, 1, 0], abs=1e-12)


def test_rank_is_exact() -> None:
    """(19 + 1) 0.95 is 19, but not in floating point."""
    assert promise(np.arange(19), 0.95).threshold == 18
    assert promise(np.arange(18), 0.95).threshold is None


@pytest.mark.parametrize("accept", [0.01, 0.5, 0.66, 0.9, 0.95, 0.99, 0.9999])
def test_how_many_images_are_needed(accept: float) -> None:
    needed = fewest(accept)
    assert suffice(needed, accept) and not suffice(needed - 1, accept)


def test_the_promise_is_kept() -> None:
    """Over many draws the share of new images above the threshold is at most a, and not far below."""
    rng = np.random.default_rng(0)
    above = []
    for _ in range(2000):
        held, new = rng.normal(size=60), rng.normal(size=200)
        threshold = promise(held, 0.9).threshold
        assert threshold is not None
        above.append((new > threshold).mean())
    assert 0.1 - 1 / 61 - 0.005 < np.mean(above) <= 0.1 + 0.005


def test_too_few_images_say_what_is_possible() -> None:
    none, few = promise([], 0.95), promise(np.arange(9), 0.95)
    assert none.threshold is None and none.share is None and "no images were held back" in none.why
    assert none.cause == "no images were held back" and none.why == f"{none.cause}; nothing is called unknown"
    assert few.threshold is None and "with 9 held-back images at least 10.0 %" in few.why
    assert promise(np.arange(9), 0.9).threshold == 8
    assert "with 1 held-back image at least 50.0 %" in promise([0.0]).why


def test_nothing_is_promised_for_classes_without_held_back_images() -> None:
    made = promise(np.arange(100), missing=2)
    assert made.threshold is not None and made.share is None and "2 classes have no held-back images" in made.why
    assert promise(np.arange(100)).share == pytest.approx(0.05)


@pytest.mark.parametrize("accept", [0.0, 1.0, -1.0, 95.0, float("nan")])
def test_a_share_must_be_a_share(accept: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        promise(np.arange(100), accept)
