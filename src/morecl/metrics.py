"""Metrics: pure functions of predictions, accuracy matrices and OOD scores. All results are in percent.

Direction of scores, everywhere: an OOD score is HIGHER for an image that is LESS KNOWN. Unknown images (of classes
still to come) are the positives of detection, images of the classes seen so far the negatives.

Accuracy matrix: row i is measured after learning task i, column j on the test images of task j (j <= i); entries above
the diagonal are ``None``. Accuracies are class-incremental unless stated otherwise: the learner chooses among all
classes seen so far, and the task is not given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = Sequence[Sequence[float | None]]
Floats = NDArray[np.float64]


def accuracy_by_task(predicted: ArrayLike, true: ArrayLike, task_of_image: ArrayLike, tasks: int) -> list[float]:
    """Row ``tasks - 1`` of the accuracy matrix: accuracy on the test images of each of the first ``tasks`` tasks.

    ``predicted``, ``true`` and ``task_of_image`` are (N,): labels, and the index of the task of an image's true class.
    Do NOT average it into ACA when tasks differ in size: see :func:`aca`.
    """
    predicted, true, task_of_image = _same_length(predicted, true, task_of_image)
    counts = np.bincount(task_of_image, minlength=tasks)
    if len(counts) != tasks or not counts.all():
        raise ValueError(f"test images must be of the first {tasks} tasks, all of them; there are {counts.tolist()}")
    hits = np.bincount(task_of_image, weights=predicted == true, minlength=tasks)
    return [float(value) for value in 100 * hits / counts]


def accuracy_matrix(rows: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """The square (T, T) matrix from the T rows of :func:`accuracy_by_task`, row i of length i + 1."""
    for index, row in enumerate(rows):
        if len(row) != index + 1:
            raise ValueError(f"row {index} of an accuracy matrix has {index + 1} entries, not {len(row)}")
    return [[*row, *[None] * (len(rows) - len(row))] for row in rows]


def aca(predicted: ArrayLike, true: ArrayLike) -> float:
    """Average classification accuracy: the share of correct answers among all test images of the classes seen so far.

    Every image counts equally: NOT the mean of the tasks' accuracies, which differs when tasks differ in size. The ACA
    of a run is the one after the last task ("last accuracy"), NOT the mean over steps, which is :func:`aia`.
    """
    predicted, true = _same_length(predicted, true)
    return float(100 * np.mean(predicted == true))


def aia(aca_per_step: ArrayLike) -> float:
    """Average incremental accuracy: the mean over tasks i of the ACA after task i, the first task included.

    NOT the accuracy after the last task (:func:`aca`): it is higher for nearly every learner, because there are fewer
    classes to distinguish in early steps.
    """
    return float(np.mean(_scores("accuracies", aca_per_step)))


def til_accuracy(til_matrix: Matrix) -> float:
    """Task-incremental accuracy: the mean over tasks of the accuracy after the last task, with the task given.

    NOT a class-incremental number: the learner chooses among the classes of the right task only. Tasks count equally.
    """
    return float(np.mean(_last_row(til_matrix)))


def reduction_rate(matrix: Matrix) -> float | None:
    """Performance reduction rate: the mean over tasks k < t of A(k, when learned) - A(k, after the last task t).

    ``None`` for a single task. The last task, which could not be forgotten yet, does NOT count. It does NOT measure how
    good a learner is: one that never learned has nothing to lose.
    """
    last = _last_row(matrix)
    if len(last) == 1:
        return None
    return float(np.mean(_diagonal(matrix)[:-1] - last[:-1]))


def bwt(matrix: Matrix) -> float | None:
    """Backward transfer: the negative of :func:`reduction_rate`; below zero is forgetting. NOT forward transfer."""
    rate = reduction_rate(matrix)
    return None if rate is None else -rate


def fwt(matrix: Matrix, single_task: ArrayLike) -> float:
    """Forward transfer: the mean over tasks k of A(k, when learned) minus the accuracy of a model of task k alone.

    ``single_task`` (T,): accuracy of one adapter model per task, trained and tested on that task only. NOT the
    zero-shot transfer to tasks not learned yet, which has the same name elsewhere. Values are usually negative:
    A(k, when learned) is a choice among all classes seen so far, the single model chooses among those of task k only.
    """
    diagonal, alone = _same_length(_diagonal(matrix), _scores("single-task accuracies", single_task))
    return float(np.mean(diagonal - alone))


def auc(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """Area under the ROC curve: how often a random unknown scores higher than a random known, ties counting half.

    100 is perfect, 50 is chance. It does NOT depend on a threshold and is NOT the accuracy of a rejection rule.
    """
    false, true = _rejected(known_scores, unknown_scores)
    doubled = int(np.sum(np.diff(false) * (true[1:] + true[:-1])))  # integers: exact
    return 100 * doubled / (2 * int(false[-1]) * int(true[-1]))


def iauc(auc_per_step: ArrayLike) -> float:
    """Incremental AUC: the mean of the AUC after each task but the last. NOT the AUC after the second-to-last task."""
    return float(np.mean(_scores("AUCs", auc_per_step)))


def fpr95(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """Share of the unknowns that are accepted when 95 % of the knowns are.

    An image is accepted if its score is at most the threshold, which is the smallest one that accepts at least 95 % of
    the knowns. Lower is better. NOT the share of knowns rejected when 95 % of the unknowns are detected, which some
    authors call by the same name.
    """
    known, unknown = _scores("known scores", known_scores), _scores("unknown scores", unknown_scores)
    needed = math.ceil(95 * len(known) / 100)
    threshold = np.sort(known)[needed - 1]
    return float(100 * np.mean(unknown <= threshold))


def aupr(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """Average precision with unknown as the positive class: precision times gain in recall, summed over thresholds.

    NOT comparable between test sets: the chance level is the share of unknowns, not 50. Points are not interpolated.
    """
    false, true = _rejected(known_scores, unknown_scores)
    precision = true[1:] / (true[1:] + false[1:])
    return float(100 * np.sum(np.diff(true) * precision) / true[-1])


def roc_curve_points(known_scores: ArrayLike, unknown_scores: ArrayLike, points: int = 200) -> tuple[Floats, Floats]:
    """(false positive rate, true positive rate) in percent, both (<= points,), from (0, 0) to (100, 100).

    Thinned evenly along the curve, for drawing. Do NOT compute areas from it: use :func:`auc`.
    """
    if points < 2:
        raise ValueError(f"a curve needs at least 2 points, not {points}")
    false, true = _rejected(known_scores, unknown_scores)
    x, y = 100 * false / false[-1], 100 * true / true[-1]
    along = x + y  # strictly increasing from 0 to 200
    kept = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)))
    return x[kept], y[kept]


def error_direction(predicted_task: ArrayLike, true_task: ArrayLike) -> tuple[float, float] | None:
    """(earlier, later): of the images assigned to a wrong task, the share assigned to an earlier and to a later one.

    The two sum to 100, as in the paper's 73 % and 27 %. NOT shares of all errors: a wrong class of the right task has
    no direction and is left out. ``None`` if no image is assigned to a wrong task.
    """
    predicted_task, true_task = _same_length(predicted_task, true_task)
    earlier, later = int(np.sum(predicted_task < true_task)), int(np.sum(predicted_task > true_task))
    if earlier + later == 0:
        return None
    return 100 * earlier / (earlier + later), 100 * later / (earlier + later)


def _rejected(known_scores: ArrayLike, unknown_scores: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many knowns and unknowns have a score >= threshold: zero first, then for each distinct score, falling."""
    known, unknown = _scores("known scores", known_scores), _scores("unknown scores", unknown_scores)
    scores = np.concatenate([known, unknown])
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # last image of each tie
    unknowns = np.cumsum(order >= len(known))[ends]
    knowns = ends + 1 - unknowns
    return np.append(0, knowns), np.append(0, unknowns)


def _scores(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must be a non-empty list of numbers, not of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} hold NaN or infinite values: {np.count_nonzero(~np.isfinite(array))} of {len(array)}")
    return array


def _same_length(*values: ArrayLike) -> tuple[NDArray[Any], ...]:
    arrays = tuple(np.asarray(value) for value in values)
    if any(array.ndim != 1 or len(array) != len(arrays[0]) or not len(array) for array in arrays):
        raise ValueError(f"expected non-empty lists of the same length, got shapes {[array.shape for array in arrays]}")
    return arrays


def _last_row(matrix: Matrix) -> Floats:
    _diagonal(matrix)  # checks the shape
    return _scores("entries of the last row", [math.nan if value is None else value for value in matrix[-1]])


def _diagonal(matrix: Matrix) -> Floats:
    if not matrix or any(len(row) != len(matrix) for row in matrix):
        raise ValueError(f"an accuracy matrix is square; its rows have {[len(row) for row in matrix]} entries")
    entries = [row[index] for index, row in enumerate(matrix)]
    return _scores("entries of the diagonal", [math.nan if value is None else value for value in entries])
