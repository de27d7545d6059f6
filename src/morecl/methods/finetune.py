"""Naive fine-tuning: the lower bound.

Each task trains adapters, norms and the growing head on its own data alone, with cross-entropy over all classes seen.
There is no memory and no protection, so what earlier tasks need is overwritten. With ``freeze_backbone=False`` the
backbone is trained like the rest.
"""

from __future__ import annotations

from typing import ClassVar

from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.progress import Listener


class Finetune(SingleHeadLearner):
    name: ClassVar[str] = "finetune"

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(task.images)
        with self._clock("train"):
            self._fit_rows(self._cross_entropy, tokens, [task.columns], task=task, listener=listener)
