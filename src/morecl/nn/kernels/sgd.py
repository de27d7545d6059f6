"""A step of SGD with gated updates for several tensors in one kernel, see :class:`morecl.training.ProtectedSGD`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from morecl.nn.kernels.compiling import FUSED

BLOCK = 1024  # numbers per program
MOST = 16  # tensors in one launch
LARGEST = 2**31 - BLOCK  # numbers in a tensor


def sizes_of(parameters: Sequence[Tensor]) -> Tensor:
    """How many numbers each tensor has, for :func:`step`. On the device, so that as many tensors of other sizes need no
    other kernel."""
    return torch.tensor([p.numel() for p in parameters], dtype=torch.int32, device=parameters[0].device)


def step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    gates: Sequence[Tensor],
    sizes: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Change parameters and velocities in place; ``gates`` are those of the first parameters. All are contiguous."""
    with torch.cuda.device_of(parameters[0]):  # Triton launches on the current device
        _steps[(sum(triton.cdiv(parameter.numel(), BLOCK) for parameter in parameters),)](
            tuple(parameters), tuple(gradients), tuple(velocities), tuple(gates) or (parameters[0],), sizes,
            lr, momentum, weight_decay, len(parameters), len(gates), nesterov, BLOCK, **FUSED,
        )  # fmt: skip


@triton.jit
def _steps(
    parameters,
    gradients,
    velocities,
    gates,
    sizes,
    lr,
    momentum,
    weight_decay,
    COUNT: tl.constexpr,
    GATED: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one of the tensors."""
    block = tl.program_id(0)
    for i in tl.static_range(COUNT):
        size = tl.load(sizes + i)
        blocks = (size + BLOCK - 1) // BLOCK
        if (block >= 0) & (block < blocks):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            value = tl.load(parameters[i] + at, mask=inside)
            gradient = tl.load(gradients[i] + at, mask=inside) + weight_decay * value
            velocity = momentum * tl.load(velocities[i] + at, mask=inside) + gradient
            tl.store(velocities[i] + at, velocity, mask=inside)
            update = velocity
            if NESTEROV:
                update = gradient + momentum * velocity
            if i < GATED:
                update *= tl.load(gates[i] + at, mask=inside)
            tl.store(parameters[i] + at, value - lr * update, mask=inside)
        block -= blocks
