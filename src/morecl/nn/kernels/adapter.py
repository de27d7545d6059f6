"""An adapter and its neighbours at the end of a block's branch, in one kernel forward and two backward.

The kernels for narrow tokens; :mod:`morecl.nn.kernels.wide` has those for wide ones. The gradients are for both.

For N tokens of D dimensions, a bottleneck of K, and a product y without its frozen bias b, ``h = y + b``:

- forward: ``r = relu(h W1' + b1)``, ``x' = x + h + r W2' + b2``, and the norm of x', tile by tile. In the MLP branch
  the product ``y = a W'`` is computed here too;
- backward, from the gradient d of x': ``p = (r > 0) * (d W2)``, ``dh = d + p W1``. In the attention branch, where
  ``y = a W'``, the kernel goes on to ``e = dh W``, the gradient of a, and to the sum of e a over each head;
- gradients of the weights: ``dW2 = d' r``, ``dW1 = p' y`` (without the share of the bias, ``db1 b'``), ``db2 = sum d``,
  ``db1 = sum p``, each summed over parts of the tokens; the parts are added up later, in a fixed order.

Products are accumulated in float32 and rounded when they are multiplied or stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.adapter import AdapterWeights
from morecl.nn.kernels.compiling import FUSED

TILE = 64  # tokens per program
CHUNK = 64  # dimensions per step
PART = 9 * TILE  # tokens over which one program sums the gradients of the weights; more if tokens are wide
WIDTHS = (64, 128)  # supported sizes of the bottleneck
LAUNCH = FUSED | {"num_warps": 4, "num_stages": 2, "maxnreg": 168}
NARROW = 192  # dimensions up to which tokens are narrow: a tile of them and the neighbours' products fit into registers


def forward(
    y: Tensor,
    x: Tensor,
    bias: Tensor,
    adapter: AdapterWeights,
    norm: tuple[Tensor, Tensor],
    eps: float,
    product: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """y (N, D), x (N, D), b (D,) -> y, r (N, K), x' (N, D), its norm (N, D), and its mean and 1 / sd (2, N).

    ``adapter``: the weights of one adapter, in half precision.
    ``product``: a weight W (D, H); then the argument y is a (N, H), and ``y = a W'``.
    """
    count, dim = x.shape
    k = adapter.b1.shape[0]
    a = y
    if product is not None:
        y = torch.empty_like(x)
    r = x.new_empty(count, k)
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    moments = x.new_empty(2, count, dtype=torch.float32)
    _adapt[(triton.cdiv(count, TILE),)](
        a, product, y, x, bias, *adapter, *norm, r, total, normed, moments,
        count, eps, 0 if product is None else a.shape[1], dim, k, TILE, CHUNK, **LAUNCH,
    )  # fmt: skip
    return y, r, total, normed, moments


def backward(d: Tensor, r: Tensor, adapter: AdapterWeights) -> tuple[Tensor, Tensor]:
    """d (N, D), r (N, K) -> p (N, K), dh (N, D)."""
    p, dh, _ = _backward(d, r, adapter, d, d, 0)  # with 0 heads, projection and seen are not read
    return p, dh


def backward_to_heads(
    d: Tensor, r: Tensor, adapter: AdapterWeights, projection: Tensor, seen: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """d (N, D), r (N, K), W (D, D), a (N, D) -> p (N, K), e = dh W (N, D), sum(e a) over each head (N, heads)."""
    return _backward(d, r, adapter, projection, seen, heads)


def _backward(
    d: Tensor, r: Tensor, adapter: AdapterWeights, projection: Tensor, seen: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    count, dim = d.shape
    k = r.shape[1]
    p = torch.empty_like(r)
    out = torch.empty_like(d)
    delta = d.new_empty(count, heads, dtype=torch.float32)
    _adapt_backward[(triton.cdiv(count, TILE),)](
        d, r, adapter.w1, adapter.w2, projection, seen, p, out, delta, count,
        dim, k, TILE, CHUNK, dim // heads if heads else 0, **LAUNCH,
    )  # fmt: skip
    return p, out, delta


def gradients(d: Tensor, r: Tensor, y: Tensor, p: Tensor, sums: Tensor) -> None:
    """Write the gradients of the weights to ``sums``, of shape :func:`parts`."""
    count, dim = y.shape
    k = r.shape[1]
    _adapter_gradients[(dim // CHUNK, sums.shape[0])](
        d, r, y, p, sums, count, dim, k, _part(dim), TILE, CHUNK, **_gradients_launch(dim, k)
    )


def parts(count: int, dim: int, k: int) -> tuple[int, int]:
    """Shape of an adapter's sums: a row per part of the tokens, with dW2 (D, K), dW1 (K, D), db2 (D), db1 (K)."""
    return triton.cdiv(count, _part(dim)), 2 * dim * k + dim + k


