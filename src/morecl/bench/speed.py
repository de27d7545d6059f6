"""Speed of MORE on this machine: training, and its stages and prediction against the number of tasks.

A learner with T tasks is created by growing it without training, which takes no time even for T = 20.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from morecl.bench.common import (
    CLASSES_PER_TASK,
    Measured,
    in_turn,
    made_up_images,
    place_of,
    seconds,
    wait_for,
)
from morecl.bench.prediction import grown
from morecl.bench.start import first_step
from morecl.methods.more import More
from morecl.nn.tokens import Tokens
from morecl.progress import EpochDone


@dataclass(frozen=True)
class SpeedSize:
    """How much the benchmark measures."""

    tasks: tuple[int, ...] = (1, 5, 10, 20)
    images: int = 1024  # per task, in training
    epochs: int = 4
    memory: int = 200
    batch: int = 512  # images per prediction when its throughput is measured
    repeats: int = 20


QUICK_SPEED = SpeedSize(tasks=(1, 5, 10), images=64, epochs=2, memory=20, batch=32, repeats=3)


@dataclass
class AtTasks:
    """Measurements after ``tasks`` tasks; in seconds if not said otherwise."""

    tasks: int
    train_next_task: float
    back_update: float
    latency: float  # one image, from the array to the answer: ``predict``
    latency_uncaptured: float  # the same without a CUDA graph
    latency_together: float  # one image that is prepared, all networks in one pass
    latency_separate: float  # the same, one pass per network
    images_per_second: float  # prediction of a batch, all networks in one pass where the learner does so
    images_per_second_separate: float
    times_plain: float  # ``predict`` of a batch, as a multiple of ``tasks`` forward passes of timm's own network


@dataclass(kw_only=True)
class Bench(Measured):
    """The record of the benchmark."""

    SCHEMA = "morecl.bench/2"

    settings: dict[str, Any]
    first_step_seconds: float  # from the start of a process to the end of its first training step
    matrix_tflops: float
    training_images_per_second: float
    training_gflop_per_image: float
    training_share_of_matrix_rate: float
    peak_memory_bytes: int | None
    at_tasks: list[AtTasks] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print the record as tables."""
        console.print(self.headline)
        console.print(f"a new process has made its first training step after {self.first_step_seconds:.1f} s")
        console.print(
            f"training: {self.training_images_per_second:,.0f} images/s of the task (as many replayed beside them), "
            f"{self.training_gflop_per_image:.2f} GFLOP each, {100 * self.training_share_of_matrix_rate:.0f} % of the "
            f"{self.matrix_tflops:,.1f} TFLOP/s that large matrix products reach here"
        )
        table = Table(box=box.SIMPLE_HEAD)
        for head in (
            "tasks",
            "next task s",
            "back-update s",
            "one image ms",
            "uncaptured",
            "one by one ms",
            "images/s",
            "one by one",
            "times timm",
        ):
            table.add_column(head, justify="right")
        for row in self.at_tasks:
            table.add_row(
                str(row.tasks),
                f"{row.train_next_task:.2f}",
                f"{row.back_update:.2f}",
                f"{1000 * row.latency:.2f}",
                f"{1000 * row.latency_uncaptured:.1f}",
                f"{1000 * row.latency_separate:.1f}",
                f"{row.images_per_second:,.0f}",
                f"{row.images_per_second_separate:,.0f}",
                f"{row.times_plain:.2f}",
            )
        console.print(table)
        if len(self.at_tasks) > 1:
            whole, separate = (1000 * growth(self.at_tasks, name) for name in ("latency", "latency_separate"))
            console.print(f"a further task adds {whole:.2f} ms to the answer for one image ({separate:.2f} one by one)")


def bench(settings: dict[str, Any], size: SpeedSize, report: Callable[[str], None]) -> Bench:
    """Run the benchmark. ``report`` is called with the name of each phase."""
    settings = {"memory_size": size.memory, "epochs": size.epochs} | settings
    images = made_up_images(size.images)
    More.Config.parse(settings)  # a typo is told here, not by a process
    report("first step of a process")
    first = first_step(settings)
    learner = More(More.Config.parse(settings))
    report("matrix products")
    rate = matrix_rate(learner.device, learner.dtype)
    report("training")
    speeds: list[float] = []
    if learner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(learner.device)
    labels = [i % CLASSES_PER_TASK for i in range(size.images)]
    learner.learn_task(images, labels)  # has no memory to replay; the second task is the usual case

    def listen(event: EpochDone) -> None:
        if not event.stage and event.images_per_second is not None:
            speeds.append(event.images_per_second)

    learner.learn_task(images, [f"b{label}" for label in labels], listen)
    speed = statistics.median(speeds[1:] or speeds)
    flop = training_flop(learner)
    result = Bench(
        **place_of(learner),
        settings=learner.config.record(),
        first_step_seconds=first,
        matrix_tflops=rate / 1e12,
        training_images_per_second=speed,
        training_gflop_per_image=flop / 1e9,
        training_share_of_matrix_rate=speed * flop / rate,
        peak_memory_bytes=torch.cuda.max_memory_allocated(learner.device) if learner.device.type == "cuda" else None,
    )
    for tasks in size.tasks:
        report(f"{tasks} tasks")
        result.at_tasks.append(_at_tasks(settings, size, images, tasks))
    return result


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on random data."""
    n = _side(device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device, 5)


def sustained_matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of the same product in the second half of ``seconds`` without a pause.

    Large products take so much power that a GPU soon lowers its clock; :func:`matrix_rate` is over before that.
    """
    n = _side(device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    rates: list[tuple[float, float]] = []  # seconds since the beginning, FLOP/s
    began = time.perf_counter()
    while not rates or rates[-1][0] < seconds:
        started = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b, out=product)
        wait_for(device)
        ended = time.perf_counter()
        rates.append((ended - began, 10 * 2 * n**3 / (ended - started)))
    return statistics.median(rate for at, rate in rates if at >= seconds / 2)


