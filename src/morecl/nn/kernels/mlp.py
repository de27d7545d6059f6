"""Products of the MLP with GELU or its gradient behind them, in one kernel.

For N tokens of D dimensions, H neurons in the MLP and ``u = x W1' + b``:

- forward: ``a = gelu(u)`` and, for the backward pass, the slope ``gelu'(u)`` in place of u: frozen weights have no
  gradient, so nothing else is needed;
- backward, from the gradient d of ``a W2'``: ``(d W2) slope``.

Programs of one tile of tokens follow one another, so tokens are read from memory once, and weights stay in the cache.
Tiles are read through descriptors: on a Hopper GPU by its copy engine, which leaves registers and instructions to GELU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from morecl.nn.kernels.compiling import FUSED
from morecl.nn.kernels.gelu import gelu, new_slopes, slope_as, slope_from, tail

# the fastest of some twenty launches on an H200, or within 8 % of it (benchmarks/h200-descriptors-sweep.json)
ROWS = 128  # tokens per program
COLUMNS = 128  # neurons per program
CHUNK = 64  # dimensions per step
LAUNCH = FUSED | {"num_warps": 8, "num_stages": 3}


def forward(x: Tensor, weight: Tensor, bias: Tensor, *, with_slopes: bool) -> tuple[Tensor, Tensor]:
    """x (N, D), W1 (H, D), b (H,) -> a (N, H), and its slopes (N, H), or (0, H) without them."""
    count, dim = x.shape
    neurons = len(weight)
    columns = _columns(neurons)
    a = x.new_empty(count, neurons)
    slopes = new_slopes(a if with_slopes else a[:0])
    _mlp_forward[_grid(count, neurons)](
        _tiles(x, ROWS, CHUNK), _tiles(weight, columns, CHUNK), bias, a, slopes,
        count, dim, neurons, ROWS, columns, CHUNK, with_slopes, **LAUNCH,
    )  # fmt: skip
    return a, slopes


def backward(d: Tensor, weight: Tensor, slopes: Tensor) -> Tensor:
    """d (N, D), W2 (D, H), slopes (N, H) -> the gradient of u (N, H)."""
    count, dim = d.shape
    neurons = slopes.shape[1]
    columns = _columns(neurons)
    out = d.new_empty(count, neurons)
    _mlp_backward[_grid(count, neurons)](
        _tiles(d, ROWS, CHUNK), _tiles(weight, CHUNK, columns), slopes, _tiles(out, ROWS, columns),
        count, dim, neurons, ROWS, columns, CHUNK, **LAUNCH,
    )  # fmt: skip
    return out


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The matrix, to be read and written in tiles; what lies outside is read as 0 and not written."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _grid(count: int, neurons: int) -> tuple[int]:
    return (triton.cdiv(count, ROWS) * (neurons // _columns(neurons)),)


def _columns(neurons: int) -> int:
    """Half of them if the neurons are not a multiple."""
    return COLUMNS if neurons % COLUMNS == 0 else COLUMNS // 2


@triton.jit
def _place(H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first token of a program, and its first neuron."""
    across: tl.constexpr = H // COLUMNS
    return tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS


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
    first, begin = _place(H, ROWS, COLUMNS)
    column = begin + tl.arange(0, COLUMNS)
    # the bias at once: the product waits for its first chunk anyway
    at = tl.zeros((ROWS, COLUMNS), tl.float32) + tl.load(bias + column)[None, :].to(tl.float32)
    for start in range(0, D, CHUNK):
        at = tl.dot(x.load([first, start]), weight.load([begin, start]).T, at)
    beyond = tail(tl.abs(at))
    active = gelu(at, beyond).to(a.dtype.element_ty)
    row = first + tl.arange(0, ROWS)[:, None]
    place = row.to(tl.int64) * H + column[None, :]
    if SLOPES:
        tl.store(slopes + place, slope_as(at, beyond, slopes.dtype.element_ty), mask=row < count)
    tl.store(a + place, active, mask=row < count)


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
    first, begin = _place(H, ROWS, COLUMNS)
    row = first + tl.arange(0, ROWS)[:, None]
    place = row.to(tl.int64) * H + begin + tl.arange(0, COLUMNS)[None, :]
    stored = tl.load(slopes + place, mask=row < count, other=0)  # early: the product does not wait for it
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, CHUNK):
        value = tl.dot(g.load([first, start]), weight.load([start, begin]), value)
    value *= slope_from(stored)
    out.store([first, begin], value.to(out.dtype))
