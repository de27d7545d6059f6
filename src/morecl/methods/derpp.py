"""DER++: Dark Experience for General Continual Learning (Buzzega, Boschini, Porrello, Abati, Calderara; NeurIPS 2020).

The memory is a reservoir of images, each with its label and the logits z that the network gave *when the image was
seen*. Every step adds two draws from the memory to the loss of the current batch, one with a penalty on its logits, one
with its labels (Eq. 6):

    L = CE(h(x), y) + alpha E_(x', z') || h(x') - z' ||^2 + beta E_(x'', y'') CE(h(x''), y'').

Then each image of the batch may enter the reservoir (Vitter's rule) with the logits of this step. As in the authors'
code this happens in every batch of every epoch. To the reservoir, a second pass is more of the stream: an image may be
stored twice with logits of different times, and the current task is replayed while it is being learned.

Deviations:

- The head grows, so logits stored in task k have as many entries as classes had been seen by then. Shorter rows are
  padded with zeros, and the squared error is taken over the entries that existed (the authors' head has all classes
  from the start); with ``mask_unseen=False`` over all of them. Like theirs, it is the mean over entries, not their sum.
- Frozen pre-trained backbone with trained adapters and norms instead of a ResNet from scratch; no augmentation.
  ``freeze_backbone=False`` trains the backbone in every task.
- alpha is the authors' for CIFAR-10 with 200 images in memory, beta that of MORE's authors; DER++'s authors tune both
  per benchmark and memory size. On digits-5t, on a held-out fifth of the training images, beta = 0.5 costs 14 points of
  ACA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.memory import LogitReservoir
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import Batch


class DerppConfig(TrainingConfig):
    memory_size: int = Field(200, ge=0, description="images in the reservoir")
    memory_batch_size: int = Field(64, ge=1, description="images in each of the two draws from it")
    alpha: float = Field(0.1, ge=0, description="weight of the squared error of the logits")
    beta: float = Field(1.0, ge=0, description="weight of the cross-entropy of the replayed labels")
    mask_unseen: bool = Field(
        True, description="compare stored logits only of classes known by then; false: those of later ones are to be 0"
    )

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        idle = ("memory_batch_size", "alpha", "beta", "mask_unseen")
        if not self.memory_size:
            return dict.fromkeys(idle, "memory_size=0")
        return {} if self.alpha else {"mask_unseen": "alpha=0"}


def equation_6(
    h: Tensor, y: Tensor, ha: Tensor, za: Tensor, known: Tensor, hb: Tensor, yb: Tensor, alpha: float, beta: float
) -> Tensor:
    """L for a batch ``h`` with labels ``y``, a draw ``ha`` with stored logits ``za`` (compared where ``known``), and a
    draw ``hb`` with labels ``yb``. With nothing to replay the draws are empty and L is the batch's cross-entropy."""
    value = F.cross_entropy(h, y)
    if len(ha):
        error = ((ha - za).square() * known).sum() / known.sum()
        value = value + alpha * error + beta * F.cross_entropy(hb, yb)
    return value


class Step(NamedTuple):
    """A :data:`Batch` with names. ``a`` and ``b`` are the two draws from the memory."""

    x: Tensor  # tokens of the batch's B images
    y: Tensor  # their columns
    xa: Tensor  # tokens
    za: Tensor  # stored logits
    known: Tensor  # which of their entries are compared
    xb: Tensor  # tokens
    yb: Tensor  # columns
    own: Tensor  # indices of the batch's images in the reservoir's ``images`` (B,)
    slots: Tensor  # which they enter (B,)


class Derpp(SingleHeadLearner):
    name: ClassVar[str] = "derpp"
    Config = DerppConfig
    config: DerppConfig

    def _learn(self, task: TaskData, listener: Listener) -> None:
        config = self.config
        with self._clock("train"):
            reservoir = LogitReservoir(self.memory, task.images, task.columns.numpy(), self.task_sizes, self.device)
            tokens, y = self.prepare(reservoir.images), torch.from_numpy(reservoir.columns).to(self.device)

            def batches(epoch: int) -> Iterator[Batch]:
                draw = generator(config.seed, "epoch", task.index, epoch)
                shown = self._shown(tokens, task, epoch)
                drawn = list(reservoir.epoch(epoch, config.batch_size, config.memory_batch_size, draw))
                shown.ahead([own for own, *_ in drawn])
                for own, slots, first, second in drawn:
                    a, za, known = reservoir.read(first)
                    known = known | (not config.mask_unseen)
                    b, _, _ = reservoir.read(second)
                    yield Step(
                        x=shown[own], y=y[own], xa=shown[a], za=za, known=known, xb=shown[b], yb=y[b],
                        own=own, slots=slots,
                    )  # fmt: skip

            def loss(*batch: Tensor) -> Tensor:
                s = Step(*batch)
                logits = self.head(self._features(torch.cat([s.x, s.xa, s.xb])))
                h, ha, hb = logits.split([len(s.x), len(s.xa), len(s.xb)])
                reservoir.write(s.own, s.slots, h.detach())
                return equation_6(h, s.y, ha, s.za, s.known, hb, s.yb, config.alpha, config.beta)

            self._fit(loss, batches, task=task, listener=listener)
            reservoir.store(config.epochs)