def _side(device: torch.device) -> int:
    """Of the matrices in a large product."""
    return 8192 if device.type == "cuda" else 1024


def growth(rows: Sequence[AtTasks], name: str) -> float:
    """Seconds per additional task: slope of a line fitted to ``name`` against the number of tasks."""
    return float(np.polyfit([row.tasks for row in rows], [getattr(row, name) for row in rows], 1)[0])


def _at_tasks(settings: dict[str, Any], size: SpeedSize, images: np.ndarray, tasks: int) -> AtTasks:
    learner = grown("more", More.Config.parse(settings), tasks)
    learner.memory.images = made_up_images(size.memory)
    learner.memory.columns = np.arange(size.memory) % (CLASSES_PER_TASK * tasks)
    device = learner.device
    one, many = learner.prepare(images[:1]), learner.prepare(np.resize(images, (size.batch, *images.shape[1:])))

    def answers(tokens: Tokens, repeats: int) -> list[float]:
        """Seconds with all networks at once, where the learner does so, and with one network after the other."""

        def together() -> None:
            learner.score(learner.embed_all(tokens))

        def separate() -> None:
            learner.score([learner.embed(tokens, network) for network in learner.networks()])

        return in_turn([together, separate], device, repeats)

    def predicting(captured: bool) -> Callable[[], object]:
        def predict() -> None:
            learner.captured = captured
            learner.predict(images[:1])

        return predict

    captured = learner.captured
    latency, uncaptured = in_turn([predicting(captured), predicting(False)], device, size.repeats)
    learner.captured = captured
    together, separate = answers(one, size.repeats)
    batch, batch_separate = answers(many, max(1, size.repeats // 5))
    times_plain = against_timm(learner, np.resize(images, (size.batch, *images.shape[1:])), max(1, size.repeats // 5))
    before = dict(learner.seconds)
    learner.learn_task(images, [f"new{i % CLASSES_PER_TASK}" for i in range(len(images))])
    return AtTasks(
        tasks=tasks,
        train_next_task=learner.seconds["train"] - before["train"],
        back_update=learner.seconds["back_update"] - before["back_update"],
        latency=latency,
        latency_uncaptured=uncaptured,
        latency_together=together,
        latency_separate=separate,
        images_per_second=size.batch / batch,
        images_per_second_separate=size.batch / batch_separate,
        times_plain=times_plain,
    )


def against_timm(learner: More, images: np.ndarray, repeats: int) -> float:
    """Time of ``learner.predict(images)``, as a multiple of that of as many plain passes as it has networks.

    A plain pass is the forward of timm's unchanged ViT in the learner's precision, on as many images of its input size
    that are on the device already, in the same batches.
    """
    vit, side = copy.deepcopy(learner.backbone.vit).to(learner.device, learner.dtype), learner.backbone.input.size
    pixels = torch.randn(len(images), 3, side, side, device=learner.device).to(learner.dtype)

    @torch.no_grad()
    def plain() -> None:
        for _ in learner.networks():
            for part in pixels.split(learner.eval_batch_size):
                vit(part)

    predict, passes = in_turn([lambda: learner.predict(images), plain], learner.device, repeats)
    return predict / passes


def training_flop(learner: More) -> float:
    """Floating-point operations per training image, forward and backward, counted in a step without our kernels."""
    net, config = learner.tasks[-1], learner.config
    tokens = learner.prepare(made_up_images(8)).range(0, 8)
    with FlopCounterMode(display=False) as counter:
        weights = learner.adapters.weights().under(net.embedding)
        net.head(learner.network.trunk(tokens, net.norms, weights, learner.body, plain=True)).sum().backward()
    learner.model.zero_grad()
    replayed = config.memory_batch_size / config.batch_size
    return counter.get_total_flops() / 8 * (1 + replayed)
