"""LayerNorm ``n = w z + v`` with ``z = (x - mean) / sd``, and the gradient of x, which is also used beside the norm.

From the gradients g of n and d' of that other use: ``d = d' + (w g - mean(w g) - z mean(w g z)) / sd``, and, summed
over parts of the tokens, ``dw = sum g z``, ``dv = sum g``; the parts are added up later, in a fixed order. Torch's
compiler generates two kernels for this, each of which reads everything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.kernels.compiling import FUSED

ROWS = 2  # tokens per step
NARROW = 256  # dimensions up to which one warp takes a token


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (N, D), w (D,), v (D,) -> n (N, D), and mean and 1 / sd (2, N)."""
    count, dim = x.shape
    n = torch.empty_like(x)
    moments = x.new_empty(2, count, dtype=torch.float32)
    _norm[(triton.cdiv(count, ROWS),)](
        x, weight, bias, n, moments, count, eps, dim, triton.next_power_of_2(dim), ROWS, num_warps=warps(dim), **FUSED
    )
    return n, moments


def backward(g: Tensor, passed: Tensor | None, x: Tensor, moments: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    """g (N, D), d', x (N, D), w (D,) -> d (N, D); writes dw and dv to ``sums`` (:func:`parts`).

    d' is (N, D), or None, or (B, D) for the first of every N / B tokens; it is then zero for all others.
    """
    count, dim = x.shape
    every = 0 if passed is None else count // len(passed)
    d = torch.empty_like(x)
    _norm_backward[(sums.shape[0],)](
        g, x if passed is None else passed, x, moments, weight, d, sums, count,
        dim, triton.next_power_of_2(dim), ROWS, _part(count, dim), every, **_launch(dim),
    )  # fmt: skip
    return d


def parts(count: int, dim: int) -> tuple[int, int, int]:
    """Shape of a norm's sums: dw (D) and dv (D) per part of the tokens."""
    return triton.cdiv(count, _part(count, dim)), 2, dim


def warps(dim: int) -> int:
    """So many that the sums of wide tokens fit into registers."""
    return 2 if dim <= 512 else 4


def _launch(dim: int) -> dict[str, int]:
    """Of the backward pass."""
    return FUSED | {"num_warps": 1 if dim <= NARROW else warps(dim)}


def _part(count: int, dim: int) -> int:
    """Tokens over which one program sums the gradients of the weights."""
    part = 16 if dim <= NARROW else 32
    return part if count > 100 * part else ROWS  # few tokens, such as class tokens, are not worth a loop


@triton.jit(do_not_specialize=["count"])
def _norm(x, weight, bias, n, moments, count, eps, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """ROWS tokens of n and the moments."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < count)[:, None] & (column < D)
    place = row.to(tl.int64)[:, None] * D + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / D
    centred = tl.where(column < D, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    w = tl.load(weight + column, mask=column < D, other=0.0)
    v = tl.load(bias + column, mask=column < D, other=0.0)
    tl.store(n + place, (centred * scale[:, None] * w + v).to(n.dtype.element_ty), mask=inside)
    tl.store(moments + row, mean, mask=row < count)
    tl.store(moments + count + row, scale, mask=row < count)


@triton.jit(do_not_specialize=["count"])
def _norm_backward(
    g_norm,
    passed,
    x,
    moments,
    weight,
    d_out,
    sums,
    count,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EVERY: tl.constexpr,
):
    """d and the sums for one part of the tokens. Every EVERY-th has a d'."""
    part = tl.program_id(0)
    column = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + column, mask=column < D, other=0.0)
    dw = tl.zeros((ROWS, WIDTH), tl.float32)
    dv = tl.zeros((ROWS, WIDTH), tl.float32)
    offset = part.to(tl.int64) * PART * D
    g_norm += offset
    if EVERY == 1:
        passed += offset
    x += offset
    d_out += offset
    for start in tl.range(0, PART, ROWS, num_stages=3):
        row = start + tl.arange(0, ROWS)
        within = part * PART + row < count
        inside = within[:, None] & (column < D)
        place = row[:, None] * D + column
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_norm + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(moments + part * PART + row, mask=within, other=0.0)[:, None]
        scale = tl.load(moments + count + part * PART + row, mask=within, other=0.0)[:, None]
        z = (value - mean) * scale
        weighted = w * g
        common = tl.sum(weighted, 1)[:, None] * (1 / D)
        along = tl.sum(weighted * z, 1)[:, None] * (1 / D)
        d = scale * (weighted - common - z * along)
        if EVERY > 1:
            token = part * PART + row
            has = inside & (token % EVERY == 0)[:, None]
            d += tl.load(passed + (token // EVERY)[:, None] * D + column, mask=has, other=0.0).to(tl.float32)
        elif EVERY == 1:
            d += tl.load(passed + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_out + place, d.to(d_out.dtype.element_ty), mask=inside)
        dw += g * z
        dv += g
    column = tl.arange(0, WIDTH)
    tl.store(sums + part * 2 * D + column, tl.sum(dw, 0), mask=column < D)
    tl.store(sums + part * 2 * D + D + column, tl.sum(dv, 0), mask=column < D)
