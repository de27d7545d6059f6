"""EEIL: End-to-End Incremental Learning (Castro, Marín-Jiménez, Guil, Schmid, Alahari; ECCV 2018).

Each task is learned in two stages. First all images of the task and of the memory are trained with the cross-distilled
loss (Eq. 1)

    L = L_C + sum_f L_D^f,

with L_C the cross-entropy over all classes seen and, for every earlier task f, the distillation loss between the
present outputs for f's classes and those of the old network, both softened with temperature T (Eq. 3)

    L_D^f = - 1/N sum_i sum_{j in f} softmax(z^old_f / T)_j log softmax(z_f / T)_j.

The new classes have many more images than the old ones, which biases the classifier towards them. So a second,
*balanced* stage follows, with a smaller rate, on equally many images of every class; herding chooses those of the new
classes. Its teacher is the temporary network that the first stage left, and the new classes are distilled too. Finally
herding chooses the images of the new classes that enter the memory.

Deviations:

- Frozen pre-trained backbone with trained adapters and norms instead of a ResNet from scratch; no augmentation, no
  gradient noise, no weight decay and no learning-rate steps. ``freeze_backbone=False`` trains the backbone in
  every task.
- Rate and epochs of the first stage are the benchmark's. The second has the paper's 30 epochs at a tenth of the rate.
- Distillation over a task of one class has no effect (its softmax is 1), so only the memory protects such a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.distillation import distillation
from morecl.memory import herding_order
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator


class EeilConfig(TrainingConfig):
    memory_size: int = Field(200, ge=0, description="images in the memory, all classes together")
    temperature: float = Field(2.0, gt=0, description="temperature of the distillation (T)")
    balanced_epochs: int = Field(30, ge=0, description="epochs of the balanced stage")
    balanced_lr_factor: float = Field(0.1, gt=0, description="rate of the balanced stage, as a share of lr")

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        if not self.memory_size:
            return dict.fromkeys(("balanced_epochs", "balanced_lr_factor"), "memory_size=0")
        return {} if self.balanced_epochs else {"balanced_lr_factor": "balanced_epochs=0"}


class Eeil(SingleHeadLearner):
    name: ClassVar[str] = "eeil"
    Config = EeilConfig
    config: EeilConfig

    def _learn(self, task: TaskData, listener: Listener) -> None:
        config, stored = self.config, len(self.memory)
        images = self.memory.followed_by(task.images)
        new = task.columns.numpy()
        columns = np.concatenate([self.memory.columns, new])
        with self._clock("train"):
            tokens = self.prepare(images)
            loss, rows = self._cross_distilled(tokens, columns, self.task_sizes[:-1])
            self._fit_rows(loss, tokens, rows, task=task, listener=listener)
            if stored and config.balanced_epochs:
                share = self.memory.quota(task.first_column)  # what each old class has
                picks = stored + herding_order(self._new_features(tokens), new, share)
                chosen = np.concatenate([np.arange(stored), picks])
                balanced = self.prepare(images[chosen])
                loss, rows = self._cross_distilled(balanced, columns[chosen], self.task_sizes)
                self._fit_rows(
                    loss,
                    balanced,
                    rows,
                    task=task,
                    listener=listener,
                    stage="balanced",
                    epochs=config.balanced_epochs,
                    optimizer=self._optimizer(rate=config.balanced_lr_factor),
                )
            order = herding_order(self._new_features(tokens), new, self.memory.quota(len(self.classes)))
        self.memory.update_ranked(task.images, new, order, generator(config.seed, "memory", task.index))

    def _cross_distilled(
        self, tokens: Tokens, columns: NDArray[np.int64], held: Sequence[int]
    ) -> tuple[Callable[..., Tensor], list[Tensor]]:
        """Eq. 1 and the tensors it needs per image. ``held``: sizes of the tasks that are distilled from the present
        network."""
        old = sum(held)
        teacher = self._logits(tokens)[:, :old]

        def loss(x: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
            logits = self.head(self._features(x))
            value = F.cross_entropy(logits, y)
            for now, then in zip(logits[:, :old].split(held, 1), teacher.split(held, 1), strict=True):
                value = value + distillation(now, then, self.config.temperature).mean()  # Eq. 3
            return value

        return loss, [torch.from_numpy(columns).to(self.device), teacher]

    def _new_features(self, tokens: Tokens) -> Tensor:
        """Normalised features of the images that follow the stored ones, (N, D)."""
        return F.normalize(self._embed(tokens)[len(self.memory) :], dim=1)
