"""Heads of several tasks, trained together: they do not depend on each other, so one product computes all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence


class StackedHeads:
    """Copies of the heads of J tasks, padded to the C outputs of the widest.

    A head has an output for each class of its task and a last one, *ood*, for everything else. What is trained is
    ``weight`` (J, C, D) and ``bias`` (J, C); the heads themselves change in :meth:`write_back`.
    """

    def __init__(self, heads: Sequence[nn.Linear], tasks: Sequence[int]):
        """``heads`` of all tasks; ``tasks``: those whose heads are trained."""
        self._heads = [heads[k] for k in tasks]
        of_all = torch.tensor([head.out_features - 1 for head in heads])
        self._classes, self._first = (part[list(tasks), None] for part in (of_all, of_all.cumsum(0) - of_all))  # (J, 1)
        self.weight = pad_sequence([head.weight.data for head in self._heads], batch_first=True)
        biases = [head.bias.data for head in self._heads]
        self.bias = pad_sequence(biases, batch_first=True, padding_value=torch.finfo().min)  # probability 0
        self.weight.requires_grad_(), self.bias.requires_grad_()

    @property
    def ood(self) -> Tensor:
        """The output of each head that means *ood*, (J, 1)."""
        return self._classes.to(self.weight.device)

    def targets(self, columns: Tensor) -> Tensor:
        """What each head learns of images of the classes ``columns`` (n,), on the CPU: own classes, or *ood*. (J, n)"""
        targets = columns - self._first
        own = (targets >= 0) & (targets < self._classes)
        return targets.where(own, self._classes).to(self.weight.device)

    def errors(self, X: Tensor, y: Tensor) -> Tensor:
        """Cross-entropies (J, B) from the features (J, B, D) and targets (J, B) of each head."""
        logits = torch.baddbmm(self.bias[:, None], X, self.weight.mT)  # (J, B, C)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)

    @torch.no_grad()
    def write_back(self) -> None:
        """Make the heads what was trained."""
        for weight, bias, head in zip(self.weight, self.bias, self._heads, strict=True):
            head.weight.copy_(weight[: head.out_features])
            head.bias.copy_(bias[: head.out_features])
