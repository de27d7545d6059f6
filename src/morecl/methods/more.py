"""MORE: A Multi-Head Model for Continual Learning via Out-of-Distribution Replay (Kim, Ke, Liu; CoLLAs 2022).

A frozen pre-trained ViT with adapters. Each task trains the adapters under its own hard-attention masks, its own copy
of the norms, and its own head with |Y| + 1 outputs, the last of which means *ood* and is trained on the replay memory.
Later tasks cannot change what an earlier one uses. A test image goes through every task's network. The largest output
over all heads is the prediction, and its size tells how well the image is known.

Equation numbers are the paper's (Section 3); Algorithm 1 is :meth:`More._learn`, Algorithm 2 is :class:`MoreRule`.
Hard attention (Eq. 8-12) is in :mod:`morecl.methods.masked`, which HAT shares.

Deviations from the paper's text, where it leaves a choice or where we measured that it fails:

- Masks are rounded to exactly {0, 1} when a task ends. The paper keeps sigmoid(500 e), almost 0 or 1, so protection
  leaks a little. With rounded masks the features of a finished task stay bit-identical.
- Batches for Eq. 1 have ``batch_size`` + ``memory_batch_size`` images (Algorithm 1's sample(M)), one mean over both.
- The softmax has temperature 2 in prediction, as in the authors' code; the paper gives none.
- Back-updating continues from each head as the previous task left it (Algorithm 1), without momentum. The effect of a
  step of a linear head grows with the square of its features, so the rate is relative to their mean square (1 for the
  shipped backbone, 3 for DeiT-Ti, 12 for ViT-Ti). And a head's own samples get more weight (``back_update_own_share``).
  Eq. 3 weights all samples equally; with |M| samples of the new task, the fifth task of CIFAR10-5T has 50 own samples
  against 350 others, and earlier heads learn to reject their own classes: two thirds or more of the errors then go to
  later tasks. docs/methods/more.md has the measurements.
- Features after a LayerNorm have no covariance of full rank: the pseudo-inverse is used, and with fewer samples than
  dimensions the covariance is shrunk. See :func:`morecl.gaussian.precision`.
- ``freeze_backbone=False`` trains the ViT in the first task only: nothing protects it, and features of finished tasks
  must not change. Norms of later tasks start from those of the first, which were trained with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl import gaussian
from morecl.config import SCORING, SgdConfig
from morecl.gaussian import Gaussians
from morecl.methods.base import TaskData
from morecl.methods.masked import MaskedTask, ReplayConfig, ReplayLearner
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.scoring import Output, Rule
from morecl.training import Batch, ProtectedSGD, require_finite


class MoreConfig(ReplayConfig):
    temperature: float = Field(2.0, gt=0, description="of the softmax in prediction", json_schema_extra=SCORING)
    c: float = Field(
        20.0,
        gt=0,
        description="scale of the Mahalanobis coefficient: c / distance (Eq. 4)",
        json_schema_extra=SCORING,
    )
    s_max: float = Field(500.0, gt=1, description="largest steepness of the attention (Eq. 8)")
    coefficient: bool = Field(
        True,
        description="multiply by the Mahalanobis coefficient (Eq. 7 instead of Eq. 2)",
        json_schema_extra=SCORING,
    )
    back_update: bool = Field(True, description="train earlier heads to reject later classes (Eq. 3)")
    back_update_epochs: int = Field(10, ge=1)
    back_update_lr: float = Field(0.001, gt=0, le=1e30, description="relative to the mean square of a head's features")
    back_update_batch_size: int = Field(16, ge=1)
    back_update_momentum: float = Field(0.0, ge=0, lt=1)
    back_update_own_share: float | None = Field(
        0.65,
        gt=0,
        lt=1,
        description="total weight of a head's own samples in Eq. 3; null: all samples have the same weight",
    )


class MoreTask(MaskedTask):
    """What one task owns, and its classes as Gaussians: means (C, D), one covariance (D, D), number of samples.

    ``precision`` is the inverse of the covariance, kept because it takes long to compute.
    """

    means: Tensor
    covariance: Tensor
    precision: Tensor
    samples: Tensor

    def __init__(self, norms: Norms, shape: tuple[int, int], dim: int, classes: int, init: torch.Generator):
        super().__init__(norms, shape, dim, classes + 1, init)
        self.register_buffer("means", torch.zeros(classes, dim, dtype=torch.float64))
        self.register_buffer("covariance", torch.zeros(dim, dim, dtype=torch.float64))
        self.register_buffer("precision", torch.zeros(dim, dim, dtype=torch.float64))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def describe(self, features: Tensor, targets: Tensor) -> None:
        """Eq. 5-6: estimate the Gaussians from ``features`` (N, D) with ``targets`` (N,)."""
        statistics = gaussian.estimate(features, targets, len(self.means))
        self.means.copy_(statistics.means)
        self.covariance.copy_(statistics.covariance)
        self.samples.fill_(statistics.samples)
        self.precision.copy_(gaussian.precision(self.gaussians))

    @property
    def gaussians(self) -> Gaussians:
        return Gaussians(self.means, self.covariance, int(self.samples))


class MoreRule(Rule):
    """Algorithm 2: p(Y^k | x, k) s^k(x) of every task, side by side (Eq. 7); without the coefficient s^k, Eq. 2."""

    def __init__(self, tasks: Callable[[], Sequence[MoreTask]], temperature: float, c: float | None):
        """``c``: numerator of the coefficient; ``None``: no coefficient."""
        super().__init__()
        self._tasks, self.temperature, self.c = tasks, temperature, c

    def score(self, features: Sequence[Tensor]) -> Output:
        of_tasks = [self._of_task(net, z) for net, z in zip(self._tasks(), features, strict=True)]
        probabilities, scores = (torch.cat(parts, 1) for parts in zip(*of_tasks, strict=True))
        return Output(scores, probabilities, scores.amax(1))

    def _of_task(self, net: MoreTask, z: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and scores of a task's classes, (N, C_k) each, from the features (N, D) under its network."""
        logits = F.linear(z.double(), net.head.weight.double(), net.head.bias.double())
        p = (logits / self.temperature).softmax(1)[:, :-1]  # the ood output takes part, then is dropped
        if self.c is None:
            return p, p
        return p, p * gaussian.coefficient(z, net.means, net.precision, self.c)[:, None]  # Eq. 4


