"""GELU of a product u without its bias b, ``a = gelu(u + b)``, and the gradient of u from the gradient s of a,
``s gelu'(u + b)``.

GELU is that of :mod:`morecl.nn.gelu`. With narrow tokens the forward pass is part of the next product (adapter.py).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers per program
LOG2_E = tl.constexpr(1 / math.log(2))
ROOT_HALF = tl.constexpr(math.sqrt(0.5))
BELL = tl.constexpr(1 / math.sqrt(2 * math.pi))


def forward(u: Tensor, bias: Tensor) -> Tensor:
    """u (N, H), b (H,) -> a (N, H)."""
    a = torch.empty_like(u)
    _gelu[(triton.cdiv(u.numel(), BLOCK),)](u, bias, a, u.numel(), u.shape[1], BLOCK, num_warps=4)
    return a


def backward(s: Tensor, u: Tensor, bias: Tensor) -> Tensor:
    """s (N, H), u (N, H), b (H,) -> (N, H), overwriting s."""
    _gelu_backward[(triton.cdiv(u.numel(), BLOCK),)](s, u, bias, u.numel(), u.shape[1], BLOCK, num_warps=4)
    return s


@triton.jit
def normal(u):
    """``Phi(u)`` and ``exp(-u^2 / 2)``, as in :mod:`morecl.nn.gelu`."""
    bell = tl.exp2(u * u * (-0.5 * LOG2_E))
    t = 1 / (1 + 0.3275911 * ROOT_HALF * tl.abs(u))
    tail = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
    tail = 0.5 * tail * t * bell
    return tl.where(u > 0, 1 - tail, tail), bell


@triton.jit
def _gelu(u, bias, a, count, H: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = tl.load(u + place, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + place % H).to(tl.float32)
    tl.store(a + place, (at * normal(at)[0]).to(a.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(s, u, bias, count, H: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = tl.load(u + place, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + place % H).to(tl.float32)
    phi, bell = normal(at)
    value = tl.load(s + place, mask=inside, other=0.0).to(tl.float32) * (phi + at * bell * BELL)
    tl.store(s + place, value.to(s.dtype.element_ty), mask=inside)
