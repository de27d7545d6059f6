"""Time of one back-update: torch's steps as a CUDA graph against the kernel for a whole epoch (nn/head_steps.py).

    python benchmarks/head_steps.py                     # a few minutes, needs an NVIDIA GPU
    python benchmarks/head_steps.py --images 400 --repeats 1

Random features, batches of 16, 10 epochs; the median of several repetitions, after one that compiles. Both ways draw
the same batches; ``differ`` is the largest difference of their weights, relative to the largest weight.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from morecl.nn.head_steps import in_kernel
from morecl.progress import silent
from morecl.random import generator
from morecl.training import ProtectedSGD, equal_batches, fit

HEADS, OUTPUTS, DIMS = (1, 9, 19), (6, 11), (192, 384)
BATCH_SIZE, EPOCHS, LR = 16, 10, 0.001


def back_update(heads: int, outputs: int, dim: int, images: int, *, kernel: bool) -> tuple[float, Tensor]:
    """Seconds of one back-update, and the weights it leaves."""
    device = torch.device("cuda")
    draw = generator(0, "benchmark")
    X = torch.randn(heads, images, dim, generator=draw).to(device)
    y = torch.randint(outputs, (heads, images), generator=draw).to(device)
    share = torch.ones(heads, images, device=device)
    weight = (0.02 * torch.randn(heads, outputs, dim, generator=draw)).to(device).requires_grad_()
    bias = torch.zeros(heads, outputs, device=device, requires_grad=True)
    optimizer = ProtectedSGD([weight, bias], LR, 0.0)

    def loss(index: Tensor, w: Tensor) -> Tensor:
        logits = torch.baddbmm(bias[:, None], X[:, index], weight.mT)
        errors = F.cross_entropy(logits.flatten(0, 1), y[:, index].flatten(), reduction="none")
        return (errors.view(heads, -1) * share[:, index] * w).sum() / w.sum()

    whole = in_kernel(X, y, share, optimizer.tensors(), lr=LR, momentum=0.0, batch_size=BATCH_SIZE)
    if kernel and whole is None:
        raise SystemExit("the kernel cannot be used here: it needs Triton and an NVIDIA GPU")
    torch.cuda.synchronize()
    started = time.perf_counter()
    fit(
        loss,
        lambda epoch: equal_batches(images, BATCH_SIZE, draw, device, fill=True),
        optimizer,
        epochs=EPOCHS,
        task=0,
        images=None,
        listener=silent,
        capture=True,
        whole=whole if kernel else None,
    )
    torch.cuda.synchronize()
    return time.perf_counter() - started, weight.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    steps = EPOCHS * -(-chosen.images // BATCH_SIZE)
    print(f"{torch.cuda.get_device_name()}, {chosen.images} images, {steps} steps")
    print("heads outputs dims   torch s  kernel s  times   kernel us/step   differ")
    for dim, outputs, heads in itertools.product(DIMS, OUTPUTS, HEADS):
        seconds, weights = [], []
        for kernel in (False, True):
            runs = [back_update(heads, outputs, dim, chosen.images, kernel=kernel) for _ in range(1 + chosen.repeats)]
            seconds.append(statistics.median(time for time, _ in runs[1:]))
            weights.append(runs[-1][1])
        plain, fast = seconds
        differ = float((weights[1] - weights[0]).abs().max() / weights[0].abs().max())
        print(
            f"{heads:5} {outputs:7} {dim:4}  {plain:8.3f}  {fast:8.4f}  {plain / fast:5.0f}  "
            f"{1e6 * fast / steps:15.2f}  {differ:7.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
