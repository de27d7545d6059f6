"""Metrics against values worked out by hand, and detection metrics against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from morecl import metrics

# Three tasks: learned at 90, 80, 70; after the last task 60, 75, 70.
MATRIX = [[90.0, None, None], [70.0, 80.0, None], [60.0, 75.0, 70.0]]


def test_accuracy_by_task_and_aca_weigh_images_not_tasks() -> None:
    true = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    predicted = np.array([0, 0, 0, 0, 0, 1, 0, 1])
    task = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    assert metrics.accuracy_by_task(predicted, true, task, 2) == pytest.approx([500 / 6, 50])
    assert metrics.aca(predicted, true) == 75.0  # 6 of 8, not the mean 66.67 of the two tasks


def test_accuracy_by_task_wants_images_of_exactly_the_seen_tasks() -> None:
    with pytest.raises(ValueError, match="first 3 tasks"):
        metrics.accuracy_by_task([0, 1], [0, 1], [0, 2], 3)
    with pytest.raises(ValueError, match="first 1 tasks"):
        metrics.accuracy_by_task([0, 1], [0, 1], [0, 1], 1)
    with pytest.raises(ValueError, match="same length"):
        metrics.accuracy_by_task([0], [0, 1], [0, 1], 2)


def test_accuracy_matrix_is_padded_and_checked() -> None:
    assert metrics.accuracy_matrix([[90.0], [70.0, 80.0], [60.0, 75.0, 70.0]]) == MATRIX
    with pytest.raises(ValueError, match="row 1"):
        metrics.accuracy_matrix([[90.0], [70.0]])


def test_incremental_accuracy_is_the_mean_over_steps() -> None:
    assert metrics.aia([90.0, 75.0, 60.0]) == 75.0
    assert metrics.iauc([80.0, 70.0]) == 75.0


def test_a_table_is_no_list_of_numbers() -> None:
    """Its mean would be one over all that it holds."""
    with pytest.raises(ValueError, match="of shape"):
        metrics.aia([[90.0, 75.0], [60.0, 50.0]])
    with pytest.raises(ValueError, match="same length"):
        metrics.aca([[0, 1]], [[0, 1]])


def test_reduction_leaves_out_the_last_task() -> None:
    assert metrics.reduction_rate(MATRIX) == pytest.approx((30 + 5) / 2)
    assert metrics.bwt(MATRIX) == pytest.approx(-17.5)
    assert metrics.reduction_rate([[90.0]]) is None
    assert metrics.bwt([[90.0]]) is None


def test_forward_transfer_uses_the_diagonal() -> None:
    assert metrics.fwt(MATRIX, [95.0, 80.0, 80.0]) == pytest.approx((-5 + 0 - 10) / 3)
    with pytest.raises(ValueError, match="same length"):
        metrics.fwt(MATRIX, [95.0, 80.0])


def test_til_accuracy_is_the_mean_of_the_last_row() -> None:
    assert metrics.til_accuracy(MATRIX) == pytest.approx((60 + 75 + 70) / 3)


@pytest.mark.parametrize("matrix", [[], [[90.0], [70.0, 80.0]], [[None]], [[90.0, None], [None, 80.0]]])
def test_an_incomplete_matrix_is_refused(matrix: list[list[float | None]]) -> None:
    with pytest.raises(ValueError, match=r"square|NaN"):
        metrics.reduction_rate(matrix)


def test_error_direction_leaves_out_errors_inside_the_task() -> None:
    true = np.array([2, 2, 2, 2, 0, 1, 1])
    predicted = np.array([0, 1, 1, 3, 0, 1, 1])
    assert metrics.error_direction(predicted, true) == (75.0, 25.0)
    assert metrics.error_direction([0, 1], [0, 1]) is None


def test_detection_by_hand() -> None:
    known, unknown = [1.0, 2.0, 3.0, 4.0], [3.0, 5.0]
    assert metrics.auc(known, unknown) == 100 * (2 + 0.5 + 4) / 8  # 3 beats two and ties one, 5 beats all
    assert metrics.aupr(known, unknown) == pytest.approx(100 * (0.5 * 1 + 0.5 * 2 / 4))
    assert metrics.fpr95(known, unknown) == 50.0  # all four knowns must pass: threshold 4


def test_higher_scores_mean_less_known() -> None:
    assert metrics.auc([0.0, 1.0], [2.0, 3.0]) == 100.0
    assert metrics.auc([2.0, 3.0], [0.0, 1.0]) == 0.0
    assert metrics.fpr95([0.0, 1.0], [2.0, 3.0]) == 0.0
    assert metrics.fpr95([2.0, 3.0], [0.0, 1.0]) == 100.0


def test_fpr95_threshold_is_the_smallest_that_accepts_95_percent() -> None:
    known = np.arange(1, 21)  # 19 of 20 are exactly 95 %: threshold 19
    assert metrics.fpr95(known, [19.0, 19.5, 18.0, 30.0]) == 50.0
    assert metrics.fpr95([7.0] * 5, [7.0, 8.0]) == 50.0  # a tie with the threshold is accepted


SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30)  # few values: ties are the rule
REALS = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=30)


@given(st.one_of(SCORES, REALS), st.one_of(SCORES, REALS))
def test_detection_agrees_with_scikit_learn(known: list[float], unknown: list[float]) -> None:
    labels = np.repeat([0, 1], [len(known), len(unknown)])
    scores = np.array(known + unknown)
    assert metrics.auc(known, unknown) == pytest.approx(100 * roc_auc_score(labels, scores))
    assert metrics.aupr(known, unknown) == pytest.approx(100 * average_precision_score(labels, scores))
    accepted_unknown, accepted_known, _ = roc_curve(1 - labels, -scores, drop_intermediate=False)
    first = np.flatnonzero(accepted_known >= 0.95)[0]
    assert metrics.fpr95(known, unknown) == pytest.approx(100 * accepted_unknown[first])


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_detection_agrees_with_scikit_learn_on_many_scores(scale: float) -> None:
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(0, scale, 3001), rng.normal(scale, scale, 999)
    labels = np.repeat([0, 1], [3001, 999])
    scores = np.concatenate([known, unknown])
    assert metrics.auc(known, unknown) == pytest.approx(100 * roc_auc_score(labels, scores))
    assert metrics.aupr(known, unknown) == pytest.approx(100 * average_precision_score(labels, scores))


def test_constant_scores_are_chance() -> None:
    assert metrics.auc([1.0] * 3, [1.0] * 2) == 50.0
    assert metrics.aupr([1.0] * 3, [1.0] * 2) == 40.0
    assert metrics.fpr95([1.0] * 3, [1.0] * 2) == 100.0


@pytest.mark.parametrize("metric", [metrics.auc, metrics.aupr, metrics.fpr95, metrics.roc_curve_points])
@pytest.mark.parametrize(
    ("known", "unknown"), [([], [1.0]), ([1.0], []), ([np.nan], [1.0]), ([1.0], [1.0, np.nan]), ([np.inf], [1.0])]
)
def test_empty_or_undefined_scores_are_refused(metric: object, known: list[float], unknown: list[float]) -> None:
    with pytest.raises(ValueError, match=r"non-empty|NaN"):
        metric(known, unknown)  # type: ignore[operator]


def test_roc_points_are_thinned_but_keep_the_curve() -> None:
    rng = np.random.default_rng(1)
    known, unknown = rng.normal(0, 1, 5000), rng.normal(1.5, 1, 5000)
    x, y = metrics.roc_curve_points(known, unknown, points=200)
    assert len(x) == len(y) <= 200
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 100, 100)
    assert np.all(np.diff(x) >= 0) and np.all(np.diff(y) >= 0)
    area = np.sum(np.diff(x) * (y[1:] + y[:-1])) / 200
    assert area == pytest.approx(metrics.auc(known, unknown), abs=0.1)


def test_a_curve_has_at_least_its_two_ends() -> None:
    x, y = metrics.roc_curve_points([0.0, 1.0, 2.0], [1.0, 3.0], points=2)
    assert (x.tolist(), y.tolist()) == ([0, 100], [0, 100])
    with pytest.raises(ValueError, match="at least 2 points"):
        metrics.roc_curve_points([0.0], [1.0], points=1)


def test_roc_points_of_separated_scores_pass_through_the_corner() -> None:
    x, y = metrics.roc_curve_points([0.0, 1.0], [2.0, 3.0])
    assert (0.0, 100.0) in zip(x, y, strict=True)