def _gradients_launch(dim: int, k: int) -> dict[str, int]:
    """Measured for wide tokens with eight warps if K is 128, for narrow ones always with four."""
    if dim > NARROW and k > 64:
        return FUSED | {"num_warps": 8, "num_stages": 2}
    return FUSED | {"num_warps": 4, "num_stages": 3}


def _part(dim: int) -> int:
    """With a program per chunk and part, wide tokens need fewer parts to fill a GPU; each is written and read again."""
    return PART if dim <= NARROW else 2 * PART


@triton.jit(do_not_specialize=["count"])
def _adapt(
    a,
    weight,
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
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A tile of r, x', its norm and its moments; with an inner dimension H > 0 also of y."""
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

    # y = a W'
    ys = ()
    if H > 0:
        a += first.to(tl.int64) * H
        for c in tl.static_range(D // CHUNK):
            ys = ys + (tl.zeros((TILE, CHUNK), tl.float32),)
        for start in range(0, H, CHUNK):
            place = row * H + start + chunk[None, :]
            active = tl.load(a + place, mask=inside, other=0.0)
            grown = ()
            for c in tl.static_range(D // CHUNK):
                w = tl.load(weight + (c * CHUNK + chunk)[None, :] * H + start + chunk[:, None])
                grown = grown + (tl.dot(active, w, ys[c]),)
            ys = grown

    # h = y + b and r = relu(h W1' + b1)
    hs = ()
    narrow = tl.zeros((TILE, K), tl.float32)
    for c in tl.static_range(D // CHUNK):
        d = c * CHUNK + chunk
        if H > 0:
            tl.store(y + row * D + d[None, :], ys[c].to(half), mask=inside)
            h = ys[c]
        else:
            h = tl.load(y + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        h = (h + tl.load(bias + d)[None, :].to(tl.float32)).to(half)
        narrow = tl.dot(h, tl.load(w1 + k[None, :] * D + d[:, None]), narrow)
        hs = hs + (h,)
    narrow += tl.load(b1 + k)[None, :].to(tl.float32)
    narrow = tl.maximum(narrow, 0.0, propagate_nan=tl.PropagateNan.ALL).to(half)
    tl.store(r + row * K + k[None, :], narrow, mask=inside)

    # x' = x + h + r W2' + b2, and its norm
    xs = ()
    mean = tl.zeros((TILE,), tl.float32)
    for c in tl.static_range(D // CHUNK):
        d = c * CHUNK + chunk
        value = hs[c].to(tl.float32) + tl.load(x + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        value += tl.load(b2 + d)[None, :].to(tl.float32)
        value = tl.dot(narrow, tl.load(w2 + d[None, :] * K + k[:, None]), value).to(half)
        tl.store(total + row * D + d[None, :], value, mask=inside)
        mean += tl.sum(value.to(tl.float32), 1) / D
        xs = xs + (value,)
    variance = tl.zeros((TILE,), tl.float32)
    for c in tl.static_range(D // CHUNK):
        centred = xs[c].to(tl.float32) - mean[:, None]
        variance += tl.sum(centred * centred, 1) / D
    scale = tl.rsqrt(variance + eps)
    tl.store(moments + first + rows, mean, mask=first + rows < count)
    tl.store(moments + count + first + rows, scale, mask=first + rows < count)
    for c in tl.static_range(D // CHUNK):
        d = c * CHUNK + chunk
        z = (xs[c].to(tl.float32) - mean[:, None]) * scale[:, None]
        n = z * tl.load(norm_weight + d)[None, :] + tl.load(norm_bias + d)[None, :]
        tl.store(normed + row * D + d[None, :], n.to(half), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _adapt_backward(
    g,
    r,
    w1,
    w2,
    projection,
    seen,
    p,
    out,
    delta,
    count,
    D: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A tile of p and dh, from the gradient g of x'; with heads of WIDTH > 0, e and its sums instead of dh."""
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
    gs = ()
    narrow = tl.zeros((TILE, K), tl.float32)
    for c in tl.static_range(D // CHUNK):
        d = c * CHUNK + chunk
        value = tl.load(g + row * D + d[None, :], mask=inside, other=0.0)
        narrow = tl.dot(value, tl.load(w2 + d[:, None] * K + k[None, :]), narrow)
        gs = gs + (value,)
    opened = tl.load(r + row * K + k[None, :], mask=inside, other=0.0) > 0
    narrow = tl.where(opened, narrow, 0.0).to(half)
    tl.store(p + row * K + k[None, :], narrow, mask=inside)

    # dh = d + p W1
    dhs = ()
    for c in tl.static_range(D // CHUNK):
        d = c * CHUNK + chunk
        dh = tl.dot(narrow, tl.load(w1 + k[:, None] * D + d[None, :]), gs[c].to(tl.float32)).to(half)
        if WIDTH > 0:
            dhs = dhs + (dh,)
        else:
            tl.store(out + row * D + d[None, :], dh, mask=inside)

    # e = dh W, and the sums of e a over each head
    if WIDTH > 0:
        seen += first.to(tl.int64) * D
        delta += first.to(tl.int64) * (D // WIDTH)
        heads: tl.constexpr = CHUNK // WIDTH
        for c in tl.static_range(D // CHUNK):
            d = c * CHUNK + chunk
            e = tl.zeros((TILE, CHUNK), tl.float32)
            for b in tl.static_range(D // CHUNK):
                e = tl.dot(dhs[b], tl.load(projection + (b * CHUNK + chunk)[:, None] * D + d[None, :]), e)
            rounded = e.to(half)
            tl.store(out + row * D + d[None, :], rounded, mask=inside)
            a = tl.load(seen + row * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
            share = tl.sum(tl.reshape(rounded.to(tl.float32) * a, (TILE, heads, WIDTH)), 2)
            tl.store(delta + row * (D // WIDTH) + c * heads + tl.arange(0, heads)[None, :], share, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _adapter_gradients(
    g,
    r,
    y,
    p,
    sums,
    count,
    D: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of the sums over one part of the tokens, from the gradient g of x'."""
    d = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    part = tl.program_id(1)
    k = tl.arange(0, K)
    dw2 = tl.zeros((CHUNK, K), tl.float32)
    dw1 = tl.zeros((CHUNK, K), tl.float32)
    db2 = tl.zeros((TILE, CHUNK), tl.float32)
    db1 = tl.zeros((TILE, K), tl.float32)
    row = tl.arange(0, TILE)[:, None]
    g += part.to(tl.int64) * PART * D
    y += part.to(tl.int64) * PART * D
    r += part.to(tl.int64) * PART * K
    p += part.to(tl.int64) * PART * K
    for start in range(0, PART, TILE):
        inside = part * PART + start + row < count
        wide = (start + row) * D + d[None, :]
        narrow = (start + row) * K + k[None, :]
        gs = tl.load(g + wide, mask=inside, other=0.0)
        ys = tl.load(y + wide, mask=inside, other=0.0)
        rs = tl.load(r + narrow, mask=inside, other=0.0)
        ps = tl.load(p + narrow, mask=inside, other=0.0)
        dw2 = tl.dot(tl.trans(gs), rs, dw2)
        dw1 = tl.dot(tl.trans(ys), ps, dw1)
        db2 += gs.to(tl.float32)
        db1 += ps.to(tl.float32)
    sums += part * (2 * D * K + D + K)
    tl.store(sums + d[:, None] * K + k[None, :], dw2)
    tl.store(sums + D * K + k[None, :] * D + d[:, None], dw1)
    tl.store(sums + 2 * D * K + d, tl.sum(db2, 0))
    if tl.program_id(0) == 0:
        tl.store(sums + 2 * D * K + D + k, tl.sum(db1, 0))