class More(ReplayLearner):
    name: ClassVar[str] = "more"
    Config: ClassVar[type[SgdConfig]] = MoreConfig
    config: MoreConfig

    def _new_task(self, norms: Norms, shape: tuple[int, int], classes: int, init: torch.Generator) -> MoreTask:
        return MoreTask(norms, shape, self.network.dim, classes, init)

    @property
    def tasks(self) -> list[MoreTask]:  # type: ignore[override]
        return cast("list[MoreTask]", self.model["tasks"])

    # ---- Algorithm 1 ------------------------------------------------------------------------------------------

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(task.images)
        with self._clock("train"):
            self._train_against_memory(task, tokens, listener)
        if self.config.back_update and len(self.memory):
            with self._clock("back_update"):
                self._back_update(task, tokens, listener)
        with self._clock("train"):
            features = self.embed(tokens, str(task.index))
            require_finite(task.index, [features])
            self.tasks[-1].describe(features, task.targets.to(self.device))
        columns = task.columns.numpy()
        self.memory.update(task.images, columns, generator(self.config.seed, "memory", task.index))

    def _train_against_memory(self, task: TaskData, tokens: Tokens, listener: Listener) -> None:
        """Eq. 1: the classes of the task against each other, and all that is replayed as *ood*."""
        ood = torch.full((len(self.memory),), task.classes)
        self._train_with_memory(task, tokens, task.targets, ood, listener)

    def _back_update(self, task: TaskData, tokens: Tokens, listener: Listener) -> None:
        """Eq. 3: earlier heads learn to reject the classes of this task (and of each other), with frozen features.

        The data are the memory from before this task and equally many random samples of the task. The features of
        head j are those of network j, computed once. The heads do not depend on each other, so all are trained
        together in one batch: head j is row j of the stacked weights, padded to the widest head.
        """
        config = self.config
        draw = generator(config.seed, "back-update", task.index)
        drawn = torch.randperm(len(tokens), generator=draw)[: len(self.memory)]
        replay, sample = self.prepare(self.memory.images), self.prepare(task.images[drawn.numpy()])
        owner = torch.from_numpy(self.task_of_column()[self.memory.columns])
        first = np.cumsum([0, *self.task_sizes])

        heads = [net.head for net in self.tasks[:-1]]
        widest = max(head.out_features for head in heads)
        weight = torch.zeros(len(heads), widest, self.network.dim, device=self.device)
        bias = torch.full((len(heads), widest), torch.finfo().min, device=self.device)  # probability 0
        features, targets = [], []
        for j, head in enumerate(heads):
            weight[j, : head.out_features], bias[j, : head.out_features] = head.weight.data, head.bias.data
            features.append(torch.cat([self.embed(replay, str(j)), self.embed(sample, str(j))]))
            ood = head.out_features - 1
            own = torch.from_numpy(self.memory.columns) - int(first[j])
            targets.append(torch.cat([own.where(owner == j, ood), torch.full((len(sample),), ood)]))
        X = torch.stack(features)  # (J, n, D)
        y = torch.stack(targets).to(self.device)  # (J, n)
        own_sample = y != torch.tensor([[head.out_features - 1] for head in heads], device=self.device)
        emphasis = _emphasis(own_sample, config.back_update_own_share)  # (J, n), mean 1
        emphasis /= X.square().mean((1, 2))[:, None]  # scaling a head's loss scales its rate
        weight.requires_grad_(), bias.requires_grad_()

        def batches(epoch: int) -> Iterator[Batch]:
            yield from self._weighted_batches(X.shape[1], config.back_update_batch_size, draw)

        def loss(index: Tensor, w: Tensor) -> Tensor:
            logits = torch.baddbmm(bias[:, None], X[:, index], weight.mT)  # (J, B, widest)
            errors = F.cross_entropy(logits.flatten(0, 1), y[:, index].flatten(), reduction="none")
            errors = errors.view(len(heads), -1) * emphasis[:, index]
            return (errors * w).sum() / w.sum()  # the sum over heads of each head's mean

        optimizer = ProtectedSGD([weight, bias], config.back_update_lr, config.back_update_momentum)
        self._fit(
            loss,
            batches,
            task=task,
            listener=listener,
            optimizer=optimizer,
            epochs=config.back_update_epochs,
            stage="back-update",
            speed=False,
        )
        for j, head in enumerate(heads):
            head.weight.data.copy_(weight.detach()[j, : head.out_features])
            head.bias.data.copy_(bias.detach()[j, : head.out_features])

    # ---- Algorithm 2 ------------------------------------------------------------------------------------------

    def _new_rule(self) -> Rule:
        config = self.config
        return MoreRule(self._all_tasks, config.temperature, config.c if config.coefficient else None)

    def _all_tasks(self) -> list[MoreTask]:
        return self.tasks

    # ---- inspection -------------------------------------------------------------------------------------------

    def statistics(self, task: int) -> Gaussians:
        """Class means (C, D), shared covariance (D, D) and number of samples of the task, float64 on the CPU."""
        net = cast(MoreTask, self._task(task))
        return Gaussians(net.means.cpu(), net.covariance.cpu(), int(net.samples))

    def entries(self) -> dict[str, int]:
        """The precision matrices are not counted: they are computed from the covariances."""
        parts = super().entries()
        parts["statistics"] += sum(net.means.numel() + net.covariance.numel() for net in self.tasks)
        return parts

    def _restore_networks(
        self, classes: Sequence[Hashable], task_sizes: Sequence[int], state: dict[str, Tensor]
    ) -> None:
        """A learner that was saved without precision matrices gets them here."""
        super()._restore_networks(classes, task_sizes, _with_precision(state, len(task_sizes)))


def _with_precision(state: dict[str, Tensor], tasks: int) -> dict[str, Tensor]:
    missing = [k for k in range(tasks) if f"model.tasks.{k}.precision" not in state]
    made = {}
    for k in missing:
        means, covariance, samples = (state[f"model.tasks.{k}.{name}"] for name in ("means", "covariance", "samples"))
        made[f"model.tasks.{k}.precision"] = gaussian.precision(Gaussians(means, covariance, int(samples)))
    return state | made


def _emphasis(own: Tensor, share: float | None) -> Tensor:
    """Weights (J, n) of mean 1 that give the ``own`` samples of each head the given share of the total weight."""
    if share is None:
        return torch.ones(own.shape, device=own.device)
    count = own.sum(1, keepdim=True).float()
    total = own.shape[1]
    return torch.where(own, share * total / count, (1 - share) * total / (total - count))
