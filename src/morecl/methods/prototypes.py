"""Base class of prototype classifiers: one mean per class, under features that no later task changes."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import SgdConfig
from morecl.methods.base import Learner, TaskData, count
from morecl.nn.heads import GrowingHead
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator


class Prototypes(nn.Module):
    """Class means (C, D), float64."""

    means: Tensor

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("means", torch.empty(0, dim, dtype=torch.float64))

    def grow(self, classes: int) -> None:
        self.means = torch.cat([self.means, self.means.new_zeros(classes, self.means.shape[1])])


class PrototypeLearner(Learner):
    """A learner that trains nothing. A subclass brings a rule that compares images with the means.

    With ``freeze_backbone=False`` the first task trains backbone and norms, with cross-entropy on a linear head that is
    then dropped. Later tasks leave them unchanged, or the means of earlier classes would lose their meaning.
    """

    Config: ClassVar[type[SgdConfig]] = SgdConfig
    config: SgdConfig

    def _reset(self) -> None:
        self.prototypes = Prototypes(self.network.dim)
        parts = self._new_body() | {"prototypes": self.prototypes}
        if not self.network.frozen:
            parts["norms"] = self.network.new_norms()
        self.model = nn.ModuleDict(parts).to(self.device)

    def _grow(self, classes: int) -> None:
        self.prototypes.grow(classes)
        self._keep_body()

    @property
    def norms(self) -> Norms | None:
        """Those trained with the backbone; ``None`` if it is frozen."""
        return cast(Norms, self.model["norms"]) if "norms" in self.model else None

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(task.images)
        with self._clock("train"):
            if self.norms is not None and task.index == 0:
                self._train([*self._body_parameters(), *self.norms.parameters()], task, tokens, listener)
            features = self._embed(tokens).double()
            for c in range(task.classes):
                own = (task.targets == c).to(self.device)
                self.prototypes.means[task.first_column + c] = features[own].mean(0)

    def _train(self, parameters: list[nn.Parameter], task: TaskData, tokens: Tokens, listener: Listener) -> None:
        """Minimise the cross-entropy of a temporary head over its own weights and ``parameters``."""
        head = GrowingHead(self.network.dim).to(self.device)
        head.grow(task.classes, generator(self.config.seed, "head", task.index))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(head(self._trunk(x, self.norms, body=self.body)), y)

        optimizer = self._optimizer([*parameters, *head.parameters()])
        self._fit_rows(loss, tokens, [task.targets], task=task, listener=listener, optimizer=optimizer)

    def networks(self) -> list[str]:
        return ["frozen" if self.network.frozen else f"after task {min(1, len(self.task_sizes))}"]

    @torch.no_grad()
    def _embed(self, tokens: Tokens) -> Tensor:
        """Features of all images: (N, D)."""
        return self._in_batches(tokens, lambda x: self._trunk(x, self.norms, body=self.body))

    def embed(self, tokens: Tokens, network: str) -> Tensor:
        return self._embed(tokens)

    def _means(self) -> Tensor:
        return self.prototypes.means

    def entries(self) -> dict[str, int]:
        parts = super().entries()
        parts["norms"] = 0 if self.norms is None else count(self.norms)
        parts["statistics"] += self.prototypes.means.numel()
        return parts
