"""Naive fine-tuning: the lower bound.

Each task trains adapters, norms and the growing head on its own data alone, with cross-entropy over all classes seen.
There is no memory and no protection, so what earlier tasks need is overwritten. With ``freeze_backbone=False`` the
backbone is trained like the rest.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.progress import Listener


class Finetune(SingleHeadLearner):
    name: ClassVar[str] = "finetune"

    def _learn(self, task: TaskData, listener: Listener) -> None:
        def loss(x: Tensor, columns: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self._features(x)), columns)

        tokens = self.prepare(task.images)
        with self._clock("train"):
            self._fit_rows(loss, tokens, [task.columns], task=task, listener=listener)
