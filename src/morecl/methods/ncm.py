"""NCM: nearest class mean on the frozen backbone (paper, Section 4.5, "Performance of Pre-Trained Feature Extractor").

Nothing is trained: a class is the mean of its features, an image goes to the nearest mean (Euclidean). Adding a class
does not touch the others, so there is no forgetting; what it reaches is what the pre-trained features are worth.
The OOD score is the maximum of softmax(-distance).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from morecl.config import LearnerConfig
from morecl.methods.base import Learner, Output, TaskData
from morecl.nn.network import AdaptedViT
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


class Ncm(Learner):
    name: ClassVar[str] = "ncm"
    Config = LearnerConfig

    def _build_network(self) -> AdaptedViT:
        return AdaptedViT(self.backbone.vit, bottleneck=None)

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
        with self._autocast():
            parts = [self.network.trunk(x) for x in self._in_batches(tokens)]
        return torch.cat(parts) if parts else torch.empty(0, self.network.dim, device=self.device)

    @torch.no_grad()
    def score(self, features: Sequence[Tensor]) -> Output:
        distance = torch.cdist(features[0].double(), self.prototypes.means)  # (N, C)
        p = (-distance).softmax(1)
        return Output(-distance, p, p.amax(1))

    def entries(self) -> dict[str, int]:
        return {
            "backbone": sum(value.numel() for value in self.backbone.state.values()),
            "adapters": 0,
            "norms": 0,
            "embeddings": 0,
            "heads": 0,
            "statistics": self.prototypes.means.numel(),
        }
