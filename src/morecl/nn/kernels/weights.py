"""What surrounds the blocks: the adapters' weights under masks, in half precision, and the gradients' parts added up.

With masks m1 (A, K) and m2 (A, D) side by side, (A, K + D), the blocks use ``W1' = m1 W1``, ``b1' = m1 b1``,
``W2' = m2 W2``, ``b2' = m2 b2`` (rows; :mod:`morecl.nn.adapter`). From the gradients of these, ``dW1 = m1 dW1'`` and
``dm1 = sum(W1 dW1') + b1 db1'`` over each row, and the same for the others. All of it is little work; torch would take
some fifty kernels for it, each of which a GPU needs longer to start than to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.adapter import AdapterWeights
from morecl.nn.kernels.compiling import FUSED

BLOCK = 1024  # numbers per program; a divisor of K D for all supported adapters
ADDED = 8  # parts that are added at once
NORM_ADDED = 32
CHUNK = 64  # dimensions of a norm per program


class Parts:
    """Room for sums over parts of the tokens: of ``count`` weights, of which the last ``late`` see fewer tokens.

    ``shape``, ``late_shape``: the number of parts and the shape of one weight's sum.
    """

    def __init__(self, like: Tensor, count: int, late: int, shape: tuple[int, ...], late_shape: tuple[int, ...]):
        self.count, self.early = count, count - late
        self.parts, self.late_parts = shape[0], late_shape[0]
        early = torch.Size((self.early, *shape))
        late_size = torch.Size((late, *late_shape))
        self.sums = like.new_empty(early.numel() + late_size.numel())
        first, last = self.sums.split([early.numel(), late_size.numel()])
        self.of = [*first.view(early).unbind(), *last.view(late_size).unbind()]  # the parts of each weight


def under_masks(adapters: AdapterWeights, masks: Tensor, dtype: torch.dtype) -> AdapterWeights:
    """The weights of A adapters under the masks (A, K + D), rounded to ``dtype``."""
    count, k, dim = adapters.w1.shape
    made = AdapterWeights(*(torch.empty(part.shape, dtype=dtype, device=part.device) for part in adapters))
    _under_masks[(count, k * dim // BLOCK)](
        *adapters, masks, *made, dim, k, BLOCK, triton.next_power_of_2(max(dim, k)), **FUSED
    )
    return made


def norm_totals(parts: Parts, dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of the norms' weights and biases (A + 1, D), from sums (2, D) over parts of the tokens."""
    d_weight, d_bias = (parts.sums.new_empty(parts.count, dim) for _ in range(2))
    _norm_totals[(parts.count, dim // CHUNK, 2)](
        parts.sums, d_weight, d_bias, parts.early, parts.parts, parts.late_parts, dim, CHUNK, NORM_ADDED, **FUSED
    )
    return d_weight, d_bias


def adapter_totals(
    parts: Parts, biases: Tensor, adapters: AdapterWeights, masks: Tensor | None
) -> tuple[AdapterWeights, Tensor | None]:
    """Gradients of the adapters and, if there are masks (A, K + D), of these.

    Args:
        parts: sums over parts of the tokens, as :func:`morecl.nn.kernels.adapter.gradients` writes them.
        biases: (A, D), the frozen ones before each adapter, which its input there does not contain.
        adapters: the weights without masks, float32.
    """
    count, k, dim = adapters.w1.shape
    made = AdapterWeights(*(torch.empty_like(part) for part in adapters))
    d_masks = None if masks is None else torch.empty_like(masks)
    at, d_at = (biases, biases) if masks is None or d_masks is None else (masks, d_masks)  # else neither is used
    rows = BLOCK // k
    _adapter_totals[(count, dim // rows + k)](
        parts.sums, biases, *adapters, at, *made, d_at, parts.early, parts.parts, parts.late_parts,
        dim, k, rows, triton.next_power_of_2(dim), ADDED, masks is not None, **FUSED,
    )  # fmt: skip
    return made, d_masks


@triton.jit
def _under_masks(
    w1,
    b1,
    w2,
    b2,
    masks,
    w1_out,
    b1_out,
    w2_out,
    b2_out,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEST: tl.constexpr,
):
    """A block of W1' and W2' of one adapter; the first program also writes its biases."""
    half: tl.constexpr = w1_out.dtype.element_ty
    place = tl.program_id(0)
    masks += place * (K + D)
    within = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = place * (K * D) + within
    tl.store(w1_out + at, (tl.load(masks + within // D) * tl.load(w1 + at)).to(half))
    tl.store(w2_out + at, (tl.load(masks + K + within // K) * tl.load(w2 + at)).to(half))
    if tl.program_id(1) == 0:
        i = tl.arange(0, WIDEST)
        bias = tl.load(masks + i, mask=i < K) * tl.load(b1 + place * K + i, mask=i < K)
        tl.store(b1_out + place * K + i, bias.to(half), mask=i < K)
        bias = tl.load(masks + K + i, mask=i < D) * tl.load(b2 + place * D + i, mask=i < D)
        tl.store(b2_out + place * D + i, bias.to(half), mask=i < D)


@triton.jit
def _parts_of(place, sums, early, parts, late_parts, SIZE: tl.constexpr):
    """Where the parts of a weight begin, and how many there are. Each has SIZE numbers."""
    late = tl.maximum(place - early, 0).to(tl.int64)
    before = tl.minimum(place, early).to(tl.int64) * parts + late * late_parts
    return sums + before * SIZE, tl.where(place < early, parts, late_parts)


@triton.jit
def _sum(first, parts, offset, inside, SIZE: tl.constexpr, ADDED: tl.constexpr):
    """The sum over all parts at ``offset``, in a fixed order."""
    total = tl.zeros(offset.shape, tl.float32)
    part = tl.arange(0, ADDED)[:, None]
    left = parts
    while left > 0:  # Triton's interpreter cannot count to a number that is not constant
        value = tl.load(first + part * SIZE + offset[None, :], mask=(part < parts) & inside[None, :], other=0.0)
        total += tl.sum(value, 0)
        part += ADDED
        left -= ADDED
    return total


@triton.jit(do_not_specialize=["early", "parts", "late_parts"])
def _norm_totals(
    sums, d_weight, d_bias, early, parts, late_parts, D: tl.constexpr, CHUNK: tl.constexpr, ADDED: tl.constexpr
):
    """A chunk of the gradient of one norm's weight, or of its bias."""
    place = tl.program_id(0)
    is_bias = tl.program_id(2)
    first, parts = _parts_of(place, sums, early, parts, late_parts, 2 * D)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    total = _sum(first, parts, is_bias * D + d, d < D, 2 * D, ADDED)
    tl.store((d_bias if is_bias else d_weight) + place * D + d, total)


@triton.jit(do_not_specialize=["early", "parts", "late_parts"])
def _adapter_totals(
    sums,
    biases,
    w1,
    b1,
    w2,
    b2,
    masks,
    d_w1,
    d_b1,
    d_w2,
    d_b2,
    d_masks,
    early,
    parts,
    late_parts,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """ROWS rows of the gradient of one adapter's W2, or one row of that of its W1."""
    place = tl.program_id(0)
    size: tl.constexpr = 2 * D * K + D + K
    first, parts = _parts_of(place, sums, early, parts, late_parts, size)
    matrix = place * (D * K)
    if tl.program_id(1) < D // ROWS:
        begin = tl.program_id(1) * ROWS
        _second(
            first, parts, begin, w2 + matrix, b2 + place * D, masks + place * (K + D) + K,
            d_w2 + matrix, d_b2 + place * D, d_masks + place * (K + D) + K, D, K, ROWS, ADDED, MASKED,
        )  # fmt: skip
    else:
        k = tl.program_id(1) - D // ROWS
        _first(
            first, parts, k, biases + place * D, w1 + matrix, b1 + place * K, masks + place * (K + D),
            d_w1 + matrix, d_b1 + place * K, d_masks + place * (K + D), D, K, WIDTH, ADDED, MASKED,
        )  # fmt: skip


@triton.jit
def _second(
    first,
    parts,
    begin,
    w2,
    b2,
    masks,
    d_w2,
    d_b2,
    d_masks,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """ROWS rows of the gradients of W2, b2 and m2."""
    size: tl.constexpr = 2 * D * K + D + K
    within = begin * K + tl.arange(0, ROWS * K)
    row = begin + tl.arange(0, ROWS)
    weight = _sum(first, parts, within, within < D * K, size, ADDED)
    bias = _sum(first, parts, 2 * D * K + row, row < D, size, ADDED)
    if MASKED:
        at = row[:, None] * K + tl.arange(0, K)[None, :]
        along = tl.sum(tl.reshape(weight, (ROWS, K)) * tl.load(w2 + at), 1) + bias * tl.load(b2 + row)
        tl.store(d_masks + row, along)
        weight *= tl.load(masks + within // K)
        bias *= tl.load(masks + row)
    tl.store(d_w2 + within, weight)
    tl.store(d_b2 + row, bias)


@triton.jit
def _first(
    first,
    parts,
    k,
    biases,
    w1,
    b1,
    masks,
    d_w1,
    d_b1,
    d_masks,
    D: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Row k of the gradients of W1, b1 and m1."""
    size: tl.constexpr = 2 * D * K + D + K
    d = tl.arange(0, WIDTH)
    one = k + tl.arange(0, 1)
    bias = _sum(first, parts, 2 * D * K + D + one, one < K, size, ADDED)
    weight = _sum(first, parts, D * K + k * D + d, d < D, size, ADDED)
    weight += bias * tl.load(biases + d, mask=d < D, other=0.0).to(tl.float32)
    if MASKED:
        own = tl.load(w1 + k * D + d, mask=d < D, other=0.0)
        tl.store(d_masks + one, tl.sum(weight * own, 0) + bias * tl.load(b1 + one))
        mask = tl.load(masks + one)
        weight *= mask
        bias *= mask
    tl.store(d_w1 + k * D + d, weight, mask=d < D)
    tl.store(d_b1 + one, bias)
