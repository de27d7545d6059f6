"""GELU for compiled training in half precision on a GPU.

With 768 numbers per token a GPU waits for the arithmetic of ``erf``, not for memory. A polynomial with an error below
1.5e-7 (Abramowitz & Stegun, 7.1.26) needs less of it, and its exponential is also that of the derivative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Gelu(nn.Module):
    """GELU; by :func:`gelu` in code compiled for half precision on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x) if torch.compiler.is_compiling() and is_faster(x) else F.gelu(x)


def is_faster(x: Tensor) -> bool:
    """Whether compiled :func:`gelu` is faster than torch's, and differs from it by less than the rounding of x."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def gelu(x: Tensor) -> Tensor:
    """``x Phi(x)`` with the normal distribution function Phi, whose error is below 1e-7 before rounding."""
    return _Gelu.apply(x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        phi, _ = _normal(x.float())
        return (x.float() * phi).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """``g (Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi))``."""
        (x,) = ctx.saved_tensors
        phi, bell = _normal(x.float())
        return (g.float() * (phi + x.float() * bell / math.sqrt(2 * math.pi))).to(x.dtype)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """``Phi(x)`` and ``exp(-x^2 / 2)``."""
    bell = torch.exp2(x * x * (-0.5 / math.log(2)))
    t = 1 / (1 + 0.3275911 / math.sqrt(2) * x.abs())
    tail = 1.061405429 * t - 1.453152027
    for coefficient in (1.421413741, -0.284496736, 0.254829592):
        tail = tail * t + coefficient
    tail = 0.5 * tail * t * bell  # Phi(-|x|)
    return torch.where(x > 0, 1 - tail, tail), bell
