"""DER++: Dark Experience for General Continual Learning (Buzzega, Boschini, Porrello, Abati, Calderara; NeurIPS 2020).

A reservoir of images, each with its label and with the logits z that the network gave *when the image was seen*. Every
step adds to the loss of the current batch two draws from the memory, one held to its logits, one to its labels (Eq. 6):

    L = CE(h(x), y) + alpha E_(x', z') || h(x') - z' ||^2 + beta E_(x'', y'') CE(h(x''), y'').

Then each image of the batch may enter the reservoir (Vitter's rule), with the logits of this very step. As in the
authors' code this happens in every batch of every epoch. A second pass is more stream to the reservoir: an image may be
stored twice, with what was said of it at different times, and the current task is replayed while it is being learned.

Deviations:

- The head grows, so logits stored in task k have as many entries as classes had been seen by then. Shorter rows are
  padded with zeros, and the squared error is taken over the entries that existed (the authors' head has all classes
  from the start). Like theirs, it is the mean over entries, not their sum.
- Frozen pre-trained backbone with trained adapters and norms instead of a ResNet from scratch; no augmentation.
  ``freeze_backbone=False`` trains the backbone in every task.
- alpha is the authors' for CIFAR-10 with 200 images in the memory, beta that of MORE's authors; those of DER++ search
  both per benchmark and size. On digits-5t, on a held-out fifth of the training images, beta = 0.5 costs 14 points of
  ACA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.memory import reservoir_slots
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import Batch


class DerppConfig(TrainingConfig):
    memory_size: int = Field(200, ge=0, description="images in the reservoir")
    memory_batch_size: int = Field(64, ge=1, description="images of each of the two draws from it")
    alpha: float = Field(0.1, ge=0, description="weight of the logits' squared error")
    beta: float = Field(1.0, ge=0, description="weight of the replayed labels' cross-entropy")


class Derpp(SingleHeadLearner):
    name: ClassVar[str] = "derpp"
    Config = DerppConfig
    config: DerppConfig

    def _learn(self, task: TaskData, listener: Listener) -> None:
        with self._clock("train"):
            self._train(task, listener)

    def _train(self, task: TaskData, listener: Listener) -> None:
        config, memory, count = self.config, self.memory, len(task.targets)
        images = memory.followed_by(task.images)
        columns = np.concatenate([memory.columns, task.columns.numpy()])
        tokens, y = self.prepare(images), torch.from_numpy(columns).to(self.device)
        seen_by_task = np.cumsum(self.task_sizes)
        width = torch.from_numpy(seen_by_task[self.task_of_column()[columns]]).to(self.device)  # of an image's logits
        entry = torch.arange(len(self.classes), device=self.device)
        # the reservoir while the task is learned: slot -> index into `images`, slot -> logits; the last slot takes
        # what does not enter, so that every step is of the same shape
        held = torch.zeros(config.memory_size + 1, dtype=torch.int64, device=self.device)
        logits = torch.zeros(config.memory_size + 1, len(self.classes), device=self.device)
        if len(memory):
            stored = torch.from_numpy(memory.extras["logits"]).to(self.device)
            held[: len(memory)] = torch.arange(len(memory), device=self.device)
            logits[: len(memory), : stored.shape[1]] = stored

        def batches(epoch: int) -> Iterator[Batch]:
            draw = generator(config.seed, "epoch", task.index, epoch)
            seen = memory.seen + epoch * count
            order = (len(memory) + torch.randperm(count, generator=draw)).split(config.batch_size)
            slots = torch.from_numpy(reservoir_slots(seen, count, config.memory_size, draw)).split(config.batch_size)
            drawn: list[Tensor] = []  # what chance decides does not depend on training: sent to the device at once
            for own, slot in zip(order, slots, strict=True):
                filled = min(seen, config.memory_size)
                replay = [torch.randperm(filled, generator=draw)[: config.memory_batch_size] for _ in range(2)]
                drawn += [own, *replay, entering(slot, config.memory_size)]
                seen += len(own)
            sent = torch.cat(drawn).to(self.device).split([len(part) for part in drawn])
            for own, first, second, slot in zip(*[iter(sent)] * 4, strict=True):
                a, b = held[first], held[second]
                known = entry < width[a][:, None]
                yield tokens[own], y[own], tokens[a], logits[first], known, tokens[b], y[b], own, slot

        def loss(
            x: Tensor, y: Tensor, xa: Tensor, za: Tensor, known: Tensor, xb: Tensor, yb: Tensor, *enter: Tensor
        ) -> Tensor:
            h, ha, hb = self.head(self._features(torch.cat([x, xa, xb]))).split([len(x), len(xa), len(xb)])
            value = F.cross_entropy(h, y)
            if len(xa):
                error = ((ha - za).square() * known).sum() / known.sum()
                value = value + config.alpha * error + config.beta * F.cross_entropy(hb, yb)  # Eq. 6
            index, slot = enter
            held[slot], logits[slot] = index, h.detach()
            return value

        self._fit(loss, batches, task=task, listener=listener)
        memory.seen += config.epochs * count
        filled = min(memory.seen, config.memory_size)
        kept = held[:filled].cpu().numpy()
        memory.replace(images[kept], columns[kept], logits=logits[:filled].cpu().numpy())


def entering(slots: Tensor, elsewhere: int) -> Tensor:
    """Where each image of a batch goes: of several that are sent to one slot the last stays, others go ``elsewhere``.

    ``slots``: (B,) slot of each image, -1 for none. -> (B,)
    """
    _, back = np.unique(slots.numpy()[::-1], return_index=True)
    last = torch.zeros(len(slots), dtype=torch.bool)
    last[len(slots) - 1 - torch.from_numpy(back)] = True
    return slots.where(last & (slots >= 0), elsewhere)
