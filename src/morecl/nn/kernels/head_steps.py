"""An epoch of training of linear heads on frozen features, all steps in one kernel; a program trains one head.

Weights and velocities stay in registers from the first step to the last. See :mod:`morecl.nn.head_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.kernels.compiling import FUSED

SMALLEST = 16  # rows and columns of a product
SHARED_BYTES = 96 * 1024  # of a program; all cards since 2020 have 99 KiB
REGISTER_BYTES = 160 * 1024  # for weights and features, of 256 KiB; velocities may then be spilled


def padded(size: int) -> int:
    """The outputs, or images of a batch, that a program computes for ``size`` of them."""
    return max(SMALLEST, triton.next_power_of_2(size))


def chunks(dim: int, outputs: int) -> tuple[int, int]:
    """How many chunks a feature is divided into, and their size; the last may not be full. A product takes a chunk at
    once: with larger ones it needs too many registers."""
    size = min(64 if padded(outputs) == SMALLEST else 32, padded(dim))
    return triton.cdiv(dim, size), size


def warps(dim: int, outputs: int, batch_size: int) -> int:
    """Warps of a program: with more, each thread holds fewer weights and features."""
    return 4 if (padded(outputs) + padded(batch_size)) * dim <= 2 * SMALLEST * 192 else 8


def fits(outputs: int, dim: int, batch_size: int) -> bool:
    """Whether a program can hold the weights of a head and the features of a batch."""
    count, chunk = chunks(dim, outputs)
    width, rows = padded(outputs), padded(batch_size)
    shared = rows * count * chunk + (chunk + rows) * width  # features, a chunk of the weights, gradients of the outputs
    return 4 * shared <= SHARED_BYTES and 4 * (width + rows) * count * chunk <= REGISTER_BYTES


def epoch(
    x: Tensor, order: Tensor, targets: Tensor, factors: Tensor, state: Sequence[Tensor], lr: float, momentum: float
) -> Tensor:
    """S steps with B images each: x (J, n, D), order (S, B), targets (J, S, B), factors (J, S, B) -> losses (J,).

    A head's loss in a step is the sum of the cross-entropies times their factors; summed over all steps.
    ``state``, which is changed: weights (J, C, D), biases (J, C), and the velocities of both.
    """
    heads, count, dim = x.shape
    steps, size = order.shape
    outputs = state[1].shape[1]
    losses = x.new_empty(heads)
    _epoch[(heads,)](
        x,
        order,
        targets,
        factors,
        *state,
        losses,
        count,
        steps,
        outputs,
        lr,
        momentum,
        dim,
        *chunks(dim, outputs),
        padded(outputs),
        size,
        padded(size),
        momentum != 0,
        num_warps=warps(dim, outputs, size),
        **FUSED,
    )
    return losses


@triton.jit(do_not_specialize=["count", "steps", "C"])
def _epoch(
    x,
    order,
    targets,
    factors,
    weight,
    bias,
    weight_velocity,
    bias_velocity,
    losses,
    count,
    steps,
    C,
    lr,
    momentum,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    MOMENTUM: tl.constexpr,
):
    """All steps of one head. Outputs from C to OUTPUTS have probability 0, rows from B to ROWS have factor 0."""
    head = tl.program_id(0).to(tl.int64)
    x += head * count * D
    targets += head * steps * B
    factors += head * steps * B
    weight += head * C * D
    weight_velocity += head * C * D
    bias += head * C
    bias_velocity += head * C
    c = tl.arange(0, OUTPUTS)
    d = tl.arange(0, CHUNK)
    rows = tl.arange(0, ROWS)
    inside = rows < B

    # w[i], v[i]: (CHUNK, OUTPUTS), transposed, so that threads side by side read numbers side by side
    w = ()
    v = ()
    for i in tl.static_range(CHUNKS):
        place = c[None, :] * D + (i * CHUNK + d)[:, None]
        there = (c < C)[None, :] & (i * CHUNK + d < D)[:, None]
        w = w + (tl.load(weight + place, mask=there, other=0.0),)
        if MOMENTUM:
            v = v + (tl.load(weight_velocity + place, mask=there, other=0.0),)
    b = tl.load(bias + c, mask=c < C, other=float("-inf"))
    u = tl.load(bias_velocity + c, mask=c < C, other=0.0)
    total = tl.zeros((ROWS,), tl.float32)

    # features of the first batch, and places of those of the second: each is loaded a step before it is needed
    row = tl.load(order + rows, mask=inside, other=0).to(tl.int64)
    features = ()
    for i in tl.static_range(CHUNKS):
        known = inside[:, None] & (i * CHUNK + d < D)[None, :]
        features = features + (tl.load(x + row[:, None] * D + (i * CHUNK + d)[None, :], mask=known, other=0.0),)
    row = tl.load(order + B + rows, mask=inside & (steps > 1), other=0).to(tl.int64)

    for step in tl.range(0, steps, num_stages=1):
        at = step * B + rows
        target = tl.load(targets + at, mask=inside, other=0)
        factor = tl.load(factors + at, mask=inside, other=0.0)
        following = ()
        for i in tl.static_range(CHUNKS):
            known = (inside & (step + 1 < steps))[:, None] & (i * CHUNK + d < D)[None, :]
            part = tl.load(x + row[:, None] * D + (i * CHUNK + d)[None, :], mask=known, other=0.0)
            following = following + (part,)
        row = tl.load(order + at + 2 * B, mask=inside & (step + 2 < steps), other=0).to(tl.int64)

        logits = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for i in tl.static_range(CHUNKS):
            logits = tl.dot(features[i], w[i], logits, input_precision="ieee")
        logits += b[None, :]
        chosen = c[None, :] == target[:, None]
        logits -= tl.max(logits, 1)[:, None]
        powers = tl.exp(logits)
        sums = tl.sum(powers, 1)
        total += factor * (tl.log(sums) - tl.sum(tl.where(chosen, logits, 0.0), 1))
        g = (powers / sums[:, None] - tl.where(chosen, 1.0, 0.0)) * factor[:, None]

        gb = tl.sum(g, 0)
        if MOMENTUM:
            u = u * momentum + gb
            gb = u
        b -= lr * gb
        new_w = ()
        new_v = ()
        for i in tl.static_range(CHUNKS):
            gw = tl.dot(tl.trans(features[i]), g, input_precision="ieee")
            if MOMENTUM:
                gw = v[i] * momentum + gw
                new_v = new_v + (gw,)
            new_w = new_w + (w[i] - lr * gw,)
        w = new_w
        v = new_v
        features = following

    for i in tl.static_range(CHUNKS):
        place = c[None, :] * D + (i * CHUNK + d)[:, None]
        there = (c < C)[None, :] & (i * CHUNK + d < D)[:, None]
        tl.store(weight + place, w[i], mask=there)
        if MOMENTUM:
            tl.store(weight_velocity + place, v[i], mask=there)
    tl.store(bias + c, b, mask=c < C)
    if MOMENTUM:
        tl.store(bias_velocity + c, u, mask=c < C)
    tl.store(losses + head, tl.sum(total))
