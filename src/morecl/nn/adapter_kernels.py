"""An adapter in three kernels, for compiled training in half precision on a GPU.

Torch's compiler turns ``A(h) = h + W2 relu(W1 h + b1) + b2`` and its gradient into some sixteen products and sums of a
few microseconds each. Here they are, for N tokens of D dimensions and a bottleneck of K:

- forward: ``r = relu(h W1' + b1)``, ``out = h + r W2' + b2``, tile by tile, and
- backward: ``p = (r > 0) * (g W2)``, ``dh = g + p W1``, which is the same kernel with other weights and no biases;
- gradients of the weights: ``dW2 = g' r``, ``dW1 = p' h``, ``db2 = sum g``, ``db1 = sum p``, summed over 576 tokens
  at a time, in float32, and these sums then in a fixed order: the same numbers every time.

Products are accumulated in float32 and rounded once, not after every operation. Importing this needs Triton, which
comes with torch where there are GPUs; :func:`fits` says what the kernels can take.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # tokens at a time
CHUNK = 64  # dimensions at a time
PART = 9 * TILE  # tokens whose share of the weights' gradients is summed by one processor
WIDTHS = (16, 32, 64, 128)
MOST_DIMENSIONS = 384  # loops over chunks are unrolled: wider ones compile for long, and are less in need of it


def fits(h: Tensor, w1: Tensor) -> bool:
    """Whether :func:`adapter` can take the tokens (..., D) and the weight (K, D)."""
    if w1.dim() != 2 or w1.shape[0] not in WIDTHS or w1.shape[1] % CHUNK or w1.shape[1] > MOST_DIMENSIONS:
        return False
    return h.is_cuda and h.dtype in (torch.bfloat16, torch.float16)


def adapter(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """``h + W2 relu(W1 h + b1) + b2``: (..., D), (K, D), (K,), (D, K), (D,) -> (..., D)."""
    out, _ = _forward(h.reshape(-1, h.shape[-1]), w1, b1, w2, b2)
    return out.view_as(h)


@triton.jit
def _through_bottleneck(
    x,
    before,
    w_in,
    b_in,
    w_out,
    b_out,
    hidden,
    out,
    count,
    in_d,
    in_k,
    out_d,
    out_k,
    D: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """``hidden = act(x w_in)``, ``out = x + hidden w_out`` for a tile of the ``count`` rows of x (N, D).

    Forward, act adds b_in and takes the ReLU, and b_out is added to out; backward, it keeps what was positive in
    ``before`` (N, K). ``in_d, in_k, out_d, out_k`` are the strides of the weights along D and K.
    """
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = rows[:, None] < count
    k, chunk = tl.arange(0, K), tl.arange(0, CHUNK)
    narrow = tl.zeros((TILE, K), tl.float32)
    for start in tl.static_range(0, D, CHUNK):
        d = start + chunk
        part = tl.load(x + rows[:, None] * D + d[None, :], mask=inside, other=0.0)
        weight = tl.load(w_in + d[:, None] * in_d + k[None, :] * in_k)
        narrow = tl.dot(part, weight, narrow)
    if BACKWARD:
        kept = tl.load(before + rows[:, None] * K + k[None, :], mask=inside, other=0.0)
        narrow = tl.where(kept > 0, narrow, 0.0)
    else:
        narrow = tl.maximum(narrow + tl.load(b_in + k)[None, :].to(tl.float32), 0.0)
    rounded = narrow.to(x.dtype.element_ty)
    tl.store(hidden + rows[:, None] * K + k[None, :], rounded, mask=inside)
    for start in tl.static_range(0, D, CHUNK):
        d = start + chunk
        weight = tl.load(w_out + k[:, None] * out_k + d[None, :] * out_d)
        wide = tl.load(x + rows[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        wide = tl.dot(rounded, weight, wide)
        if not BACKWARD:
            wide += tl.load(b_out + d)[None, :].to(tl.float32)
        tl.store(out + rows[:, None] * D + d[None, :], wide.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradients(
    g,
    r,
    h,
    p,
    sums,
    count,
    D: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of the sums over one part of the tokens: sums (parts, [dW2 (D, K), dW1 (K, D), db2 (D), db1 (K)])."""
    d = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    part = tl.program_id(1)
    k = tl.arange(0, K)
    dw2, dw1 = tl.zeros((CHUNK, K), tl.float32), tl.zeros((CHUNK, K), tl.float32)
    db2, db1 = tl.zeros((TILE, CHUNK), tl.float32), tl.zeros((TILE, K), tl.float32)
    for start in range(0, PART, TILE):
        rows = part.to(tl.int64) * PART + start + tl.arange(0, TILE)
        inside = rows[:, None] < count
        wide, narrow = rows[:, None] * D + d[None, :], rows[:, None] * K + k[None, :]
        gs, hs = tl.load(g + wide, mask=inside, other=0.0), tl.load(h + wide, mask=inside, other=0.0)
        rs, ps = tl.load(r + narrow, mask=inside, other=0.0), tl.load(p + narrow, mask=inside, other=0.0)
        dw2 = tl.dot(tl.trans(gs), rs, dw2)
        dw1 = tl.dot(tl.trans(hs), ps, dw1)
        db2 += gs.to(tl.float32)
        db1 += ps.to(tl.float32)
    sums += part * (2 * D * K + D + K)
    tl.store(sums + d[:, None] * K + k[None, :], dw2)
    tl.store(sums + D * K + k[None, :] * D + d[:, None], dw1)
    tl.store(sums + 2 * D * K + d, tl.sum(db2, 0))
    if tl.program_id(0) == 0:
        tl.store(sums + 2 * D * K + D + k, tl.sum(db1, 0))


