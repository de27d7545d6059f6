"""Temperature and reliability against scikit-learn and plain computations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss

from morecl.classifier import calibration


def scores(count: int = 400, classes: int = 5, sure: float = 3.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores that are ``sure`` times too large for the probabilities from which the classes are drawn."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, classes)) * 2
    columns = np.array([rng.choice(classes, p=p) for p in calibration.softmax(logits)])
    return sure * logits, columns


@pytest.mark.parametrize("sure", [0.01, 0.5, 1.0, 3.0, 200.0])
def test_temperature_is_the_minimum(sure: float) -> None:
    s, c = scores(sure=sure)
    found = calibration.fit_temperature(s, c)

    second = np.array(
        [max((j for j in range(5) if j != own), key=lambda j: row[j]) for row, own in zip(s, c, strict=True)]
    )

    def loss(log_t: float) -> float:
        p = calibration.softmax(s, np.exp(log_t))
        return (401 * log_loss(c, p, labels=range(5)) + log_loss(second, p, labels=range(5))) / 402

    best = minimize_scalar(loss, bracket=(np.log(sure) - 1, np.log(sure) + 1))
    assert np.log(found) == pytest.approx(best.x, abs=1e-3)
    assert found == pytest.approx(sure, rel=0.25)
    assert loss(np.log(found)) == pytest.approx(best.fun, abs=1e-6)
    assert calibration.cross_entropy(s, c, found) == pytest.approx(log_loss(c, calibration.softmax(s, found)))


def test_temperature_does_not_depend_on_an_offset_or_change_the_order() -> None:
    s, c = scores()
    assert calibration.fit_temperature(s + 1e3 * np.arange(len(s))[:, None], c) == pytest.approx(
        calibration.fit_temperature(s, c), rel=1e-3
    )
    assert np.array_equal(calibration.softmax(s, 7.0).argmax(1), s.argmax(1))


def test_classes_that_were_not_asked_do_no_harm() -> None:
    """MORE-RP gives them -10,000."""
    s, c = scores()
    with_others = np.hstack([s, np.full((len(s), 30), -1e4)])
    assert calibration.fit_temperature(with_others, c) == pytest.approx(calibration.fit_temperature(s, c), rel=1e-2)


@pytest.mark.parametrize("count, classes", [(0, 3), (9, 3), (50, 1)])
def test_too_little_to_fit(count: int, classes: int) -> None:
    assert calibration.fit_temperature(np.ones((count, classes)), np.zeros(count, int)) == 1.0


def test_ten_images_of_two_classes_are_enough() -> None:
    """Score 1 for the true class and 0 for the other: 61 / 62 for 60 images, so 11 / 12 for ten, at 1 / T = log 11."""
    eye = np.eye(2)[np.arange(10) % 2]
    assert calibration.fit_temperature(eye, np.arange(10) % 2) == pytest.approx(1 / np.log(11), rel=1e-3)


def test_large_scores_do_not_overflow() -> None:
    assert calibration.softmax(np.array([[2e4, 2e4 - np.log(3), 0.0]])).tolist() == [pytest.approx([0.75, 0.25, 0])]


def test_all_right_is_not_certain() -> None:
    """60 of 60: the runner-up counts for one image in 62."""
    eye = np.hstack([np.eye(2)[np.arange(60) % 2] * 5, np.full((60, 3), -1e4)])
    temperature = calibration.fit_temperature(eye, np.arange(60) % 2)
    assert calibration.softmax(eye, temperature).max(1) == pytest.approx(61 / 62, abs=1e-3)


def test_all_alike_stays_finite() -> None:
    assert 0 < calibration.fit_temperature(np.ones((60, 3)), np.arange(60) % 3) < np.inf


def test_reliability_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(size=500)
    right = rng.uniform(size=500) < confidence**2
    bins = calibration.reliability(confidence.tolist(), right.tolist())
    truth, predicted = calibration_curve(right, confidence, n_bins=10)
    np.testing.assert_allclose([b.accuracy for b in bins], truth)
    np.testing.assert_allclose([b.confidence for b in bins], predicted)
    error = sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / 500
    assert calibration.calibration_error(bins) == pytest.approx(error)
    assert calibration.calibration_error(()) is None
    ends = calibration.reliability([0.0, 1.0, 1.0], [False, True, True])
    assert [b.count for b in ends] == [1, 2]
