"""Linear classifiers: one for a single task, and one that grows with new classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def task_head(dim: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """(N, D) -> (N, outputs): weights from a truncated normal with sd 0.02, biases zero."""
    head = _Linear(dim, outputs)
    nn.init.trunc_normal_(head.weight, std=0.02, generator=generator)
    nn.init.zeros_(head.bias)
    return head


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Would draw from the global generator. (With ``skip_init`` instead, torch imports its compiler.)"""


class GrowingHead(nn.Module):
    """(N, D) -> (N, classes so far). Known classes keep their weights when new ones are added."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.bias = nn.Parameter(torch.empty(0))

    def grow(self, classes: int, generator: torch.Generator) -> None:
        """Append ``classes`` outputs, weights from a truncated normal with sd 0.02, biases zero."""
        rows = torch.empty(classes, self.weight.shape[1])
        nn.init.trunc_normal_(rows, std=0.02, generator=generator)
        device = self.weight.device
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(device)]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), torch.zeros(classes, device=device)]))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)