def _launched(kernel: Any) -> Any:
    """``kernel`` so that torch's compiler sees it; Triton's interpreter (``TRITON_INTERPRET=1``) takes it as it is."""
    return kernel if triton.knobs.runtime.interpret else torch.library.wrap_triton(kernel)


def _bottleneck(
    x: Tensor,
    before: Tensor,
    w_in: Tensor,
    b_in: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    strides: tuple[int, int, int, int],
    k: int,
    *,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`_through_bottleneck` for all of x (N, D): out (N, D), hidden (N, k)."""
    count, dim = x.shape
    out, hidden = torch.empty_like(x), x.new_empty(count, k)
    _launched(_through_bottleneck)[(triton.cdiv(count, TILE),)](
        x, before, w_in, b_in, w_out, b_out, hidden, out, count, *strides, dim, k, TILE, CHUNK, backward
    )
    return out, hidden


@torch.library.triton_op("morecl::adapter", mutates_args={})
def _forward(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """h (N, D) -> A(h) (N, D), r (N, K)."""
    h = h.contiguous()
    (in_k, in_d), (out_d, out_k) = w1.stride(), w2.stride()
    return _bottleneck(h, h, w1, b1, w2, b2, (in_d, in_k, out_d, out_k), w1.shape[0], backward=False)


@torch.library.triton_op("morecl::adapter_backward", mutates_args={})
def _backward(g: Tensor, r: Tensor, h: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Given the gradient g (N, D) of the output: that of h (N, D), and those of the weights in one row a part."""
    g, h = g.contiguous(), h.contiguous()
    count, (k, dim) = h.shape[0], w1.shape
    (in_d, in_k), (out_k, out_d) = w2.stride(), w1.stride()
    dh, p = _bottleneck(g, r, w2, w2, w1, w1, (in_d, in_k, out_d, out_k), k, backward=True)
    parts = triton.cdiv(count, PART)
    sums = h.new_empty(parts, 2 * dim * k + dim + k, dtype=torch.float32)
    _launched(_weight_gradients)[(dim // CHUNK, parts)](g, r, h, p, sums, count, dim, k, PART, TILE, CHUNK)
    return dh, sums


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    h, w1, _, w2, _ = inputs
    ctx.save_for_backward(h, output[1], w1, w2)


def _gradients(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    h, r, w1, w2 = ctx.saved_tensors
    dh, sums = _backward(g, r, h, w1, w2)
    dw2, dw1, db2, db1 = sums.sum(0).to(h.dtype).split([w2.numel(), w1.numel(), w2.shape[0], w1.shape[0]])
    return dh, dw1.view_as(w1), db1, dw2.view_as(w2), db2


_forward.register_autograd(_gradients, setup_context=_keep)
