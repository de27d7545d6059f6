"""Where the time of one training step of MORE goes, compared with the time of its arithmetic alone."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from morecl.bench.common import (
    CLASSES_PER_TASK,
    Measured,
    made_up_images,
    place_of,
    seconds,
)
from morecl.bench.speed import matrix_rate, sustained_matrix_rate, training_flop
from morecl.errors import InputError
from morecl.methods.more import More
from morecl.progress import EpochDone

# the first pattern found in a kernel's name decides; names are those of cuDNN, cuBLAS, torch.compile, ATen and our own
GROUPS = {
    "attention": r"_attend|sdpa|flash|fmha|attention|cudnn::fusion",
    "GELU": r"gelu|exp2",
    "products with GELU": r"^_mlp",
    "adapters": r"_adapt",
    "matrix products": r"gemm|nvjet|cutlass|splitk|cublas|::(add|b|bad{1,2}b)?mm|mkldnn|mkl_|::linear|gemv|dot_kernel",
    "norms, sums, activations": r"^triton_|norm",
    "copies": r"memcpy|memset|copy",
    "the rest": r"",
}
SUSTAINED_SECONDS = 4.0  # a GPU under full load has lowered its clock by then
EPOCHS = 3  # the first captures the step, the second is timed, the third profiled


@dataclass(frozen=True)
class ProfileSize:
    """How much the profile measures."""

    images: int = 640  # per task
    settings: dict[str, Any] = field(default_factory=lambda: {"memory_size": 200})


QUICK_PROFILE = ProfileSize(images=32, settings={"memory_size": 16, "batch_size": 8, "memory_batch_size": 8})


@dataclass(frozen=True)
class Kernel:
    """A kernel (on a CPU: an operation) and its time and number of calls in one step."""

    name: str
    microseconds: float
    calls: float


@dataclass(kw_only=True)
class StepProfile(Measured):
    """The record of the profile."""

    SCHEMA = "morecl.profile/1"

    settings: dict[str, Any]
    images: int  # per step, including replayed ones
    step_microseconds: float  # wall time, without the profiler
    matrix_tflops: float
    copy_gigabytes_per_second: float
    arithmetic_microseconds: float  # time of the step's operations at that matrix rate
    sustained_matrix_tflops: float | None  # after seconds without a pause; None on a CPU
    sustained_step_microseconds: float | None
    groups: list[Kernel]
    kernels: list[Kernel]  # the longest first

    def show(self, console: Console) -> None:
        """Print the record as tables."""
        console.print(self.headline)
        console.print(
            f"a training step of {self.images} images takes {self.step_microseconds:,.0f} us; its arithmetic alone "
            f"{self.arithmetic_microseconds:,.0f} us at the {self.matrix_tflops:,.1f} TFLOP/s of large matrix products"
        )
        if self.sustained_matrix_tflops and self.sustained_step_microseconds:
            rate, took = self.sustained_matrix_tflops, self.sustained_step_microseconds
            reached = 100 * self.arithmetic_microseconds / took  # of the rate above, percent
            console.print(
                f"after {SUSTAINED_SECONDS / 2:.0f} s without a pause, steps take {took:,.0f} us and products reach "
                f"{rate:,.1f} TFLOP/s: {reached * self.matrix_tflops / rate:.1f} % of that rate "
                f"({reached:.1f} % of the one above)"
            )
        console.print(f"large copies reach {self.copy_gigabytes_per_second:,.0f} GB/s, bytes read and written")
        for title, rows in (("by kind", self.groups), ("longest", self.kernels[:20])):
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column(title, no_wrap=True, max_width=60)
            for head in ("us a step", "calls", "share"):
                table.add_column(head, justify="right")
            busy = sum(kernel.microseconds for kernel in self.groups)
            for row in rows:
                share = f"{100 * row.microseconds / busy:.1f} %"
                table.add_row(row.name, f"{row.microseconds:,.1f}", f"{row.calls:.1f}", share)
            console.print(table)


def measure(settings: dict[str, Any], size: ProfileSize, report: Callable[[str], None]) -> StepProfile:
    """Profile the steps of a second task, which replays the first. ``report`` is called with the name of each phase."""
    if "epochs" in settings:
        raise InputError(f"a profile is made of {EPOCHS} epochs; epochs cannot be set")
    learner = More(More.Config.parse({**size.settings, **settings, "epochs": EPOCHS}))
    device, config = learner.device, learner.config
    images = made_up_images(size.images)
    steps = math.ceil(size.images / config.batch_size)
    on_gpu = device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else the profiler prints that a machine has no GPU
    speeds: list[float] = []

    def listen(event: EpochDone) -> None:
        if event.stage or event.images_per_second is None:
            return
        if event.epoch == 2:
            speeds.append(event.images_per_second)
            profiler.start()
        elif event.epoch == 3:
            profiler.stop()

    for task in range(2):
        report(f"task {task + 1} of 2")
        labels = [f"{task}-{i % CLASSES_PER_TASK}" for i in range(size.images)]
        learner.learn_task(images, labels, listen if task else lambda _: None)
    step = size.images / speeds[0] / steps
    report("matrix products and copies")
    rate, copied = matrix_rate(device, learner.dtype), copy_rate(device)
    if on_gpu:  # last: it lowers the clock
        report(f"{2 * SUSTAINED_SECONDS:.0f} s under load")
        sustained_step = _sustained_step(settings, size, step * steps)
        sustained_rate = sustained_matrix_rate(device, learner.dtype, SUSTAINED_SECONDS)
    flop = training_flop(learner) * config.batch_size
    time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [Kernel(e.key, getattr(e, time) / steps, e.count / steps) for e in profiler.key_averages()]
    kernels = sorted((k for k in found if k.microseconds > 0), key=lambda k: -k.microseconds)
    return StepProfile(
        **place_of(learner),
        settings=config.record(),
        images=config.batch_size + config.memory_batch_size,
        step_microseconds=1e6 * step,
        matrix_tflops=rate / 1e12,
        copy_gigabytes_per_second=copied / 1e9,
        arithmetic_microseconds=1e6 * flop / rate,
        sustained_matrix_tflops=sustained_rate / 1e12 if on_gpu else None,
        sustained_step_microseconds=1e6 * sustained_step if on_gpu else None,
        groups=grouped(kernels),
        kernels=kernels[:60],
    )


def _sustained_step(settings: dict[str, Any], size: ProfileSize, epoch_seconds: float) -> float:
    """Seconds of a step of the second task, in the second half of :data:`SUSTAINED_SECONDS` of training."""
    epochs = 2 * math.ceil(SUSTAINED_SECONDS / epoch_seconds / 2)
    learner = More(More.Config.parse({**size.settings, **settings, "epochs": epochs}))
    images, per_step = made_up_images(size.images), math.ceil(size.images / learner.config.batch_size)
    speeds: list[float] = []

    def listen(event: EpochDone) -> None:
        if not event.stage and event.images_per_second is not None:
            speeds.append(event.images_per_second)

    for task in range(2):
        speeds.clear()
        learner.learn_task(images, [f"{task}-{i % CLASSES_PER_TASK}" for i in range(size.images)], listen)
    return size.images / statistics.median(speeds[epochs // 2 :]) / per_step


def grouped(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The kernels summed by :data:`GROUPS`, the longest first."""
    sums = dict.fromkeys(GROUPS, (0.0, 0.0))
    for kernel in kernels:
        kind = next(kind for kind, pattern in GROUPS.items() if re.search(pattern, kernel.name, re.IGNORECASE))
        microseconds, calls = sums[kind]
        sums[kind] = microseconds + kernel.microseconds, calls + kernel.calls
    return sorted((Kernel(kind, *total) for kind, total in sums.items()), key=lambda k: -k.microseconds)


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a large copy, counting reads and writes."""
    count = 2**30 if device.type == "cuda" else 2**26
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * count / seconds(lambda: target.copy_(source), device, 5)
