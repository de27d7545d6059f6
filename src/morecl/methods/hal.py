"""HAL: Using Hindsight to Anchor Past Knowledge in Continual Learning (Chaudhry, Gordo, Dokania, Torr, Lopez-Paz; AAAI
2021), replay with anchors.

A batch B_M from memory is added to each batch B of the task. In addition every class has one *anchor* e, an image
optimised to be forgotten first, whose prediction is to stay the same. The method looks one step ahead,

    theta~ = theta - lr grad l(theta; B u B_M)

and then takes a step that lowers the loss and the change that was seen at the anchors,

    theta <- theta - lr grad [ l(theta; B u B_M) + lambda sum_e || f_theta~(e) - f_theta(e) ||^2 ].

After a task, the anchors of its classes are found by gradient ascent on the forgetting seen in hindsight. With theta_M
being theta after fine-tuning on the memory of the past tasks, phi the features, and phi_t their mean over the task:

    e_y = argmax_e  l(theta_M; e, y) - l(theta; e, y) - gamma || phi(e) - phi_t ||^2

Deviations:

- The second step takes the gradient at theta~ with f_theta(e) as a constant. The exact gradient goes through
  theta~(theta) and needs second derivatives; the usual code takes it at theta with f_theta~(e) as a constant, which
  pulls the predictions *towards* those after the step.
- That gradient is clipped to the length of the loss's own gradient, and only as much of it is added as brings the
  anchors' predictions nearest to what they were. With large features (ViT-Ti/16) all of it overshoots, more with every
  step, and training diverges at a rate of 0.005.
- An anchor stays an image: it is clamped to the range of pixels after each step. Large features (ViT-Ti/16) would
  otherwise drive it to infinity.
- phi_t is the exact mean of the task's features after training, not a running one.
- The first task has no earlier memory to fine-tune on: its anchors follow the mean embedding alone.
- The memory is balanced, batches have 64 + 64 images, and the step has momentum, as for other methods here.
- ``freeze_backbone=False`` trains the backbone in every task; it is then part of theta.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import Batch, paired_batches


class HalConfig(TrainingConfig):
    """lambda, gamma, the number of ascent steps and of fine-tuning epochs are those of Mammoth's implementation."""

    memory_size: int = Field(200, ge=0, description="images in the replay memory, all classes together")
    memory_batch_size: int = Field(64, ge=1, description="replayed images added to each batch")
    lamb: float = Field(0.1, ge=0, description="lambda, weight of the change at the anchors")
    gamma: float = Field(0.1, ge=0, description="how close an anchor's features stay to the task's mean")
    anchor_steps: int = Field(100, ge=1, description="steps of gradient ascent to find the anchors")
    anchor_lr: float = Field(0.005, gt=0, description="rate of that ascent, in units of the normalised image")
    finetune_epochs: int = Field(1, ge=1, description="epochs of fine-tuning on the memory for theta_M")

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        off = {} if self.memory_size else dict.fromkeys(("memory_batch_size", "finetune_epochs"), "memory_size=0")
        of_anchors = ("gamma", "anchor_steps", "anchor_lr", "finetune_epochs")
        return off if self.lamb else off | dict.fromkeys(of_anchors, "lamb=0")


class Anchors(nn.Module):
    """One normalised image per class: (C, 3, S, S)."""

    images: Tensor

    def __init__(self, side: int):
        super().__init__()
        self.register_buffer("images", torch.empty(0, 3, side, side))

    def grow(self, classes: int) -> None:
        self.images = torch.cat([self.images, self.images.new_zeros(classes, *self.images.shape[1:])])


