"""An adapter at the end of a block's branch, for wide tokens: as in :mod:`morecl.nn.kernels.adapter`, chunk by chunk.

From some 200 dimensions on, a tile of whole rows fills the registers, and the products with frozen weights, which
the narrow kernels compute on the way, wait for arithmetic: cuBLAS computes them faster. What is left here reads and
writes memory:

- forward: ``r = relu(h W1' + b1)`` in a sweep over the chunks of ``h = y + b``; ``x' = x + h + r W2' + b2`` in a second
  one, with its mean and variance; the norm of x' in a third. What a sweep reads again is still in the cache;
- backward: ``p = (r > 0) * (d W2)`` in a first sweep over the chunks of d, ``dh = d + p W1`` in a second one.

The gradients of the weights are those of the narrow kernels (:func:`morecl.nn.kernels.adapter.gradients`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.adapter import AdapterWeights
from morecl.nn.kernels.adapter import CHUNK, TILE
from morecl.nn.kernels.compiling import FUSED

STAGES = 3  # chunks being loaded at once; a program then needs at most 99 KiB


def forward(
    y: Tensor, x: Tensor, bias: Tensor, adapter: AdapterWeights, norm: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, ...]:
    """y (N, D), x (N, D), b (D,) -> r (N, K), x' (N, D), its norm (N, D), and its mean and 1 / sd (2, N)."""
    count, dim = x.shape
    k = adapter.b1.shape[0]
    r = x.new_empty(count, k)
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    moments = x.new_empty(2, count, dtype=torch.float32)
    _adapt_wide[(triton.cdiv(count, TILE),)](
        y, x, bias, *adapter, *norm, r, total, normed, moments, count, eps, dim, k, TILE, CHUNK, STAGES, **FUSED
    )
    return r, total, normed, moments


def backward(d: Tensor, r: Tensor, adapter: AdapterWeights) -> tuple[Tensor, Tensor]:
    """d (N, D), r (N, K) -> p (N, K), dh (N, D)."""
    count, dim = d.shape
    k = r.shape[1]
    p = torch.empty_like(r)
    out = torch.empty_like(d)
    _adapt_wide_backward[(triton.cdiv(count, TILE),)](
        d, r, adapter.w1, adapter.w2, p, out, count, dim, k, TILE, CHUNK, STAGES, **FUSED
    )
    return p, out


@triton.jit(do_not_specialize=["count"])
def _adapt_wide(
    y,
    x,
    bias,
    w1,
    b1,
    w2,
    b2,
    norm_weight,
    norm_bias,
    r,
    total,
    normed,
    moments,
    count,
    eps,
    D: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of r, x', its norm and its moments."""
    half: tl.constexpr = x.dtype.element_ty
    first = tl.program_id(0) * TILE
    rows = tl.arange(0, TILE)
    row = rows[:, None]
    inside = first + row < count
    k = tl.arange(0, K)
    chunk = tl.arange(0, CHUNK)
    offset = first.to(tl.int64) * D
    y += offset
    x += offset
    total += offset
    normed += offset
    r += first.to(tl.int64) * K

    # r = relu(h W1' + b1)
    narrow = tl.zeros((TILE, K), tl.float32)
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        d = start + chunk
        h = tl.load(y + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        h = (h + tl.load(bias + d)[None, :].to(tl.float32)).to(half)
        narrow = tl.dot(h, tl.load(w1 + k[None, :] * D + d[:, None]), narrow)
    narrow += tl.load(b1 + k)[None, :].to(tl.float32)
    narrow = tl.maximum(narrow, 0.0, propagate_nan=tl.PropagateNan.ALL).to(half)
    tl.store(r + row * K + k[None, :], narrow, mask=inside)

    # x' = x + h + r W2' + b2; its moments are those of the chunks so far, combined with those of the next
    mean = tl.zeros((TILE,), tl.float32)
    squares = tl.zeros((TILE,), tl.float32)  # sum of squared distances to the mean
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        d = start + chunk
        h = tl.load(y + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        h = (h + tl.load(bias + d)[None, :].to(tl.float32)).to(half)
        value = h.to(tl.float32) + tl.load(x + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        value += tl.load(b2 + d)[None, :].to(tl.float32)
        value = tl.dot(narrow, tl.load(w2 + d[None, :] * K + k[:, None]), value).to(half)
        tl.store(total + row * D + d[None, :], value, mask=inside)
        exact = value.to(tl.float32)
        mean_here = tl.sum(exact, 1) / CHUNK
        centred = exact - mean_here[:, None]
        away = mean_here - mean
        squares += tl.sum(centred * centred, 1) + away * away * (CHUNK * (start / (start + CHUNK)))
        mean += away * (CHUNK / (start + CHUNK))
    scale = tl.rsqrt(squares / D + eps)
    tl.store(moments + first + rows, mean, mask=first + rows < count)
    tl.store(moments + count + first + rows, scale, mask=first + rows < count)

    tl.debug_barrier()  # other threads wrote what is read here
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        d = start + chunk
        z = tl.load(total + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        z = (z - mean[:, None]) * scale[:, None]
        n = z * tl.load(norm_weight + d)[None, :] + tl.load(norm_bias + d)[None, :]
        tl.store(normed + row * D + d[None, :], n.to(half), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _adapt_wide_backward(
    g,
    r,
    w1,
    w2,
    p,
    out,
    count,
    D: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of p and dh, from the gradient g of x'."""
    half: tl.constexpr = g.dtype.element_ty
    first = tl.program_id(0) * TILE
    row = tl.arange(0, TILE)[:, None]
    inside = first + row < count
    k = tl.arange(0, K)
    chunk = tl.arange(0, CHUNK)
    g += first.to(tl.int64) * D
    out += first.to(tl.int64) * D
    r += first.to(tl.int64) * K
    p += first.to(tl.int64) * K

    # p = (r > 0) * (d W2)
    narrow = tl.zeros((TILE, K), tl.float32)
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        d = start + chunk
        value = tl.load(g + row * D + d[None, :], mask=inside, other=0.0)
        narrow = tl.dot(value, tl.load(w2 + d[:, None] * K + k[None, :]), narrow)
    opened = tl.load(r + row * K + k[None, :], mask=inside, other=0.0) > 0
    narrow = tl.where(opened, narrow, 0.0).to(half)
    tl.store(p + row * K + k[None, :], narrow, mask=inside)

    # dh = d + p W1
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        d = start + chunk
        value = tl.load(g + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.dot(narrow, tl.load(w1 + k[:, None] * D + d[None, :]), value)
        tl.store(out + row * D + d[None, :], value.to(half), mask=inside)
