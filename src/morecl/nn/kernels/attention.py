"""Attention of the N = B L tokens of B images, directly from the product with queries, keys and values side by side.

``S = Q K' / sqrt(W)``, ``P = softmax(S)``, ``O = P V`` for each head of width W; backward, with ``delta = sum(O dO)``:
``dV = P' dO``, ``dS = P (dO V' - delta)``, ``dQ = dS K / sqrt(W)``, ``dK = dS' Q / sqrt(W)``. P is never stored but
computed again from S and the logarithm of its sum; delta is computed with dO (adapter.py), or by :func:`head_sums`.

The kernels of libraries are made for long sequences; for the 197 tokens of an image their backward pass takes three
kernels and writes dQ, dK and dV to three tensors, which then have to be joined. Here it is one kernel that writes where
the next product reads. Tokens are processed in tiles of 64, the remaining few in a smaller tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.kernels.compiling import FUSED

TILE = 64  # tokens per program
WIDTHS = (16, 32, 64)  # supported widths of a head
SUMS = 64  # heads of tokens per program of head_sums
FORWARD = FUSED | {"num_stages": 2}
BACKWARD = FUSED | {"num_stages": 2, "maxnreg": 168}  # so that a multiprocessor of an H200 runs three tiles at once
LOG2_E = tl.constexpr(1 / math.log(2))


def forward(qkv: Tensor, images: int, heads: int) -> tuple[Tensor, Tensor]:
    """qkv (N, 3 D) -> O (N, D), and log2 of the softmax's denominators (N, heads)."""
    count = qkv.shape[0]
    dim = qkv.shape[1] // 3
    length = count // images
    out = qkv.new_empty(count, dim)
    logs = qkv.new_empty(count, heads, dtype=torch.float32)
    _attend[(triton.cdiv(length, TILE) * images * heads,)](
        qkv, out, logs, heads, dim // heads, length, TILE, _rest(length), **FORWARD
    )
    return out, logs


def backward(g: Tensor, delta: Tensor, qkv: Tensor, logs: Tensor, images: int) -> Tensor:
    """The gradient of qkv (N, 3 D), given that of O (N, D) and delta (N, heads)."""
    count, dim = g.shape
    heads = logs.shape[1]
    length = count // images
    gradient = torch.empty_like(qkv)
    _attend_backward[(triton.cdiv(length, TILE) * images * heads,)](
        g, delta, qkv, logs, gradient, heads, dim // heads, length, TILE, _rest(length), **BACKWARD
    )
    return gradient


def head_sums(o: Tensor, g: Tensor, heads: int) -> Tensor:
    """O (N, D) and its gradient (N, D) -> delta (N, heads)."""
    count, dim = o.shape
    delta = o.new_empty(count, heads, dtype=torch.float32)
    _attend_sums[(triton.cdiv(count * heads, SUMS),)](o, g, delta, count * heads, dim // heads, SUMS, **FUSED)
    return delta


def _rest(length: int) -> int:
    """Size of the tile for the remaining tokens; 0 if there are none."""
    rest = length % TILE
    return max(16, triton.next_power_of_2(rest)) if rest else 0


@triton.jit(do_not_specialize=["count"])
def _attend_sums(o, g, delta, count, WIDTH: tl.constexpr, SUMS: tl.constexpr):
    """In memory, the heads of all tokens follow one another."""
    row = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)
    place = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = row < count
    product = tl.load(o + place, mask=inside[:, None], other=0.0).to(tl.float32)
    product *= tl.load(g + place, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(product, 1), mask=inside)


