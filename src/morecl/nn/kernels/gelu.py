"""GELU and its slope, for the kernels that have it behind a product (mlp.py).

With ``t(z) = Phi(-z)`` and z = |u|, ``gelu(u) = max(u, 0) - z t(z)``. The logarithm of t is so smooth that a polynomial
of degree 5 is enough for an error below 1e-6; there is no division, which would cost more than all else.

A slope lies between -0.13 and 1.13. Beside bfloat16, which rounds numbers near 1 to steps of 0.004 or 0.008, it is
stored in a byte, in steps of 0.005; 0 and 1, most frequent, are exact. float16 is more exact than a byte.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

CURVE = tl.constexpr(-0.5 / math.log(2))
PEAK = tl.constexpr(math.log2(1 / math.sqrt(2 * math.pi)))
STEPS = tl.constexpr(200.0)  # of a slope stored in a byte, from 0 to 1
ZERO = tl.constexpr(27.0)  # the byte of slope 0
# float32 has no fractions between 2^23 and 2^24: a number added to 2^23 is rounded, and is then in the lowest bits
WHOLE = tl.constexpr(float(2**23))


def new_slopes(a: Tensor) -> Tensor:
    """Memory for the slopes of a (N, H)."""
    return torch.empty_like(a, dtype=torch.uint8 if a.dtype == torch.bfloat16 else a.dtype)


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
def slope_as(u, beyond, kind: tl.constexpr):
    """``gelu'(u) = Phi(u) + u Phi'(u)``, as it is stored; ``beyond`` is the :func:`tail` at abs(u).

    For a byte, ``z Phi'(z) / Phi(-z) - 1`` as a polynomial is enough (an error of 0.0003), without a second power of 2.
    """
    z = tl.abs(u)
    if kind == tl.uint8:
        ratio = ((0.05426766 * z + 0.68621608) * z + 0.78434438) * z - 0.9994787
        half = beyond * ratio + 0.5  # not below 0: the sign of u can be put into it
        bits = half.to(tl.int32, bitcast=True) | (u.to(tl.int32, bitcast=True) & -2147483648)
        whole = bits.to(tl.float32, bitcast=True) * STEPS + (WHOLE + ZERO + STEPS * 0.5)
        return whole.to(tl.int32, bitcast=True).to(tl.uint8)
    rise = z * tl.exp2(u * u * CURVE + PEAK) - beyond
    return tl.where(u > 0, 1 + rise, -rise).to(kind)


@triton.jit
def slope_from(stored):
    """The slope in float32."""
    if stored.dtype == tl.uint8:
        whole = (stored.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)  # the bits of 2^23
        return (whole - (WHOLE + ZERO)) * (1 / STEPS)
    return stored.to(tl.float32)
