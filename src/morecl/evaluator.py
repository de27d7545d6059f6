"""Learner x stream -> accuracies and OOD detection, each (network, test image) pair computed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from morecl import metrics
from morecl.data import TaskStream
from morecl.errors import DivergedError
from morecl.methods import Learner
from morecl.records import Roc
from morecl.scoring import CachedFeatures


@dataclass(frozen=True)
class Step:
    """What was measured after one task, percent. After the last task nothing is unknown: OOD fields are ``None``."""

    accuracy: list[float]  # class-incremental, on the test images of each task learned
    til: list[float]  # the same with the task told
    aca: float
    auc: float | None
    fpr95: float | None
    aupr: float | None
    errors: tuple[float, float] | None  # share of the errors that go to earlier, later tasks
    roc: Roc | None


class Evaluator:
    """Scores a learner on the test images of ``stream`` after each task.

    Features are kept by the name of their network: a network that no longer changes (MORE's finished tasks, a frozen
    backbone) sees each test image once in a whole run.
    """

    def __init__(self, learner: Learner, stream: TaskStream):
        """``learner`` learns the classes of ``stream`` by their names or by their labels."""
        self.learner = learner
        self._label: dict[Hashable, int] = {}
        for label, name in enumerate(stream.dataset.classes):
            self._label |= {name: label, label: label}
        tasks = list(stream)
        self.features = CachedFeatures(learner, learner.prepare(np.concatenate([task.x_test for task in tasks])))
        self.labels = np.concatenate([task.y_test for task in tasks])
        self.task_of_image = np.repeat(np.arange(len(tasks)), [len(task.y_test) for task in tasks])

    def after_task(self, index: int) -> Step:
        """Measure when tasks 0..index have been learned: accuracy on their images, rejection of all later ones.

        Raises:
            DivergedError: what was learned is too large to compute with.
        """
        learner = self.learner
        output = learner.answer(self.features)
        self.features.forget_unasked()
        scores = output.scores.double().cpu().numpy()  # (N, C)
        if not np.isfinite(scores).all():
            raise DivergedError(
                f"training diverged: after task {index + 1} there are scores that are not finite; "
                "lower the learning rate (lr)"
            )
        seen = self.task_of_image <= index
        task = self.task_of_image[seen]
        true = self.labels[seen]
        task_of_column = learner.task_of_column()
        label_of_column = np.array([self._label[name] for name in learner.classes])

        column = scores[seen].argmax(1)
        told = np.where(task_of_column[None] == task[:, None], scores[seen], -np.inf).argmax(1)
        predicted = label_of_column[column]
        last = bool(seen.all())
        ood = (-output.known).double().cpu().numpy()
        known, unknown = ood[seen], ood[~seen]
        return Step(
            accuracy=metrics.accuracy_by_task(predicted, true, task, index + 1),
            til=metrics.accuracy_by_task(label_of_column[told], true, task, index + 1),
            aca=metrics.aca(predicted, true),
            auc=None if last else metrics.auc(known, unknown),
            fpr95=None if last else metrics.fpr95(known, unknown),
            aupr=None if last else metrics.aupr(known, unknown),
            errors=metrics.error_direction(task_of_column[column], task),
            roc=None if last else _roc(known, unknown),
        )


def _roc(known: np.ndarray, unknown: np.ndarray) -> Roc:
    false_positive, true_positive = metrics.roc_curve_points(known, unknown)
    return Roc(
        false_positive_rate=[round(float(v), 3) for v in false_positive],
        true_positive_rate=[round(float(v), 3) for v in true_positive],
    )
