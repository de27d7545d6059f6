"""Finished tasks for prediction: masks folded into the adapters, closed neurons left out, several tasks at once.

A finished task's masks are exactly 0 or 1, so ``m2 * fc2(relu(m1 * fc1(h)))`` equals the same two layers without
the rows and columns that are closed. For G tasks the batch is repeated G times, task after task; attention and MLP see
one batch of G B images, adapters and norms their own weights by task. Up to rounding the result is that of
:meth:`AdaptedViT.trunk`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.nn.adapter import Adapter
from morecl.nn.network import AdaptedViT, Gates, Norms, run_block

WIDTH_STEP = 16  # adapters are cut to a multiple of this, so that a compiled block meets few different shapes


class FoldedAdapter(nn.Module):
    """``h + W2 relu(W1 h + b1) + b2`` with its own weights for each of the G tasks. (G B, L, D) -> (G B, L, D)."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("w1", "b1", "w2", "b2"):  # (G, D, K), (G, 1, K), (G, K, D), (G, 1, D): handed in on every call
            self.register_buffer(name, torch.empty(0), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(self.w1.shape[0], -1, h.shape[-1])  # (G, B L, D)
        hidden = F.relu(torch.baddbmm(self.b1, flat, self.w1))
        return h + torch.baddbmm(self.b2, hidden, self.w2).view_as(h)


class FoldedNorm(nn.Module):
    """LayerNorm with its own weight and bias for each of the G tasks. (G B, L, D) -> (G B, L, D)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias"):  # (G, D): handed in on every call
            self.register_buffer(name, torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tasks, dim = self.weight.shape
        if tasks == 1:
            return F.layer_norm(x, (dim,), self.weight[0], self.bias[0], self.eps)
        plain = F.layer_norm(x, (dim,), eps=self.eps).reshape(tasks, -1, dim)
        return torch.addcmul(self.bias[:, None], plain, self.weight[:, None]).view_as(x)


class FoldedTrunk:
    """The trunk under G finished tasks. ``trunk(tokens)``: (B, L, D) -> features (G, B, D), float32."""

    @torch.no_grad()
    def __init__(self, network: AdaptedViT, tasks: Sequence[tuple[Norms, Gates]]):
        self.network, self.size = network, len(tasks)
        self._last = _stack([norms.of(network.last_norm) for norms, _ in tasks])
        kept = [int(gates[i].sum()) for _, gates in tasks for i in range(0, len(gates), 2)]
        width = max(WIDTH_STEP, math.ceil(max(kept, default=0) / WIDTH_STEP) * WIDTH_STEP)
        self._template = _template(cast(nn.Module, network.vit.blocks[0]))
        self._states: list[dict[str, Tensor]] = []
        for i, state in enumerate(network.frozen):
            folded = _stack([norms.of(f"blocks.{i}") for norms, _ in tasks])
            for branch in (0, 1):
                adapter = cast(Adapter, network.adapters[2 * i + branch])
                m1 = 4 * i + 2 * branch
                parts = [_fold(adapter, gates[m1], gates[m1 + 1], width) for _, gates in tasks]
                folded |= {f"ls{branch + 1}.1.{name}": value for name, value in _stack(parts).items()}
            self._states.append(state | folded)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, *, compiled: bool = False) -> Tensor:
        x = tokens.expand(self.size, *tokens.shape).reshape(-1, *tokens.shape[1:])
        for state in self._states:
            x = run_block(self._template, state, x, compiled=compiled)
        return self._pool(x).float().view(self.size, len(tokens), -1)

    def _pool(self, x: Tensor) -> Tensor:
        vit = self.network.vit
        norm = FoldedNorm(getattr(vit, self.network.last_norm).eps)
        norm.weight, norm.bias = self._last["weight"], self._last["bias"]
        return vit.pool(norm(x)) if self.network.last_norm == "norm" else norm(vit.pool(vit.norm(x)))


def _fold(adapter: Adapter, m1: Tensor, m2: Tensor, width: int) -> dict[str, Tensor]:
    """One adapter under one task's masks: the ``width`` first open neurons, the rest of them zero."""
    keep = m1.nonzero()[:, 0]
    dim = m2.numel()
    w1, b1 = m1.new_zeros(dim, width), m1.new_zeros(1, width)
    w2 = m1.new_zeros(width, dim)
    w1[:, : len(keep)] = adapter.fc1.weight[keep].T
    b1[0, : len(keep)] = adapter.fc1.bias[keep]
    w2[: len(keep)] = (adapter.fc2.weight[:, keep] * m2[:, None]).T
    return {"w1": w1, "b1": b1, "w2": w2, "b2": (adapter.fc2.bias * m2)[None]}


def _stack(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name].detach() for part in parts]) for name in parts[0]}


def _template(block: nn.Module) -> nn.Module:
    """A block of the same shape without weights, its norms and adapters exchanged for those above."""
    template = copy.deepcopy(block).to("meta")
    for name in ("norm1", "norm2"):
        setattr(template, name, FoldedNorm(getattr(block, name).eps))
    for name in ("ls1", "ls2"):
        getattr(template, name)[1] = FoldedAdapter()
    return template
