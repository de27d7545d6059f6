"""Shared by the benchmarks: images, a clock, and a description of the machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

import morecl
from morecl.images import ImageArray
from morecl.methods.base import Learner

CLASSES_PER_TASK = 2


def made_up_images(count: int, seed: int = 0) -> ImageArray:
    """Random uint8 images (count, 32, 32, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of ``work``, after two warm-up runs."""
    return in_turn([work], device, repeats)[0]


def in_turn(works: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Median time of each, after two warm-up runs. They take turns, so that changes of the machine affect all alike."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(2 + repeats):
        for work, taken in zip(works, times, strict=True):
            wait_for(device)
            started = time.perf_counter()
            work()
            wait_for(device)
            if repeat >= 2:
                taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]


@dataclass(kw_only=True)
class Measured:
    """Where and how a record was measured; base class of all records."""

    SCHEMA: ClassVar[str]

    device: str
    precision: str
    compiled: bool
    backbone: str
    image_size: int
    versions: dict[str, str]

    @property
    def headline(self) -> str:
        how = "compiled" if self.compiled else "not compiled"
        return f"{self.backbone} at {self.image_size} px on {self.device}, {self.precision}, {how}"

    def as_dict(self) -> dict[str, Any]:
        return {"schema": self.SCHEMA, **asdict(self)}


def place_of(learner: Learner) -> dict[str, Any]:
    """The fields of :class:`Measured`."""
    device = learner.device
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "precision": str(learner.dtype).removeprefix("torch."),
        "compiled": learner.compiled,
        "backbone": learner.backbone.architecture or learner.backbone.name,
        "image_size": learner.backbone.input.size,
        "versions": {"morecl": morecl.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
