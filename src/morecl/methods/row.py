"""ROW (replay, OOD, WP): Learnability and Algorithm for Continual Learning (Kim, Xiao, Konishi, Liu; ICML 2023).

Within-task prediction (WP) and the detection of what belongs to other tasks (OOD) get a head each. A task is learned in
three steps:

a. its network and its OOD head, with |Y^k| + 1 outputs, against the memory, as in MORE;
b. its WP head, with |Y^k| outputs, on its images alone, features frozen;
c. the OOD heads of *all* tasks, features frozen, on equally many images of every class: those of the task against all
   others, as many in each batch.

The answer is a product of three: WP, the OOD head's largest probability of a class of the task, and the inverse of the
Mahalanobis distance to the nearest class of the task. Both heads have softmax temperature 5.

The epochs (5 for b, 10 for c), batches (32, in c as many of other tasks), the rate (that of the training) and the
covariance 0.8 S + 0.2 I are those of the authors' code.

Deviations:

- Masks are rounded when a task ends, see :mod:`morecl.methods.masked`; batches of step a are MORE's.
- The WP head starts from the OOD head as step a leaves it. The authors' code has it the other way round: the OOD head
  starts from the WP head as step b leaves it, which keeps an ood output that its prediction drops.
- Step c gives every head equally many steps, as many as the task with the most images needs, so all heads can be
  trained in one batched pass; its last batch of an epoch is filled up.
- A task none of whose images has a place in memory keeps its OOD head. Without a memory steps b and c are left out.
- The class covariances are divided by n, not by n - 1.
- ``known`` is the largest of all scores, as in MORE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl import gaussian
from morecl.config import SCORING
from morecl.methods.base import TaskData, count
from morecl.methods.gaussian_rule import GaussianRule
from morecl.methods.masked import MaskedTask, ReplayConfig, ReplayLearner
from morecl.methods.stacked_heads import StackedHeads
from morecl.nn.heads import task_head
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.scoring import LearnedTask, Output
from morecl.training import Batch, ProtectedSGD, repeated_shuffles

SHRINKAGE = 0.2  # share of the identity in the covariance


class RowConfig(ReplayConfig):
    s_max: float = Field(500.0, gt=1, description="how hard the attention gets")
    wp_epochs: int = Field(5, ge=1, description="of the within-task head")
    ood_epochs: int = Field(10, ge=1, description="of all OOD heads, after every task")
    head_batch_size: int = Field(32, ge=1, description="for both kinds of head")
    head_lr: float | None = Field(None, gt=0, le=1e30, description="for both kinds of head; null: lr")
    temperature: float = Field(5.0, gt=0, description="of both softmaxes in prediction", json_schema_extra=SCORING)

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        off = super().switched_off(further=further)
        of_heads = ("wp_epochs", "ood_epochs", "head_batch_size", "head_lr")
        return off if self.memory_size else off | dict.fromkeys(of_heads, "memory_size=0")


class RowTask(MaskedTask):
    """What one task owns; ``head`` is its OOD head, (D -> classes + 1), ``wp_head`` (D -> classes)."""

    def __init__(self, norms: Norms, shape: tuple[int, int], dim: int, classes: int, init: torch.Generator):
        super().__init__(norms, shape, dim, classes + 1, init)
        self.wp_head = task_head(dim, classes, init)


class RowRule(GaussianRule):
    """p(c | x, k) of the WP head, times the largest p(c | x) of the OOD head, over the Mahalanobis distance.

    With one task there is nothing that its OOD head could have been told from, and it is not asked.
    """

    def __init__(self, tasks: Callable[[], Sequence[RowTask]], dim: int, temperature: float):
        super().__init__(dim)
        self._tasks = tasks
        self.temperature = temperature

    def fit(self, learned: LearnedTask) -> None:
        task = learned.task
        z = learned.features(learned.networks[-1])
        gaussians = gaussian.estimate(z, task.targets.to(z.device), task.classes)
        identity = torch.eye(z.shape[1], dtype=torch.float64, device=z.device)
        shrunk = (1 - SHRINKAGE) * gaussians.covariance + SHRINKAGE * identity
        self.means[task.first_column :] = gaussians.means
        self.precisions[task.index] = torch.linalg.inv(shrunk)

    def score(self, features: Sequence[Tensor]) -> Output:
        parts = []
        for k, (net, z) in enumerate(zip(self._tasks(), features, strict=True)):
            within = (net.wp_head(z).double() / self.temperature).softmax(1)  # (N, C_k)
            parts.append(within * (self._of_task(net, z) / self.nearest(k, z))[:, None])
        scores = torch.cat(parts, 1)
        return Output(scores, scores / scores.sum(1, keepdim=True), scores.amax(1))

    def _of_task(self, net: RowTask, z: Tensor) -> Tensor:
        """The OOD head's largest probability of a class of the task, (N,)."""
        if len(self.sizes) == 1:
            return torch.ones(len(z), dtype=torch.float64, device=z.device)
        return (net.head(z).double() / self.temperature).softmax(1)[:, :-1].amax(1)


