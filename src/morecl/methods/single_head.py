"""Base class of single-head methods: all tasks train one set of adapters and norms, one head (and the backbone)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import SgdConfig, TrainingConfig
from morecl.methods.base import Learner, count
from morecl.nn.adapter import Adapters
from morecl.nn.heads import GrowingHead
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.random import generator
from morecl.scoring import MaximumSoftmax, Rule


class SingleHeadLearner(Learner):
    """A learner with one network. A subclass defines in ``_learn`` the loss that a task is trained with. The OOD
    score is the maximum softmax probability unless it brings another rule."""

    Config: ClassVar[type[SgdConfig]] = TrainingConfig
    config: TrainingConfig

    def _reset(self) -> None:
        adapters = self.network.new_adapters(self.config.bottleneck)
        adapters.initialise(generator(self.config.seed, "adapters"))
        parts = self._new_body() | {
            "adapters": adapters,
            "norms": self.network.new_norms(),
            "head": GrowingHead(self.network.dim),
        }
        self.model = nn.ModuleDict(parts).to(self.device)

    def _grow(self, classes: int) -> None:
        self.head.grow(classes, generator(self.config.seed, "head", len(self.task_sizes)))

    @property
    def adapters(self) -> Adapters:
        return cast(Adapters, self.model["adapters"])

    @property
    def norms(self) -> Norms:
        return cast(Norms, self.model["norms"])

    @property
    def head(self) -> GrowingHead:
        return cast(GrowingHead, self.model["head"])

    def _features(self, tokens: Tensor) -> Tensor:
        """Of a batch, (B, L, D) -> (B, D), with gradients."""
        return self._trunk(tokens, self.norms, self.adapters.weights(), self.body)

    def _cross_entropy(self, tokens: Tensor, columns: Tensor) -> Tensor:
        """Of a batch, (B, L, D) and (B,), over all classes seen: the loss of methods that add nothing to it."""
        return F.cross_entropy(self.head(self._features(tokens)), columns)

    @torch.no_grad()
    def _embed(self, tokens: Tokens) -> Tensor:
        """Features of all images under the network as it is now: (N, D)."""
        adapters = self.adapters.weights()
        return self._in_batches(tokens, lambda x: self._trunk(x, self.norms, adapters, self.body))

    @torch.no_grad()
    def _logits(self, tokens: Tokens) -> Tensor:
        """Outputs of the head as it is now, for all images: (N, classes). A teacher's, if training continues."""
        return self.head(self._embed(tokens))

    def networks(self) -> list[str]:
        return [f"after task {len(self.task_sizes)}"]

    def embed(self, tokens: Tokens, network: str) -> Tensor:
        return self._embed(tokens)

    def _new_rule(self) -> Rule:
        return MaximumSoftmax(self._heads)

    def _heads(self) -> list[Callable[[Tensor], Tensor]]:
        """The head's outputs, one per class: (N, D) -> (N, C). In a list, as for methods with several networks."""
        return [self.head]

    def entries(self) -> dict[str, int]:
        parts = {"adapters": count(self.adapters), "norms": count(self.norms), "heads": count(self.head)}
        return super().entries() | parts
