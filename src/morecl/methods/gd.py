"""GD: Overcoming Catastrophic Forgetting with Unlabeled Data in the Wild (Lee, Lee, Shin, Lee; ICCV 2019), without
the unlabeled data.

There are three networks: P, the one before the task; C, a teacher for the task alone; M, the new one. Each task after
the first is learned in three steps:

1. C starts from P and learns to tell the task's classes apart. On the memory's images, which belong to none of them, it
   learns to be unsure (confidence calibration): cross-entropy on the task + KL(uniform || p_C) on the memory.
2. M starts from P and learns all classes from the task and the memory. It is distilled from both teachers, from each
   over *all* of its classes together (this is the *global* distillation; LwF and EEIL distil task by task):

       L = CE(seen) + |prev| / |seen| L_dst(P, prev) + |task| / |seen| L_dst(C, task),
       L_dst(R, Y) = - T^2 / N sum_i sum_{y in Y} softmax(z_R / T)_y log softmax(z_M / T)_y.

3. Balanced fine-tuning: training of the head alone continues with the same loss, a smaller rate, and images weighted by
   w = N / (|classes| n_y), n_y the number of images of its class, so that all classes have the same weight. In each
   term of the loss the weights balance the classes that it is about; other images have weight 1.

The first task has no memory and no P: M is C.

Deviations:

- No external data, as in the MORE paper's comparison. In the published method the ensemble Q of P and C teaches on
  external images only, so it is left out; P and C remain.
- Frozen pre-trained backbone with trained adapters and norms instead of a WideResNet from scratch; no augmentation, no
  weight decay, no learning-rate steps. Steps 1 and 2 take ``epochs`` each (200 and 180 in the paper).
  ``freeze_backbone=False`` trains the backbone in every task, in steps 1 and 2.
- In step 3 the features do not change, so they are computed once and the head is trained on them.
- In a task of one class the teacher C has nothing to tell apart, and distilling from it has no effect.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.distillation import class_weights, distillation
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.nn.tokens import Tokens
from morecl.progress import Listener


class GdConfig(TrainingConfig):
    memory_size: int = Field(200, ge=0, description="images in the memory, all classes together")
    temperature: float = Field(2.0, gt=0, description="temperature of the distillation (T)")
    balanced_epochs: int = Field(20, ge=0, description="epochs of the balanced fine-tuning")
    balanced_lr_factor: float = Field(0.1, gt=0, description="rate of the balanced fine-tuning, as a share of lr")

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        return {} if self.balanced_epochs else {"balanced_lr_factor": "balanced_epochs=0"}


class Gd(SingleHeadLearner):
    name: ClassVar[str] = "gd"
    Config = GdConfig
    config: GdConfig

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(self.memory.followed_by(task.images))
        columns = torch.cat([torch.from_numpy(self.memory.columns), task.columns])
        columns = columns.to(self.device)
        with self._clock("train"):
            if task.index == 0:
                self._train_teacher(task, tokens, columns, listener)
            else:
                old, start = task.first_column, {key: value.clone() for key, value in self.model.state_dict().items()}
                P = self._logits(tokens)[:, :old]
                self._train_teacher(task, tokens, columns, listener)
                C = self._logits(tokens)[:, old:]
                self.model.load_state_dict(start)
                self._train(task, tokens, columns, P, C, listener)
                if self.config.balanced_epochs:
                    self._balance(task, tokens, columns, P, C, listener)
        self._remember(task)

    def _train_teacher(self, task: TaskData, tokens: Tokens, columns: Tensor, listener: Listener) -> None:
        """Step 1. Images of the memory belong to no class of the task: their target is uniform."""
        first, classes = task.first_column, task.classes
        own = (columns >= first).float()
        target = F.one_hot((columns - first).clamp(min=0), classes) * own[:, None] + (1 - own[:, None]) / classes

        def loss(x: Tensor, target: Tensor, own: Tensor) -> Tensor:
            logits = self.head(self._features(x))[:, first:]
            each = -(target * logits.log_softmax(1)).sum(1)
            unsure = 1 - own
            return (each * own).sum() / own.sum().clamp(min=1) + (each * unsure).sum() / unsure.sum().clamp(min=1)

        stage = "teacher" if task.index else ""  # the first task's only network
        self._fit_rows(loss, tokens, [target, own], task=task, listener=listener, stage=stage)

    def _train(self, task: TaskData, tokens: Tokens, columns: Tensor, P: Tensor, C: Tensor, listener: Listener) -> None:
        """Step 2."""
        weights = torch.ones(len(columns), 3, device=self.device)

        def loss(x: Tensor, y: Tensor, p: Tensor, c: Tensor, w: Tensor) -> Tensor:
            return self._loss(self.head(self._features(x)), y, p, c, w)

        self._fit_rows(loss, tokens, [columns, P, C, weights], task=task, listener=listener)

    def _balance(
        self, task: TaskData, tokens: Tokens, columns: Tensor, P: Tensor, C: Tensor, listener: Listener
    ) -> None:
        """Step 3."""
        config, old, seen = self.config, task.first_column, len(self.classes)
        terms = ((0, seen), (0, old), (old, seen))  # the classes of each term of the loss
        weights = torch.stack([class_weights(columns, first, last) for first, last in terms], 1)

        def loss(features: Tensor, y: Tensor, p: Tensor, c: Tensor, w: Tensor) -> Tensor:
            return self._loss(self.head(features), y, p, c, w)

        self._fit_rows(
            loss,
            self._embed(tokens),
            [columns, P, C, weights],
            task=task,
            listener=listener,
            stage="balanced",
            epochs=config.balanced_epochs,
            optimizer=self._optimizer(list(self.head.parameters()), config.balanced_lr_factor),
        )

    def _loss(self, logits: Tensor, y: Tensor, p: Tensor, c: Tensor, w: Tensor) -> Tensor:
        """L with the weights ``w`` (B, 3) of its three terms; ``p`` (B, |prev|), ``c`` (B, |task|): the teachers."""
        T, old, new = self.config.temperature, p.shape[1], c.shape[1]
        ce = F.cross_entropy(logits, y, reduction="none")
        from_p = T**2 * distillation(logits[:, :old], p, T) * old / (old + new)
        from_c = T**2 * distillation(logits[:, old:], c, T) * new / (old + new)
        return (w * torch.stack([ce, from_p, from_c], 1)).sum(1).mean()
