"""Measures a learner on a stream: accuracies and OOD detection. Each (network, test image) pair is computed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from morecl import metrics
from morecl.data import TaskStream
from morecl.errors import DivergedError
from morecl.labels import Forgotten
from morecl.pictures import some
from morecl.records import Roc

if TYPE_CHECKING:  # torch takes seconds to import
    from morecl.methods import Learner

ROC_POINTS = 100  # enough to draw the curve


@dataclass(frozen=True)
class Step:
    """Measurements after one task, in percent. After the last task nothing is unknown, so OOD fields are ``None``."""

    accuracy: list[float]  # class-incremental, on the test images of each learned task
    til: list[float]  # the same, given the task
    aca: float
    auc: float | None
    fpr95: float | None
    aupr: float | None
    errors: tuple[float, float] | None  # shares of the errors where a class of an earlier or a later task was predicted
    roc: Roc | None


class Evaluator:
    """Scores a learner on the test images of ``stream`` after each task.

    Features are cached by the name of their network, so a network that no longer changes (MORE's finished tasks, a
    frozen backbone) sees each test image once per run.
    """

    def __init__(self, learner: Learner, stream: TaskStream):
        """``learner`` may know the classes of ``stream`` by their names or by their labels."""
        from morecl.scoring import CachedFeatures  # imports torch, which takes seconds

        self._label: dict[Hashable, int] = {}
        for label, name in enumerate(stream.dataset.classes):
            self._label |= {name: label, label: label}
        rows = [stream.test_rows(k) for k in range(len(stream))]
        images = some(stream.dataset.x_test, np.concatenate(rows))  # task by task
        self.features = CachedFeatures(learner, learner.prepare(images))
        self.labels = stream.dataset.y_test[np.concatenate(rows)]
        self.task_of_image = np.repeat(np.arange(len(rows)), [len(part) for part in rows])

    @property
    def learner(self) -> Learner:
        """The learner that is measured.

        It may be replaced by a learner whose networks of the same names give the same features; rescoring does so after
        each task.
        """
        return self.features.learner

    @learner.setter
    def learner(self, learner: Learner) -> None:
        self.features.learner = learner

    def after_task(self, index: int) -> Step:
        """Measure after tasks 0..index: accuracy on their images, detection of all later images as unknown.

        Raises:
            DivergedError: some scores are not finite.
        """
        learner = self.learner
        output = learner.answer(self.features)
        self.features.forget_unasked()
        scores = output.scores.double().cpu().numpy()  # (N, C)
        if not np.isfinite(scores).all():
            raise DivergedError(
                f"training diverged: some scores are not finite after task {index + 1}; lower the learning rate (lr)"
            )
        seen = self.task_of_image <= index
        task = self.task_of_image[seen]
        true = self.labels[seen]
        task_of_column = learner.task_of_column()
        label_of_column = np.array([-1 if isinstance(c, Forgotten) else self._label[c] for c in learner.classes])

        column = scores[seen].argmax(1)
        given_task = np.where(task_of_column[None] == task[:, None], scores[seen], -np.inf).argmax(1)
        predicted = label_of_column[column]
        last = bool(seen.all())
        ood = (-output.known).double().cpu().numpy()
        known, unknown = ood[seen], ood[~seen]
        return Step(
            accuracy=metrics.accuracy_by_task(predicted, true, task, index + 1),
            til=metrics.accuracy_by_task(label_of_column[given_task], true, task, index + 1),
            aca=metrics.aca(predicted, true),
            auc=None if last else metrics.auc(known, unknown),
            fpr95=None if last else metrics.fpr95(known, unknown),
            aupr=None if last else metrics.aupr(known, unknown),
            errors=metrics.error_direction(task_of_column[column], task),
            roc=None if last else _roc(known, unknown),
        )


def _roc(known: np.ndarray, unknown: np.ndarray) -> Roc:
    false_positive, true_positive = metrics.roc_curve_points(known, unknown, ROC_POINTS)
    return Roc(
        false_positive_rate=[round(float(v), 3) for v in false_positive],
        true_positive_rate=[round(float(v), 3) for v in true_positive],
    )
