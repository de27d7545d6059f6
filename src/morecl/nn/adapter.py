"""The adapter, the only part of the feature extractor that learns (paper, Figure 1b)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Adapter(nn.Module):
    """``A(h) = h + m2 * fc2(relu(m1 * fc1(h)))``: two layers behind attention or MLP, before the residual sum.

    ``m1`` (K,) and ``m2`` (D,) are the task's hard-attention masks. They are buffers of ones here; a method with
    masks hands in its own on every call (``torch.func.functional_call``). ``fc2`` starts at zero, so a fresh
    adapter is the identity and the pre-trained features are what training starts from.

    Shapes: (B, L, D) -> (B, L, D), bottleneck K.
    """

    m1: Tensor
    m2: Tensor

    def __init__(self, dim: int, bottleneck: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, bottleneck)
        self.fc2 = nn.Linear(bottleneck, dim)
        self.register_buffer("m1", torch.ones(bottleneck), persistent=False)
        self.register_buffer("m2", torch.ones(dim), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        drawn = nn.init.trunc_normal_(torch.empty(self.fc1.weight.shape), std=0.02, generator=generator)
        self.fc1.weight.data.copy_(drawn)  # drawn on the CPU: the same on every device
        for zero in (self.fc1.bias, self.fc2.weight, self.fc2.bias):
            nn.init.zeros_(zero)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.m2.to(h.dtype) * self.fc2(F.relu(self.m1.to(h.dtype) * self.fc1(h)))
