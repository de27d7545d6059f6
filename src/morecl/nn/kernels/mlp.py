"""Products of the MLP with GELU or its gradient behind them, in one kernel.

For N tokens of D dimensions, H neurons in the MLP and a product ``u = x W1'`` without its bias b:

- forward: ``a = gelu(u + b)`` and, for the backward pass, the slope ``gelu'(u + b)`` in place of u: frozen weights have
  no gradient, so nothing else is needed;
- backward, from the gradient d of ``a W2'``: ``(d W2) slope``, or the same from u.

Programs of one tile of tokens follow one another, so tokens are read from memory once, and weights stay in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.kernels.gelu import gelu, new_slopes, slope, slope_as, slope_from, tail


class Launch(NamedTuple):
    """Tile and resources of a program."""

    rows: int  # tokens
    columns: int  # neurons
    chunk: int  # dimensions per step
    warps: int
    stages: int

    def grid(self, count: int, neurons: int) -> tuple[int]:
        return (triton.cdiv(count, self.rows) * (neurons // self.columns),)

    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.columns, self.chunk

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


FORWARD = Launch(rows=128, columns=128, chunk=64, warps=8, stages=3)
BACKWARD = Launch(rows=64, columns=128, chunk=64, warps=4, stages=3)


def forward(x: Tensor, weight: Tensor, bias: Tensor, *, with_slopes: bool) -> tuple[Tensor, Tensor]:
    """x (N, D), W1 (H, D), b (H,) -> a (N, H), and its slopes (N, H), or (0, H) without them."""
    count, dim = x.shape
    neurons = len(weight)
    launch = _fitted(FORWARD, neurons)
    a = x.new_empty(count, neurons)
    slopes = new_slopes(a if with_slopes else a[:0])
    _mlp_forward[launch.grid(count, neurons)](
        x, weight, bias, a, slopes, count, dim, neurons, *launch.sizes(), with_slopes, **launch.options()
    )
    return a, slopes


def backward(d: Tensor, weight: Tensor, slopes: Tensor) -> Tensor:
    """d (N, D), W2 (D, H), slopes (N, H) -> the gradient of u (N, H)."""
    return _backward(d, weight, slopes, weight, from_input=False)  # the bias is not read


def backward_from_input(d: Tensor, weight: Tensor, u: Tensor, bias: Tensor) -> Tensor:
    """d (N, D), W2 (D, H), u (N, H), b (H,) -> the gradient of u (N, H)."""
    return _backward(d, weight, u, bias, from_input=True)


def _backward(d: Tensor, weight: Tensor, kept: Tensor, bias: Tensor, *, from_input: bool) -> Tensor:
    count, dim = d.shape
    neurons = kept.shape[1]
    launch = _fitted(BACKWARD, neurons)
    out = d.new_empty(count, neurons)
    _mlp_backward[launch.grid(count, neurons)](
        d, weight, kept, bias, out, count, dim, neurons, *launch.sizes(), from_input, **launch.options()
    )
    return out


def _fitted(launch: Launch, neurons: int) -> Launch:
    """With half the columns if the neurons are not a multiple of them."""
    return launch if neurons % launch.columns == 0 else launch._replace(columns=launch.columns // 2)


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
    kept,
    bias,
    out,
    count,
    D: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    FROM_INPUT: tl.constexpr,
):
    """A tile of the gradient of u, from the gradient g of the second product; ``kept`` is u or the slopes."""
    first, column = _tile(H, ROWS, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    inside = first + row < count
    chunk = tl.arange(0, CHUNK)
    g += first.to(tl.int64) * D
    kept += first.to(tl.int64) * H
    out += first.to(tl.int64) * H
    place = row * H + column[None, :]
    stored = tl.load(kept + place, mask=inside, other=0)  # early: the product does not wait for it
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, CHUNK):
        d = start + chunk
        left = tl.load(g + row * D + d[None, :], mask=inside, other=0.0)
        value = tl.dot(left, tl.load(weight + d[:, None] * H + column[None, :]), value)
    if FROM_INPUT:
        at = stored.to(tl.float32) + tl.load(bias + column)[None, :].to(tl.float32)
        value *= slope(at, tail(tl.abs(at)))
    else:
        value *= slope_from(stored)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
