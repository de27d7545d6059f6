"""Linear heads trained on frozen features on a GPU, a whole epoch in one kernel.

A step of SGD with 16 images is so little work that a GPU waits for the launches of its kernels, even if they are
replayed as a CUDA graph. The heads do not depend on each other, so one program per head takes all steps of an epoch
and keeps its weights in registers. It computes in float32 throughout, as torch does without TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from morecl.nn.capture import Batch
from morecl.nn.fused import AVAILABLE, supports_device

if AVAILABLE:
    from morecl.nn.kernels import head_steps as kernels


def fits(widest: int, dim: int, batch_size: int) -> bool:
    """Whether the kernel can train heads of up to ``widest`` outputs on ``dim`` features."""
    return AVAILABLE and kernels.fits(widest, dim, batch_size)


def in_kernel(
    X: Tensor, y: Tensor, share: Tensor, state: Sequence[Tensor], *, lr: float, momentum: float, batch_size: int
) -> Callable[[Iterable[Batch]], tuple[Tensor, int]] | None:
    """A function that takes the steps of an epoch, for :func:`morecl.training.fit`; ``None`` where it cannot be used.

    It minimises the sum over heads of ``sum(share w errors) / sum(w)``, with the cross-entropies ``errors`` of a batch
    ``(index (B,), w (B,))``. All batches must be equally large; the last may be smaller.

    Args:
        X: features (J, n, D) of J heads; y: targets (J, n); share: weights of the samples (J, n).
        state: weights (J, C, D), biases (J, C) and their velocities, which the steps change in place.
        lr, momentum: v <- momentum v + g;  p <- p - lr v.
    """
    if not supports_device(X.device) or not fits(state[1].shape[1], X.shape[2], batch_size):
        return None
    return lambda batches: run_epoch(X, y, share, state, lr, momentum, batches)


def run_epoch(
    X: Tensor,
    y: Tensor,
    share: Tensor,
    state: Sequence[Tensor],
    lr: float,
    momentum: float,
    batches: Iterable[Batch],
) -> tuple[Tensor, int]:
    """Take one step per batch; return the sum of their losses over steps and heads, and the number of steps."""
    indices, weights = zip(*batches, strict=True)
    steps, size = len(indices), len(indices[0])
    order, weight = torch.cat(indices), torch.cat(weights)
    missing = (0, steps * size - len(order))  # the last batch is filled up with images of weight 0
    order, weight = F.pad(order, missing).view(steps, size), F.pad(weight, missing).view(steps, size)
    factors = share[:, order] * (weight / weight.sum(1, keepdim=True))  # (J, S, B)
    with torch.cuda.device_of(X):  # Triton launches on the current device
        losses = kernels.epoch(X, order.int(), y[:, order].int(), factors, state, lr, momentum)
    return losses.sum(), steps
