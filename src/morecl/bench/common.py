"""What the benchmarks share: images, a clock, and where they were measured."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import morecl
from morecl.images import ImageArray
from morecl.methods.base import Learner

CLASSES_PER_TASK = 2


def made_up_images(count: int, seed: int = 0) -> ImageArray:
    """uint8 (count, 32, 32, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def wait_for(device: torch.device) -> None:
    """Until all that was asked of ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of ``work`` after two runs to warm up."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def backbone_name(learner: Learner) -> str:
    return learner.backbone.architecture or learner.backbone.name


def precision_name(learner: Learner) -> str:
    return str(learner.dtype).removeprefix("torch.")


def versions() -> dict[str, str]:
    return {"morecl": morecl.__version__, "torch": torch.__version__, "python": platform.python_version()}
