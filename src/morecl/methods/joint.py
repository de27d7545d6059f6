"""Joint training: the upper bound.

Keeps every image; those that are not in memory stay where they are. For each task it starts again from the pre-trained
backbone (new adapters, norms and head) and trains on everything seen so far, with cross-entropy over all classes, as if
all data came at once. Not a continual learner: nothing can be forgotten, and both memory and time grow with the stream.
It shows the best that others could reach. With ``freeze_backbone=False`` the backbone is trained too, each time from
its initial weights.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.progress import Listener
from morecl.random import generator


class Joint(SingleHeadLearner):
    name: ClassVar[str] = "joint"
    keeps_all: ClassVar[bool] = True

    def _learn(self, task: TaskData, listener: Listener) -> None:
        self.memory.keep(task.images, task.columns.numpy())
        self._reset()
        self.head.grow(len(self.classes), generator(self.config.seed, "head", task.index))
        tokens, columns = self.prepare(self.memory.images), torch.from_numpy(self.memory.columns)

        with self._clock("train"):
            self._fit_rows(self._cross_entropy, tokens, [columns], task=task, listener=listener)