@triton.jit
def _place(HEADS: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr):
    """The tile of a program, the first token of its image, and its head."""
    tiles: tl.constexpr = (LENGTH + TILE - 1) // TILE
    pair = tl.program_id(0) // tiles
    return tl.program_id(0) % tiles, (pair // HEADS).to(tl.int64) * LENGTH, pair % HEADS


@triton.jit
def _rows(pointer, first, stride, LENGTH: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, IS_REST: tl.constexpr):
    """(SIZE, WIDTH) from row ``first`` on; in the smaller tile, zero after the last row."""
    row, column = first + tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    if IS_REST:
        return tl.load(pointer + row * stride + column, mask=row < LENGTH, other=0.0)
    return tl.load(pointer + row * stride + column)


@triton.jit
def _of_rows(pointer, first, HEADS: tl.constexpr, LENGTH: tl.constexpr, SIZE: tl.constexpr, IS_REST: tl.constexpr):
    """(SIZE,), a number of each row."""
    row = first + tl.arange(0, SIZE)
    if IS_REST:
        return tl.load(pointer + row * HEADS, mask=row < LENGTH, other=0.0)
    return tl.load(pointer + row * HEADS)


@triton.jit
def _of_both(one, other, first, HEADS: tl.constexpr, LENGTH: tl.constexpr, SIZE: tl.constexpr, IS_REST: tl.constexpr):
    """(SIZE,) and (SIZE,), two numbers of each row. Loaded together they are enough for Triton to spread over all
    threads; alone, every thread would load all those that it needs itself, 32 of them.
    """
    row = first + tl.arange(0, SIZE)
    place = tl.where((tl.arange(0, 2) == 0)[None, :], (one + row * HEADS)[:, None], (other + row * HEADS)[:, None])
    if IS_REST:
        return tl.split(tl.load(place, mask=(row < LENGTH)[:, None], other=0.0))
    return tl.split(tl.load(place))


@triton.jit
def _store_rows(
    pointer,
    first,
    stride,
    value,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_REST: tl.constexpr,
):
    row, column = first + tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    if IS_REST:
        tl.store(pointer + row * stride + column, value.to(pointer.dtype.element_ty), mask=row < LENGTH)
    else:
        tl.store(pointer + row * stride + column, value.to(pointer.dtype.element_ty))


@triton.jit
def _attend_to(
    q,
    keys,
    first,
    total,
    top,
    out,
    DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_REST: tl.constexpr,
):
    """Continue softmax and sum with the keys and values from ``first`` on."""
    k = _rows(keys, first, 3 * DIM, LENGTH, SIZE, WIDTH, IS_REST)
    v = _rows(keys + DIM, first, 3 * DIM, LENGTH, SIZE, WIDTH, IS_REST)
    scale = LOG2_E / tl.sqrt(1.0 * WIDTH)
    s = tl.dot(q, tl.trans(k))
    if IS_REST:
        s = tl.where(first + tl.arange(0, SIZE)[None, :] < LENGTH, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
    return total * shrink + tl.sum(p, 1), higher, out


@triton.jit
def _attend_from(
    first,
    qkv,
    o,
    logs,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,
    SIZE: tl.constexpr,
    IS_REST: tl.constexpr,
):
    """O and logs for SIZE queries of one head of one image."""
    dim: tl.constexpr = HEADS * WIDTH
    q = _rows(qkv, first, 3 * dim, LENGTH, SIZE, WIDTH, IS_REST)
    total = tl.zeros((SIZE,), tl.float32)
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    out = tl.zeros((SIZE, WIDTH), tl.float32)
    whole: tl.constexpr = LENGTH // TILE * TILE
    if REST:  # before the loop, so that it is loaded together with q
        total, top, out = _attend_to(q, qkv + dim, whole, total, top, out, dim, LENGTH, REST, WIDTH, True)
    for start in range(0, whole, TILE):
        total, top, out = _attend_to(q, qkv + dim, start, total, top, out, dim, LENGTH, TILE, WIDTH, False)
    _store_rows(o, first, dim, out / total[:, None], LENGTH, SIZE, WIDTH, IS_REST)
    row = first + tl.arange(0, SIZE)
    tl.store(logs + row * HEADS, top + tl.log2(total), mask=row < LENGTH)


@triton.jit
def _attend(
    qkv,
    o,
    logs,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,
):
    tile, token, head = _place(HEADS, LENGTH, TILE)
    dim: tl.constexpr = HEADS * WIDTH
    qkv += token * 3 * dim + head * WIDTH
    o += token * dim + head * WIDTH
    logs += token * HEADS + head
    whole: tl.constexpr = LENGTH // TILE
    if tile < whole:
        _attend_from(tile * TILE, qkv, o, logs, HEADS, WIDTH, LENGTH, TILE, REST, TILE, False)
    elif REST:
        _attend_from(whole * TILE, qkv, o, logs, HEADS, WIDTH, LENGTH, TILE, REST, REST, True)


@triton.jit
def _from_queries(
    k,
    v,
    dk,
    dv,
    queries,
    g,
    delta,
    logs,
    first,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
    IS_REST: tl.constexpr,
):
    """Continue dK and dV with the queries from ``first`` on. After the last, they and dO are zero and add nothing."""
    q = _rows(queries, first, 3 * HEADS * WIDTH, LENGTH, SIZE, WIDTH, IS_REST)
    do = _rows(g, first, HEADS * WIDTH, LENGTH, SIZE, WIDTH, IS_REST)
    log, at = _of_both(logs, delta, first, HEADS, LENGTH, SIZE, IS_REST)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - log[None, :])  # transposed: keys x queries
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - at[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit
def _from_keys(
    q,
    do,
    log,
    delta,
    dq,
    keys,
    first,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
    IS_REST: tl.constexpr,
):
    """Continue dQ with the keys from ``first`` on; in the smaller tile, P is zero after the last key."""
    dim: tl.constexpr = HEADS * WIDTH
    k = _rows(keys, first, 3 * dim, LENGTH, SIZE, WIDTH, IS_REST)
    v = _rows(keys + dim, first, 3 * dim, LENGTH, SIZE, WIDTH, IS_REST)
    s = tl.dot(q, tl.trans(k)) * scale - log[:, None]
    if IS_REST:
        s = tl.where(first + tl.arange(0, SIZE)[None, :] < LENGTH, s, float("-inf"))
    p = tl.exp2(s)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _gradients_of(
    first,
    g,
    delta,
    qkv,
    logs,
    gradient,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,
    SIZE: tl.constexpr,
    IS_REST: tl.constexpr,
):
    """The gradient of SIZE queries, keys and values of one head of one image."""
    dim: tl.constexpr = HEADS * WIDTH
    stride: tl.constexpr = 3 * dim
    whole: tl.constexpr = LENGTH // TILE * TILE
    unit = 1 / tl.sqrt(1.0 * WIDTH)
    scale = LOG2_E * unit

    k = _rows(qkv + dim, first, stride, LENGTH, SIZE, WIDTH, IS_REST)
    v = _rows(qkv + 2 * dim, first, stride, LENGTH, SIZE, WIDTH, IS_REST)
    dk = tl.zeros((SIZE, WIDTH), tl.float32)
    dv = tl.zeros((SIZE, WIDTH), tl.float32)
    if REST:
        dk, dv = _from_queries(k, v, dk, dv, qkv, g, delta, logs, whole, scale, HEADS, WIDTH, LENGTH, REST, True)
    for start in range(0, whole, TILE):
        dk, dv = _from_queries(k, v, dk, dv, qkv, g, delta, logs, start, scale, HEADS, WIDTH, LENGTH, TILE, False)
    _store_rows(gradient + dim, first, stride, dk * unit, LENGTH, SIZE, WIDTH, IS_REST)
    _store_rows(gradient + 2 * dim, first, stride, dv, LENGTH, SIZE, WIDTH, IS_REST)

    q = _rows(qkv, first, stride, LENGTH, SIZE, WIDTH, IS_REST)
    do = _rows(g, first, dim, LENGTH, SIZE, WIDTH, IS_REST)
    log = _of_rows(logs, first, HEADS, LENGTH, SIZE, IS_REST)
    at = _of_rows(delta, first, HEADS, LENGTH, SIZE, IS_REST)
    dq = tl.zeros((SIZE, WIDTH), tl.float32)
    if REST:
        dq = _from_keys(q, do, log, at, dq, qkv + dim, whole, scale, HEADS, WIDTH, LENGTH, REST, True)
    for start in range(0, whole, TILE):
        dq = _from_keys(q, do, log, at, dq, qkv + dim, start, scale, HEADS, WIDTH, LENGTH, TILE, False)
    _store_rows(gradient, first, stride, dq * unit, LENGTH, SIZE, WIDTH, IS_REST)


@triton.jit
def _attend_backward(
    g,
    delta,
    qkv,
    logs,
    gradient,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,
):
    tile, token, head = _place(HEADS, LENGTH, TILE)
    dim: tl.constexpr = HEADS * WIDTH
    qkv += token * 3 * dim + head * WIDTH
    gradient += token * 3 * dim + head * WIDTH
    g += token * dim + head * WIDTH
    delta += token * HEADS + head
    logs += token * HEADS + head
    whole: tl.constexpr = LENGTH // TILE
    if tile < whole:
        _gradients_of(tile * TILE, g, delta, qkv, logs, gradient, HEADS, WIDTH, LENGTH, TILE, REST, TILE, False)
    elif REST:
        _gradients_of(whole * TILE, g, delta, qkv, logs, gradient, HEADS, WIDTH, LENGTH, TILE, REST, REST, True)
