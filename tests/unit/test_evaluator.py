"""Measuring a learner on a stream: the right numbers, and no image through the same network twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

import tiny
from morecl.data.stream import Dataset, TaskStream
from morecl.errors import DivergedError
from morecl.evaluator import Evaluator
from morecl.methods import Learner

CLASSES = 7
PER_CLASS = 4


@pytest.fixture(scope="module")
def stream() -> TaskStream:
    """Seven classes in mixed order, cut into 3 + 2 + 2."""
    train = np.concatenate([tiny.pictures(c, 5) for c in range(CLASSES)])
    test = np.concatenate([tiny.pictures(c, PER_CLASS, draw=1) for c in range(CLASSES)])
    # one picture of each class looks like another class, so that there are errors to count
    test[::PER_CLASS] = np.roll(test[::PER_CLASS], 1, axis=0)
    labels = [np.repeat(np.arange(CLASSES), n) for n in (5, PER_CLASS)]
    dataset = Dataset("tiny", train, labels[0], test, labels[1], tuple("abcdefg"))
    return TaskStream(dataset, [4, 0, 6, 2, 1, 5, 3], tasks=3)


def rows_through_the_network(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the images that go through the blocks from now on."""
    rows: list[int] = []
    trunk = learner.network.trunk

    def counting(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(tokens))
        return trunk(tokens, *args, **kwargs)

    monkeypatch.setattr(learner.network, "trunk", counting)
    return rows


@pytest.mark.parametrize(("method", "networks"), [("more", 3), ("ncm", 1)])
def test_each_image_goes_once_through_each_network(
    stream: TaskStream, method: str, networks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = tiny.create(method)
    evaluator = Evaluator(learner, stream)
    passed = rows_through_the_network(learner, monkeypatch)
    images = len(stream.dataset.y_test)
    total = 0
    for task in stream:
        learner.learn_task(task.x_train, task.y_train)
        passed.clear()
        evaluator.after_task(task.index)
        new = sum(passed)
        assert new == (images if task.index < networks else 0)
        total += new
        passed.clear()
        evaluator.after_task(task.index)
        assert sum(passed) == 0
    assert total == networks * images


@pytest.mark.parametrize("method", ["more", "ncm", "finetune"])
def test_numbers(stream: TaskStream, method: str) -> None:
    """All that is measured, once more from ``predict`` and ``scores``."""
    learner = tiny.create(method)
    evaluator = Evaluator(learner, stream)
    tasks = list(stream)
    for k, task in enumerate(tasks):
        learner.learn_task(task.x_train, task.y_train)
        step = evaluator.after_task(k)
        right = [np.array(learner.predict(t.x_test).labels) == t.y_test for t in tasks[: k + 1]]
        assert step.accuracy == pytest.approx([100 * r.mean() for r in right])
        assert step.aca == pytest.approx(100 * np.concatenate(right).mean())
        for j, t in enumerate(tasks[: k + 1]):
            scores = learner.scores(t.x_test)
            told = [c for c, label in enumerate(learner.classes) if label in t.classes]
            predicted = np.array(learner.classes)[told][scores[:, told].argmax(1)]
            assert step.til[j] == pytest.approx(100 * (predicted == t.y_test).mean())
        away = np.concatenate([learner.predict(t.x_test).task - j for j, t in enumerate(tasks[: k + 1])])
        earlier, later = int((away < 0).sum()), int((away > 0).sum())
        wrong = earlier + later
        assert step.errors == (pytest.approx((100 * earlier / wrong, 100 * later / wrong)) if wrong else None)
        if k == 2:
            assert (step.auc, step.fpr95, step.aupr, step.roc) == (None,) * 4
            continue
        known = np.concatenate([learner.predict(t.x_test).ood_score for t in tasks[: k + 1]])
        unknown = np.concatenate([learner.predict(t.x_test).ood_score for t in tasks[k + 1 :]])
        truth = [0] * len(known) + [1] * len(unknown)  # unknown is positive: higher scores are less known
        assert step.auc == pytest.approx(100 * roc_auc_score(truth, np.concatenate([known, unknown])), abs=1e-4)
        precision = average_precision_score(truth, np.concatenate([known, unknown]))
        assert step.aupr == pytest.approx(100 * precision, abs=1e-4)
        accepted = np.sort(known)[-(-95 * len(known) // 100) - 1]  # the score that 95 % of the knowns do not exceed
        assert step.fpr95 == pytest.approx(100 * (unknown <= accepted + 1e-9).mean())
        assert step.roc is not None
        x, y = np.array(step.roc.false_positive_rate), np.array(step.roc.true_positive_rate)
        assert len(x) <= 100
        assert np.sum(np.diff(x) * (y[1:] + y[:-1])) / 200 == pytest.approx(step.auc, abs=1e-2)


def test_scores_that_are_not_finite_are_a_diverged_run(stream: TaskStream) -> None:
    """One class of three is enough."""
    learner = tiny.create("ncm")
    learner.learn_task(stream[0].x_train, stream[0].y_train)
    learner.prototypes.means[1] = float("nan")  # type: ignore[operator, union-attr, index]
    with pytest.raises(DivergedError, match="some scores are not finite after task 1"):
        Evaluator(learner, stream).after_task(0)