class Row(ReplayLearner):
    name: ClassVar[str] = "row"
    Config = RowConfig
    config: RowConfig

    def _new_task(self, norms: Norms, shape: tuple[int, int], classes: int, init: torch.Generator) -> RowTask:
        return RowTask(norms, shape, self.network.dim, classes, init)

    @property
    def tasks(self) -> Sequence[RowTask]:
        return cast("Sequence[RowTask]", self.model["tasks"])

    def _all_tasks(self) -> Sequence[RowTask]:
        return self.tasks

    def _new_rule(self) -> RowRule:
        return RowRule(self._all_tasks, self.network.dim, self.config.temperature)

    def entries(self) -> dict[str, int]:
        parts = super().entries()
        parts["heads"] += count(*(net.wp_head for net in self.tasks))
        return parts

    # ---- training ---------------------------------------------------------------------------------------------

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(task.images)
        with self._clock("train"):
            ood = torch.full((len(self.memory),), task.classes)
            self._train_with_memory(task, tokens, task.targets, ood, listener)  # a
            self._copy_to_wp_head()
            if len(self.memory):
                self._fit_wp_head(task, tokens, listener)  # b
        if len(self.memory):
            with self._clock("back_update"):
                self._fit_ood_heads(task, listener)  # c
        self._remember(task)

    @torch.no_grad()
    def _copy_to_wp_head(self) -> None:
        net = self.tasks[-1]
        net.wp_head.weight.copy_(net.head.weight[:-1])
        net.wp_head.bias.copy_(net.head.bias[:-1])

    def _fit_wp_head(self, task: TaskData, tokens: Tokens, listener: Listener) -> None:
        """Step b: the classes of the task against each other."""
        config, head = self.config, self.tasks[-1].wp_head
        z, targets = self.embed(tokens, str(task.index)), task.targets.to(self.device)

        def batches(epoch: int) -> Iterator[Batch]:
            draw = generator(config.seed, "wp-head", task.index, epoch)
            yield from self._weighted_batches(len(z), config.head_batch_size, draw)

        def loss(index: Tensor, weight: Tensor) -> Tensor:
            errors = F.cross_entropy(head(z[index]), targets[index], reduction="none")
            return (errors * weight).sum() / weight.sum()

        self._fit(
            loss,
            batches,
            task=task,
            listener=listener,
            optimizer=self._head_optimizer(list(head.parameters())),
            epochs=config.wp_epochs,
            stage="wp-head",
        )

    def _fit_ood_heads(self, task: TaskData, listener: Listener) -> None:
        """Step c."""
        config = self.config
        draw = generator(config.seed, "ood-heads", task.index)
        drawn = self._balanced_sample(task, draw).numpy()
        parts = [self.prepare(self.memory.images), self.prepare(task.images[drawn])]
        columns = torch.from_numpy(np.concatenate([self.memory.columns, task.columns.numpy()[drawn]]))
        owner = torch.from_numpy(self.task_of_column())[columns]  # (n,)
        trained = owner.unique().tolist()

        heads = StackedHeads([net.head for net in self.tasks], trained)
        X = torch.stack([torch.cat([self.embed(part, str(j)) for part in parts]) for j in trained])  # (J, n, D)
        y = heads.targets(columns)  # (J, n)
        index = torch.arange(len(trained), device=self.device)[:, None]

        def batches(epoch: int) -> Iterator[Batch]:
            yield from ((rows,) for rows in _half_own(owner, trained, config.head_batch_size, draw).to(self.device))

        def loss(rows: Tensor) -> Tensor:
            errors = heads.errors(X[index, rows], y[index, rows])  # (J, 2 B)
            return errors.sum() / rows.shape[1]  # summed over heads, each trained on its own mean

        self._fit(
            loss,
            batches,
            task=task,
            listener=listener,
            images=len(columns),
            optimizer=self._head_optimizer([heads.weight, heads.bias]),
            epochs=config.ood_epochs,
            stage="ood-heads",
        )
        heads.write_back()

    def _head_optimizer(self, parameters: Sequence[Tensor]) -> ProtectedSGD:
        config = self.config
        return ProtectedSGD(parameters, config.head_lr or config.lr, config.momentum)


def _half_own(owner: Tensor, tasks: Sequence[int], size: int, draw: torch.Generator) -> Tensor:
    """One epoch of batches for the head of each of ``tasks``: indices (steps, J, 2 ``size``) of images.

    The first half of a batch are images of the head's task, the second half others; ``owner`` (n,) is the task of each
    image. There are as many steps as the task with the most images needs.
    """
    steps = -(-int(owner.bincount().max()) // size)
    of_heads = []
    for task in tasks:
        halves = [(owner == task).nonzero()[:, 0], (owner != task).nonzero()[:, 0]]
        drawn = [half[repeated_shuffles(len(half), steps * size, draw)].view(steps, size) for half in halves]
        of_heads.append(torch.cat(drawn, 1))
    return torch.stack(of_heads, 1)
