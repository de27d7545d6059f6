"""DER++: Dark Experience for General Continual Learning (Buzzega, Boschini, Porrello, Abati, Calderara; NeurIPS 2020).

A reservoir of images, each with its label and with the logits z that the network gave *when the image was seen*. Every
step adds to the loss of the current batch two draws from the memory, one held to its logits, one to its labels (Eq. 6):

    L = CE(h(x), y) + alpha E_(x', z') || h(x') - z' ||^2 + beta E_(x'', y'') CE(h(x''), y'').

After the step each image of the batch enters the reservoir by Vitter's rule, with the logits of this very step. As in the
authors' code this happens in every batch of every epoch: the reservoir counts a second pass as more stream, so an image may be stored twice, with what
was said of it at different times, and the memory already replays the current task while it is being learned.

Deviations:

- The head grows, so logits stored in task k have as many entries as classes had been seen by then. Shorter rows are padded
  with zeros, and the squared error is taken over the entries that existed (the authors' head has all classes from the
  start). Like theirs, it is the mean over entries, not their sum.
- Frozen pre-trained backbone with trained adapters and norms instead of a ResNet from scratch; no augmentation.
- alpha and beta are the authors' for CIFAR-10 with 200 images in the memory; they search them per benchmark and size.
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
from morecl.training import Batch, fit


class DerppConfig(TrainingConfig):
    memory_size: int = Field(200, ge=0, description="images in the reservoir")
    memory_batch_size: int = Field(64, ge=1, description="images of each of the two draws from it")
    alpha: float = Field(0.1, ge=0, description="weight of the logits' squared error")
    beta: float = Field(0.5, ge=0, description="weight of the replayed labels' cross-entropy")


class Derpp(SingleHeadLearner):
    name: ClassVar[str] = "derpp"
    Config = DerppConfig
    config: DerppConfig

    def _learn(self, task: TaskData, listener: Listener) -> None:
        config, memory, stored = self.config, self.memory, len(self.memory)
        images = memory.followed_by(task.images)
        columns = np.concatenate([memory.columns, task.first_column + task.targets.numpy()])
        tokens, y = self.prepare(images), torch.from_numpy(columns).to(self.device)
        seen_by_task = np.cumsum(self.task_sizes)
        width = torch.from_numpy(seen_by_task[self.task_of_column()[columns]]).to(self.device)  # of an image's logits
        entry = torch.arange(len(self.classes), device=self.device)

        # the reservoir while the task is learned: slot -> index into `images`, logits
        held = torch.zeros(config.memory_size, dtype=torch.int64, device=self.device)
        logits = torch.zeros(config.memory_size, len(self.classes), device=self.device)
        held[:stored] = torch.arange(stored, device=self.device)
        if stored:
            before = torch.from_numpy(memory.extras["logits"]).to(self.device)
            logits[:stored, : before.shape[1]] = before

        def batches(epoch: int) -> Iterator[Batch]:
            """Everything that is drawn is drawn ahead and sent to the device at once."""
            draw = generator(config.seed, "epoch", task.index, epoch)
            count = len(task.targets)
            order = stored + torch.randperm(count, generator=draw)
            slots = torch.from_numpy(reservoir_slots(memory.seen, count, config.memory_size, draw))
            parts: list[Tensor] = []
            for own, slot in zip(order.split(config.batch_size), slots.split(config.batch_size), strict=True):
                filled = min(memory.seen, config.memory_size)
                draws = [torch.randperm(filled, generator=draw)[: config.memory_batch_size] for _ in range(2)]
                parts += [own, *draws, *_entering(slot)]
                memory.seen += len(own)
            sent = torch.cat(parts).to(self.device).split([len(part) for part in parts])
            for own, first, second, rows, slot in zip(*[iter(sent)] * 5, strict=True):
                index = torch.cat([own, held[first], held[second]])
                sizes = torch.Size((len(own), len(first), len(second)))
                yield tokens[index], y[index], logits[first], width[held[first]], own, rows, slot, sizes

        def loss(x, y, z, width, own, rows, slot, sizes) -> Tensor:
            ...
