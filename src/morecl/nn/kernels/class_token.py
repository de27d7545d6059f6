"""Attention of one query per image, that of the class token: a single pass over memory, without matrix units.

As in :mod:`morecl.nn.kernels.attention`, with keys and values (N, 2 D) of all N = B L tokens and queries (B, D).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.kernels.attention import LOG2_E
from morecl.nn.kernels.compiling import FUSED

TILE = 64  # tokens per step


def forward(q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """q (B, D), kv (N, 2 D) -> O (B, D), and log2 of the softmax's denominators (B, heads)."""
    images, dim = q.shape
    out = torch.empty_like(q)
    logs = q.new_empty(images, heads, dtype=torch.float32)
    _attend_once[(images * heads,)](q, kv, out, logs, kv.shape[0] // images, heads, dim // heads, TILE, **FUSED)
    return out, logs


def backward(g: Tensor, delta: Tensor, q: Tensor, kv: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of q and kv, given that of O and delta (B, heads)."""
    images, dim = q.shape
    heads = logs.shape[1]
    dq = torch.empty_like(q)
    dkv = torch.empty_like(kv)
    _attend_once_backward[(images * heads,)](
        g, delta, q, kv, logs, dq, dkv, kv.shape[0] // images, heads, dim // heads, TILE, **FUSED
    )
    return dq, dkv


@triton.jit
def _attend_once(q, kv, o, logs, LENGTH: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """One head of one image."""
    image, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    dim: tl.constexpr = HEADS * WIDTH
    column, row = tl.arange(0, WIDTH), tl.arange(0, TILE)
    kv += image.to(tl.int64) * LENGTH * 2 * dim + head * WIDTH
    query = tl.load(q + image * dim + head * WIDTH + column).to(tl.float32) * (LOG2_E / tl.sqrt(1.0 * WIDTH))
    total = 0.0
    top = float("-inf")
    out = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, LENGTH, TILE):
        place = (start + row)[:, None] * 2 * dim + column[None, :]
        inside = start + row < LENGTH
        k = tl.load(kv + place, mask=inside[:, None], other=0.0).to(tl.float32)
        v = tl.load(kv + dim + place, mask=inside[:, None], other=0.0).to(tl.float32)
        s = tl.where(inside, tl.sum(k * query[None, :], 1), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - higher)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 0)
        out = out * shrink + tl.sum(p[:, None] * v, 0)
        top = higher
    tl.store(o + image * dim + head * WIDTH + column, (out / total).to(o.dtype.element_ty))
    tl.store(logs + tl.program_id(0), top + tl.log2(total))


@triton.jit
def _attend_once_backward(
    g, delta, q, kv, logs, dq, dkv, LENGTH: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """One head of one image."""
    image, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    dim: tl.constexpr = HEADS * WIDTH
    column, row = tl.arange(0, WIDTH), tl.arange(0, TILE)
    first = image.to(tl.int64) * LENGTH * 2 * dim + head * WIDTH
    kv += first
    dkv += first
    place = image * dim + head * WIDTH + column
    query = tl.load(q + place).to(tl.float32)
    do = tl.load(g + place).to(tl.float32)
    at = tl.load(delta + tl.program_id(0))
    log = tl.load(logs + tl.program_id(0))
    unit = 1 / tl.sqrt(1.0 * WIDTH)
    gradient = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, LENGTH, TILE):
        rows = (start + row)[:, None] * 2 * dim + column[None, :]
        inside = (start + row < LENGTH)[:, None]
        k = tl.load(kv + rows, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(kv + dim + rows, mask=inside, other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(k * query[None, :], 1) * (LOG2_E * unit) - log)
        p = tl.where(start + row < LENGTH, p, 0.0)
        ds = p * (tl.sum(v * do[None, :], 1) - at) * unit
        gradient += tl.sum(ds[:, None] * k, 0)
        tl.store(dkv + rows, (ds[:, None] * query[None, :]).to(kv.dtype.element_ty), mask=inside)
        tl.store(dkv + dim + rows, (p[:, None] * do[None, :]).to(kv.dtype.element_ty), mask=inside)
    tl.store(dq + place, gradient.to(dq.dtype.element_ty))
