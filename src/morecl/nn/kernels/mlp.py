"""Products of the MLP with GELU or its gradient behind them, in one kernel.

For N tokens of D dimensions, H neurons in the MLP and ``u = x W1' + b``:

- forward: ``a = gelu(u)`` and, for the backward pass, the slope ``gelu'(u)`` in place of u: frozen weights have no
  gradient, so nothing else is needed;
- backward, from the gradient d of ``a W2'``: ``(d W2) slope``.

Programs of one tile of tokens follow one another, so tokens are read from memory once, and weights stay in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.kernels.adapter import NARROW
from morecl.nn.kernels.gelu import gelu, new_slopes, slope, slope_as, slope_from, tail

# the fastest of eight launches each on an H200, with 192, 384 and 768 dimensions (benchmarks/h200-mlp-sweep.json)
ROWS = 128  # tokens per program
COLUMNS = 128  # neurons per program
CHUNK = 64  # dimensions per step
BACKWARD = {"num_warps": 8, "num_stages": 3}


def forward_launch(dim: int) -> dict[str, int]:
    return {"num_warps": 8, "num_stages": 2 if dim <= NARROW else 3}


def forward(x: Tensor, weight: Tensor, bias: Tensor, *, with_slopes: bool) -> tuple[Tensor, Tensor]:
    """x (N, D), W1 (H, D), b (H,) -> a (N, H), and its slopes (N, H), or (0, H) without them."""
    count, dim = x.shape
    neurons = len(weight)
    columns = _columns(neurons)
    a = x.new_empty(count, neurons)
    slopes = new_slopes(a if with_slopes else a[:0])
    _mlp_forward[_grid(count, neurons)](
        x, weight, bias, a, slopes, count, dim, neurons, ROWS, columns, CHUNK, with_slopes, **forward_launch(dim)
    )
    return a, slopes


def backward(d: Tensor, weight: Tensor, slopes: Tensor) -> Tensor:
    """d (N, D), W2 (D, H), slopes (N, H) -> the gradient of u (N, H)."""
    count, dim = d.shape
    neurons = slopes.shape[1]
    out = d.new_empty(count, neurons)
    _mlp_backward[_grid(count, neurons)](
        d, weight, slopes, out, count, dim, neurons, ROWS, _columns(neurons), CHUNK, **BACKWARD
    )
    return out


def _grid(count: int, neurons: int) -> tuple[int]:
    return (triton.cdiv(count, ROWS) * (neurons // _columns(neurons)),)


def _columns(neurons: int) -> int:
    """Half of them if the neurons are not a multiple."""
    return COLUMNS if neurons % COLUMNS == 0 else COLUMNS // 2


@triton.jit
def _tile(H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first token of a program, and its neurons."""
    across: tl.constexpr = H // COLUMNS
    first = tl.program_id(0) // across * ROWS
    return first, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit(do_not_specialize=["count"])
def _mlp_forward(
    x,
    weight,
    bias,
    a,
    slopes,
    count,
    D: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """A tile of a and, if wanted, of the slopes."""
    first, column = _tile(H, ROWS, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    inside = first + row < count
    chunk = tl.arange(0, CHUNK)
    x += first.to(tl.int64) * D
    a += first.to(tl.int64) * H
    slopes += first.to(tl.int64) * H
    place = row * H + column[None, :]
    at = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, CHUNK):
        d = start + chunk
        left = tl.load(x + row * D + d[None, :], mask=inside, other=0.0)
        at = tl.dot(left, tl.load(weight + column[None, :] * D + d[:, None]), at)
    at += tl.load(bias + column)[None, :].to(tl.float32)
    beyond = tail(tl.abs(at))
    active = gelu(at, beyond).to(a.dtype.element_ty)
    if SLOPES:
        tl.store(slopes + place, slope_as(slope(at, beyond), slopes.dtype.element_ty), mask=inside)
    tl.store(a + place, active, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _mlp_backward(
    g,
    weight,
    slopes,
    out,
    count,
    D: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A tile of the gradient of u, from the gradient g of the second product."""
    first, column = _tile(H, ROWS, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    inside = first + row < count
    chunk = tl.arange(0, CHUNK)
    g += first.to(tl.int64) * D
    slopes += first.to(tl.int64) * H
    out += first.to(tl.int64) * H
    place = row * H + column[None, :]
    stored = tl.load(slopes + place, mask=inside, other=0)  # early: the product does not wait for it
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, CHUNK):
        d = start + chunk
        left = tl.load(g + row * D + d[None, :], mask=inside, other=0.0)
        value = tl.dot(left, tl.load(weight + d[:, None] * H + column[None, :]), value)
    value *= slope_from(stored)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