class Hal(SingleHeadLearner):
    name: ClassVar[str] = "hal"
    Config = HalConfig
    config: HalConfig

    def _reset(self) -> None:
        super()._reset()
        self.model["anchors"] = Anchors(self.backbone.input.size).to(self.device)

    def _grow(self, classes: int) -> None:
        super()._grow(classes)
        self.anchors.grow(classes)

    @property
    def anchors(self) -> Anchors:
        return cast(Anchors, self.model["anchors"])

    # ---- training ---------------------------------------------------------------------------------------------

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(task.images)
        with self._clock("train"):
            self._train(task, tokens, listener)
            anchors = self._find_anchors(task, self._embed(tokens).mean(0), listener)
            self.anchors.images[task.first_column :] = anchors
        self._remember(task)

    def _train(self, task: TaskData, tokens: Tokens, listener: Listener) -> None:
        config = self.config
        columns = task.columns.to(self.device)
        replay = self.prepare(self.memory.images)
        replay_columns = torch.from_numpy(self.memory.columns).to(self.device)

        def batches(epoch: int) -> Iterator[Batch]:
            draw = generator(config.seed, "epoch", task.index, epoch)
            size = config.memory_batch_size
            pairs = paired_batches(len(tokens), config.batch_size, len(replay), size, draw, self.device)
            shown, again = self._shown(tokens, task, epoch), self._shown(replay, task, epoch, "replay")
            shown.ahead([own for own, _ in pairs])
            for own, other in pairs:
                yield torch.cat([shown[own], again[other]]), torch.cat([columns[own], replay_columns[other]])

        anchors = self.network.prefix(self.anchors.images[: task.first_column]) if task.index else None

        def hold(*batch: Tensor) -> None:
            if anchors is not None:
                self._hold(anchors)

        self._fit(self._cross_entropy, batches, task=task, listener=listener, after_backward=hold)

    def _hold(self, anchors: Tensor) -> None:
        """Add the gradient of lambda sum || f_theta~(e) - f_theta(e) ||^2 to the others, for the anchors' prefix:
        clipped to their length, and as much of it as brings the predictions on the anchors nearest to what they were.
        """
        parameters: list[Tensor] = list(self.model.parameters())
        gradients = [cast(Tensor, p.grad) for p in parameters]
        with torch.no_grad():
            before = self.head(self._features(anchors))
            ahead = torch._foreach_add(parameters, gradients, alpha=-self.config.lr)
        with self._at(ahead):
            change = self.head(self._features(anchors)) - before
            penalty = self.config.lamb * change.square().sum()
            back = torch.autograd.grad(penalty, parameters)
        with torch.no_grad():  # it only has to undo a part of the loss's step
            back = torch._foreach_mul(back, (_length(gradients) / _length(back)).clamp(max=1))
        with torch.no_grad(), self._at(torch._foreach_add(ahead, back, alpha=-self.config.lr)):
            effect = self.head(self._features(anchors)) - before - change
            share = -(change * effect).sum() / effect.square().sum().clamp(min=torch.finfo(effect.dtype).tiny)
            torch._foreach_add_(gradients, torch._foreach_mul(back, share.clamp(0, 1)))

    @contextmanager
    def _at(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Within this context the learned parameters have these values."""
        parameters: list[Tensor] = list(self.model.parameters())
        own = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, list(values))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, own)

    # ---- anchors ----------------------------------------------------------------------------------------------

    def _find_anchors(self, task: TaskData, mean: Tensor, listener: Listener) -> Tensor:
        """The task's anchors (classes, 3, S, S): uniform noise in 0..1, then gradient ascent."""
        side = self.backbone.input.size
        start = torch.rand(task.classes, 3, side, side, generator=generator(self.config.seed, "anchors", task.index))
        columns = torch.arange(task.first_column, task.first_column + task.classes, device=self.device)
        hindsight = self._hindsight(task, listener)
        darkest, brightest = ((level - self.preprocess.mean) / self.preprocess.std for level in (0.0, 255.0))

        def step(batch: Batch) -> Tensor:
            (images,) = batch
            images = images + self.config.anchor_lr * self._ascent(images, columns, mean, hindsight)
            return torch.minimum(torch.maximum(images, darkest), brightest)

        run = self._repeated(step)
        images = start.to(self.device)
        for _ in range(self.config.anchor_steps):
            images = run((images,))
        return images

    def _hindsight(self, task: TaskData, listener: Listener) -> list[Tensor] | None:
        """theta_M: the parameters after fine-tuning on the memory; ``None`` while the memory is empty."""
        if not len(self.memory):
            return None
        tokens, columns = self.prepare(self.memory.images), torch.from_numpy(self.memory.columns).to(self.device)
        epochs = self.config.finetune_epochs
        with self._at(list(self.model.parameters())):
            self._fit_rows(
                self._cross_entropy, tokens, [columns], task=task, listener=listener, stage="hindsight", epochs=epochs
            )
            return [p.detach().clone() for p in self.model.parameters()]

    def _ascent(self, images: Tensor, columns: Tensor, mean: Tensor, hindsight: list[Tensor] | None) -> Tensor:
        """Gradient of the objective of the anchors with respect to ``images``: (classes, 3, S, S)."""
        images = images.detach().requires_grad_()
        features = self._features(self.network.prefix(images))
        near = self.config.gamma * (features - mean).square().sum()
        if hindsight is None:
            return torch.autograd.grad(-near, images)[0]
        now = F.cross_entropy(self.head(features), columns, reduction="sum")
        (gradient,) = torch.autograd.grad(-now - near, images)
        with self._at(hindsight):
            features = self._features(self.network.prefix(images))
            later = F.cross_entropy(self.head(features), columns, reduction="sum")
            return gradient + torch.autograd.grad(later, images)[0]

    def buffer_entries(self) -> int:
        """Anchors are images, so they belong to the replay buffer."""
        return super().buffer_entries() + self.anchors.images.numel()


def _length(tensors: Sequence[Tensor]) -> Tensor:
    """Norm of all ``tensors`` as one vector."""
    return torch.stack(torch._foreach_norm(list(tensors))).norm().clamp(min=torch.finfo(torch.float32).tiny)
