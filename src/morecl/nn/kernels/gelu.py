"""GELU of a product u without its bias b, ``a = gelu(u + b)``, and the gradient of u from the gradient s of a,
``s gelu'(u + b)``.

With ``t(z) = Phi(-z)`` and z = |u|, ``gelu(u) = max(u, 0) - z t(z)``. The logarithm of t is so smooth that a polynomial
of degree 5 is enough for an error below 1e-6; there is no division, which would cost more than all else.

With narrow tokens the forward pass is part of the next product (adapter.py).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers per program
CURVE = tl.constexpr(-0.5 / math.log(2))
PEAK = tl.constexpr(math.log2(1 / math.sqrt(2 * math.pi)))


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
def tail(z):
    """``Phi(-z)`` for z >= 0; ``max(1, z)`` times its error is below 1e-6."""
    power = ((-0.000500259273 * z + 0.00728237638) * z - 0.0523432369) * z - 0.459414079
    return tl.exp2((power * z - 1.15105205) * z - 1.00000186)


@triton.jit
def gelu(u, beyond):
    """GELU of u; ``beyond`` is the :func:`tail` at abs(u)."""
    return tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL) - tl.abs(u) * beyond


@triton.jit
def slope(u, beyond):
    """``gelu'(u) = Phi(u) + u Phi'(u)``; ``beyond`` is the :func:`tail` at abs(u)."""
    rise = tl.abs(u) * tl.exp2(u * u * CURVE + PEAK) - beyond
    return tl.where(u > 0, 1 + rise, -rise)


@triton.jit
def _gelu(u, bias, a, count, H: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = tl.load(u + place, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + place % H).to(tl.float32)
    tl.store(a + place, gelu(at, tail(tl.abs(at))).to(a.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(s, u, bias, count, H: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = tl.load(u + place, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + place % H).to(tl.float32)
    value = tl.load(s + place, mask=inside, other=0.0).to(tl.float32) * slope(at, tail(tl.abs(at)))
    tl.store(s + place, value.to(s.dtype.element_ty), mask=inside)
