"""What prototype classifiers share: a frozen backbone and one mean a class."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from morecl.config import LearnerConfig
from morecl.methods.base import Learner, TaskData
from morecl.nn.tokens import Tokens
from morecl.progress import Listener


class Prototypes(nn.Module):
    """Class means (C, D), float64."""

    means: Tensor

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("means", torch.empty(0, dim, dtype=torch.float64))

    def grow(self, classes: int) -> None:
        self.means = torch.cat([self.means, self.means.new_zeros(classes, self.means.shape[1])])


class PrototypeLearner(Learner):
    """A learner that trains nothing. A subclass says in ``score`` how an image is compared with the means."""

    Config: ClassVar[type[LearnerConfig]] = LearnerConfig

    def _reset(self) -> None:
        self.prototypes = Prototypes(self.network.dim)
        self.model = nn.ModuleDict({"prototypes": self.prototypes}).to(self.device)

    def _grow(self, classes: int) -> None:
        self.prototypes.grow(classes)

    def _learn(self, task: TaskData, listener: Listener) -> None:
        with self._clock("train"):
            features = self.embed(self.prepare(task.images), "frozen").double()
            for c in range(task.classes):
                own = (task.targets == c).to(self.device)
                self.prototypes.means[task.first_column + c] = features[own].mean(0)

    def networks(self) -> list[str]:
        return ["frozen"]

    @torch.no_grad()
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        return self._in_batches(tokens, self.network.trunk)

    def entries(self) -> dict[str, int]:
        return super().entries() | {"statistics": self.prototypes.means.numel()}
