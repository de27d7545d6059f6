"""Hard attention to the task (HAT, Serra et al. 2018), as MORE uses it: paper, Section 3.4.

The masks of a task are one tensor a (A, K + D) for A adapters: row i holds m1 (K,) and m2 (D,) of adapter i.
Equation numbers are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EMBEDDING_BOUND = 6.0  # |e| is clamped to this after each step, as in HAT
MIN_CYCLE = 4  # minimum number of batches from soft to hard
COMPENSATION_BOUND = 50.0  # cosh(s e) in the compensation is capped here, as in HAT
SMALLEST = 1e-12  # of a mask: less changes no float32 sum, but makes denormal products, which are slow on CPUs


class _Attention(torch.autograd.Function):
    """a = sigmoid(s e) with HAT's compensated gradient.

    The plain gradient is da/de = s / (2 (cosh(s e) + 1)). HAT multiplies it by
    ``s_max / s * (cosh(clamp(s e, -50, 50)) + 1) / (cosh(e) + 1)``. Written as one product, s and the large cosh
    cancel, so nothing overflows or is lost to rounding:

        da/de := s_max / (2 (cosh(e) + 1)) * exp(-max(|s e| - 50, 0))

    (the last factor is what remains of the clamp; cosh(50) is 2.6e21, so "+ 1" is negligible there). The gradient
    ignores the clamp to ``SMALLEST``. A mask is never 0: no gradient would come back through the adapter's ReLU.
    """

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, s: Tensor, s_max: float) -> Tensor:
        ctx.save_for_backward(embedding, s)
        ctx.s_max = s_max
        return torch.sigmoid(s * embedding).clamp(min=SMALLEST)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        embedding, s = ctx.saved_tensors
        beyond = ((s * embedding).abs() - COMPENSATION_BOUND).clamp(min=0)
        return grads[0] * ctx.s_max / (2 * (torch.cosh(embedding) + 1)) * torch.exp(-beyond), None, None


def attention(embedding: Tensor, s: Tensor, s_max: float) -> Tensor:
    """Eq. 8: a = sigmoid(s e), with the compensated gradient of HAT."""
    return _Attention.apply(embedding, s, s_max)


def annealed_s(step: int, batches: int, epochs: int, s_max: float) -> float:
    """s = 1/s_max + (s_max - 1/s_max) b/B at batch b of B in an epoch: soft at its start, almost hard at its end.

    If an epoch has fewer than ``MIN_CYCLE`` batches, a cycle takes several epochs, counted back from the last step, so
    that training always ends almost hard.
    """
    cycle = batches * math.ceil(MIN_CYCLE / batches)
    position = cycle - 1 - (batches * epochs - 1 - step) % cycle
    return 1 / s_max + (s_max - 1 / s_max) * position / cycle


def rounded(embedding: Tensor) -> Tensor:
    """The mask of a finished task: exactly 0 or 1. The limit of sigmoid(s e) for large s is the step at e = 0."""
    return (embedding > 0).to(embedding.dtype)


def accumulated(masks: Sequence[Tensor], like: Tensor) -> Tensor:
    """Eq. 10: a^{<k}, the element-wise maximum over the masks of finished tasks; zeros before the first."""
    return torch.stack(list(masks)).amax(0) if masks else torch.zeros_like(like)


def regulariser(a: Tensor, before: Tensor, lamb: float) -> Tensor:
    """Eq. 12: lamb * sum(a (1 - a^{<k})) / sum(1 - a^{<k}); 0 if every neuron is taken."""
    free = 1 - before
    return lamb * (a * free).sum() / free.sum().clamp(min=1)


def split(a: Tensor, bottleneck: int) -> tuple[Tensor, Tensor]:
    """m1 (A, K) and m2 (A, D) of a (A, K + D)."""
    return a[:, :bottleneck], a[:, bottleneck:]


def protection(m1: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eq. 11: factors for the updates of w1, b1, w2 and b2, given the accumulated masks m1 (A, K) and m2 (A, D).

    fc1 reads the unmasked input, so its rows are protected by m1 alone; fc2's weight by m1 and m2; its bias by m2.
    """
    return 1 - m1[..., None], 1 - m1, 1 - torch.minimum(m2[..., :, None], m1[..., None, :]), 1 - m2
