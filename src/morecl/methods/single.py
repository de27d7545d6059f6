"""Single-task models: the reference that forward transfer is measured against. Not a continual learner.

For each task a new model (adapters, norms, head) is trained on that task alone, from the pre-trained backbone, as if no
other task existed. Nothing is shared, so nothing is forgotten and nothing is transferred. It is used to compute

    FWT = mean over k of (accuracy of the method on task k right after learning it
                          - accuracy of the single-task model of task k, with the task known)

(paper, appendix, after Ke et al., NeurIPS 2020, with the pre-trained backbone and adapters in place of a random start).
The second term is the diagonal of this method's task-incremental accuracy matrix. Each model starts from the same
adapters as every other method's first task and uses the same settings.

Its class-incremental prediction is that of independent models without knowledge of the task: the largest softmax output
over all models. That accuracy bounds nothing; none of the models has seen the others' classes.

Deviations: none; the paper gives no further detail. With ``freeze_backbone=False`` each task trains its own copy of the
backbone, from the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.methods.base import Learner, TaskData, count
from morecl.nn.adapter import Adapters
from morecl.nn.families import ViT
from morecl.nn.heads import task_head
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.scoring import MaximumSoftmax, Rule


class TaskModel(nn.Module):
    """Everything that one task trains: adapters, norms, head (D -> |Y|) and, unless it is frozen, the backbone."""

    def __init__(
        self,
        adapters: Adapters,
        norms: Norms,
        body: ViT | None,
        dim: int,
        classes: int,
        init: torch.Generator,
    ):
        super().__init__()
        self.backbone = body
        self.adapters = adapters
        self.norms = norms
        self.head = task_head(dim, classes, init)


class Single(Learner):
    name: ClassVar[str] = "single"
    Config = TrainingConfig
    config: TrainingConfig

    def _reset(self) -> None:
        self.model = nn.ModuleDict({"tasks": nn.ModuleList()})

    def _grow(self, classes: int) -> None:
        adapters = self.network.new_adapters(self.config.bottleneck)
        adapters.initialise(generator(self.config.seed, "adapters"))
        init = generator(self.config.seed, "head", len(self.task_sizes))
        body = None if self.network.frozen else self.network.new_body()
        net = TaskModel(adapters, self.network.new_norms(), body, self.network.dim, classes, init)
        self.tasks.append(net.to(self.device))

    @property
    def tasks(self) -> list[TaskModel]:
        """One :class:`TaskModel` per task (an ``nn.ModuleList``)."""
        return cast("list[TaskModel]", self.model["tasks"])

    def _learn(self, task: TaskData, listener: Listener) -> None:
        net, tokens = self.tasks[-1], self.prepare(task.images)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(net.head(self._trunk(x, net.norms, net.adapters.weights(), net.backbone)), y)

        with self._clock("train"):
            self._fit_rows(loss, tokens, [task.targets], task=task, listener=listener)

    def _trained(self) -> list[Tensor]:
        return list(self.tasks[-1].parameters())

    def networks(self) -> list[str]:
        return [str(k) for k in range(len(self.tasks))]

    @torch.no_grad()
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        net = self.tasks[int(network)]
        adapters = net.adapters.weights()
        return self._in_batches(tokens, lambda x: self._trunk(x, net.norms, adapters, net.backbone))

    def _new_rule(self) -> Rule:
        return MaximumSoftmax(self._heads)

    def _heads(self) -> list[Callable[[Tensor], Tensor]]:
        return [net.head for net in self.tasks]

    def entries(self) -> dict[str, int]:
        parts = {
            "adapters": count(*(net.adapters for net in self.tasks)),
            "norms": count(*(net.norms for net in self.tasks)),
            "heads": count(*(net.head for net in self.tasks)),
        }
        if not self.network.frozen:
            parts["backbone"] = count(*(net.backbone for net in self.tasks if net.backbone is not None))
        return super().entries() | parts
