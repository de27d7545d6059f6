"""The adapters, the only part of the feature extractor that learns (paper, Figure 1b).

``A(h) = h + m2 * fc2(relu(m1 * fc1(h)))`` with masks m1 (K,) and m2 (D,). Masks are not negative, so the weights can be
multiplied by them instead of the activations, which are about a thousand times larger:
``h + W2' relu(W1' h + b1') + b2'`` with ``W1' = m1 W1, b1' = m1 b1, W2' = m2 W2, b2' = m2 b2`` (rows). The gradients of
the masks are the same. All A adapters of a network are stacked, so this is one operation for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.nn.linear import linear

WIDTH_STEP = 16  # widths of folded adapters are multiples of this, as matrix units prefer


class AdapterWeights(NamedTuple):
    """The weights of all adapters of a network, masked if there are masks: w1 (A, K, D), b1 (A, K), w2 (A, D, K),
    b2 (A, D).

    For G tasks at once each has a dimension of size G after the first: w1 (A, G, K, D) and so on.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def under(self, masks: Tensor) -> AdapterWeights:
        """Under masks m1 and m2 side by side (A, K + D), which get gradients."""
        bottleneck = self.w1.shape[1]
        m1, m2 = masks[:, :bottleneck], masks[:, bottleneck:]
        return AdapterWeights(m1[..., None] * self.w1, m1 * self.b1, m2[..., None] * self.w2, m2 * self.b2)


class Adapters(nn.Module):
    """The A adapters of a network, stacked. ``w2`` and ``b2`` start at zero: a new adapter is the identity."""

    def __init__(self, count: int, dim: int, bottleneck: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(count, bottleneck, dim))
        self.b1 = nn.Parameter(torch.zeros(count, bottleneck))
        self.w2 = nn.Parameter(torch.zeros(count, dim, bottleneck))
        self.b2 = nn.Parameter(torch.zeros(count, dim))

    def initialise(self, generator: torch.Generator) -> None:
        """w1 from a truncated normal with sd 0.02, the rest zero; drawn on the CPU, so equal on every device."""
        drawn = nn.init.trunc_normal_(torch.empty(self.w1.shape), std=0.02, generator=generator)
        self.w1.data.copy_(drawn)
        for zero in (self.b1, self.w2, self.b2):
            nn.init.zeros_(zero)

    def weights(self) -> AdapterWeights:
        """The weights without masks, see :meth:`AdapterWeights.under`."""
        return AdapterWeights(self.w1, self.b1, self.w2, self.b2)

    @torch.no_grad()
    def folded(self, masks: Sequence[tuple[Tensor, Tensor]]) -> AdapterWeights:
        """The weights under the masks of G finished tasks, exactly 0 or 1, without closed neurons.

        Closed neurons of the bottleneck contribute nothing, so K shrinks to the largest number that any adapter keeps
        open, rounded up to a multiple of ``WIDTH_STEP``; other adapters are padded with zeros.
        """
        keep = torch.stack([m1 for m1, _ in masks], 1)  # (A, G, K)
        widest = max(1, int(keep.sum(-1).max()))
        width = min(math.ceil(widest / WIDTH_STEP) * WIDTH_STEP, keep.shape[-1])
        order = keep.argsort(dim=-1, descending=True, stable=True)[..., :width]  # open neurons first, in their order
        open_ = keep.gather(-1, order)  # (A, G, width): 1 open, 0 padding
        outputs = torch.stack([m2 for _, m2 in masks], 1)  # (A, G, D)
        adapter = torch.arange(len(keep), device=keep.device)[:, None, None]
        w1 = self.w1[adapter, order] * open_[..., None]  # (A, G, width, D)
        w2 = self.w2.mT[adapter, order] * open_[..., None] * outputs[..., None, :]  # (A, G, width, D)
        return AdapterWeights(w1, self.b1[adapter, order] * open_, w2.mT, outputs * self.b2[:, None])


class AdapterSlot(nn.Module):
    """The adapter of a block's branch. It owns no weights: they are set from outside on every call.

    (B, L, D) -> (B, L, D) with the weights of one task; (G B, L, D) -> (G B, L, D) with those of G tasks, the batch
    being ordered by task. Without weights it is the identity.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in AdapterWeights._fields:
            self.register_buffer(name, torch.empty(0), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        if self.w1.numel() == 0:
            return h
        if self.w1.dim() == 2:
            return h + linear(F.relu(linear(h, self.w1, self.b1)), self.w2, self.b2)
        flat = h.reshape(self.w1.shape[0], -1, h.shape[-1])  # (G, B L, D)
        hidden = F.relu(torch.baddbmm(self.b1[:, None], flat, self.w1.mT))
        return h + torch.baddbmm(self.b2[:, None], hidden, self.w2.mT).view_as(h)
