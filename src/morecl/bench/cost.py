"""Cost of learning a task with each method: time per pass through the network, and memory per task.

Methods differ in how many passes they need (replay, distillation, rotations); that is a property of the method. The
benchmark checks the cost of a pass: each method learns a stream of equal tasks, and in the last one

    overhead = (seconds / passes) / (seconds of finetune / passes of finetune)

should be at most :data:`LIMIT`. Passes are counted, not declared. An image that goes through the network with gradients
is one pass; without gradients it is a third of one, as the backward pass costs about twice the forward pass. A batch
smaller than those of finetune (HAL's anchors: one per class) counts as a full one: a GPU takes about as long for it.
Passes outside of epochs (a teacher's outputs, herding, statistics, anchors) count as well.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor

from morecl.bench.common import (
    CLASSES_PER_TASK,
    Measured,
    made_up_images,
    place_of,
    wait_for,
)
from morecl.config import SgdConfig
from morecl.errors import unknown_name
from morecl.methods import METHODS, Learner, method_class
from morecl.methods.finetune import Finetune
from morecl.nn.backbone import Backbone
from morecl.nn.device import resolve_device
from morecl.nn.network import AdaptedViT
from morecl.pictures import Pictures

LIMIT = 1.5
FORWARD_SHARE = 1 / 3  # cost of a forward pass, relative to forward and backward
REFERENCE = Finetune.name
ALL = "all"


@dataclass(frozen=True)
class CostSize:
    """How much the benchmark measures. ``settings`` apply to the methods that have them."""

    tasks: int = 4
    images: int = 1024  # per task
    repeats: int = 3  # of the last task; the fastest counts, as other load can only add time
    settings: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 4, "memory_size": 200})


QUICK_COST = CostSize(
    tasks=3,
    images=32,
    repeats=2,
    settings={
        "epochs": 2,
        "batch_size": 16,
        "memory_size": 24,
        "memory_batch_size": 16,
        "balanced_epochs": 2,  # stages of fixed length would take most of the time
        "anchor_steps": 5,
        "back_update_epochs": 2,
    },
)


@dataclass
class Passes:
    """Number of images that went through a network; an image counts every time."""

    with_gradient: int = 0
    without_gradient: int = 0
    filling: float = 0  # passes that small batches count in addition to their images

    @property
    def images(self) -> float:
        return self.with_gradient + FORWARD_SHARE * self.without_gradient

    @property
    def total(self) -> float:
        return self.images + self.filling


@dataclass
class AfterTask:
    """Bytes in use after a task. On a CPU, which does not count its memory, only ``kept``.

    Allocated memory is counted relative to before the learner was created, so without the backbone.
    """

    kept: int  # the learner's state, replay memory included
    kept_on_device: int | None
    allocated: int | None
    allocated_asked: int | None  # after one prediction, so with what is cached for it
    peak: int | None  # maximum while the task was learned


@dataclass
class MethodCost:
    """Cost of learning the last task."""

    method: str
    settings: dict[str, Any]
    image_passes: Passes
    passes: float  # per image of the task and epoch
    seconds: float
    finetune_seconds: float  # measured alternately with the above
    overhead: float
    image_overhead: float  # the same without counting small batches as full ones
    after_task: list[AfterTask]

    def growth(self, name: str) -> float | None:
        """Bytes per additional task; ``name`` is a field of :class:`AfterTask`."""
        first, last = getattr(self.after_task[0], name), getattr(self.after_task[-1], name)
        return None if first is None else (last - first) / (len(self.after_task) - 1)


@dataclass(kw_only=True)
class Costs(Measured):
    """The record of the benchmark."""

    SCHEMA = "morecl.cost/2"

    tasks: int
    images: int
    limit: float = LIMIT
    methods: list[MethodCost] = field(default_factory=list)

    def above(self) -> list[str]:
        """The methods whose overhead exceeds the limit."""
        return [cost.method for cost in self.methods if cost.overhead > self.limit]

    def show(self, console: Console) -> None:
        """Print the record as a table."""
        console.print(f"{self.headline}; {self.tasks} tasks of {self.images} images")
        on_device = self.methods[0].after_task[0].allocated is not None
        heads = ["passes", "seconds", "overhead", "by image", "keeps"]
        heads += ["on device", "allocated", "asked", "peak, task 1", f"task {self.tasks}"] if on_device else []
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", style="bold")
        for head in heads:
            table.add_column(head, justify="right")
        for cost in self.methods:
            high = cost.overhead > self.limit
            cells = [f"{cost.passes:.2f}", f"{cost.seconds:.2f}", f"{cost.overhead:.2f}{' !' if high else '  '}"]
            cells += [f"{cost.image_overhead:.2f}", _size(cost.growth("kept"))]
            if on_device:
                cells += [_size(cost.growth(name)) for name in ("kept_on_device", "allocated", "allocated_asked")]
                cells += [_size(cost.after_task[k].peak) for k in (0, -1)]
            table.add_row(cost.method, *cells, style="red" if high else None)
        console.print(table)
        console.print("passes: forward and backward, per image of the task and epoch; forward alone counts 1/3,")
        console.print(f"a batch smaller than those of {REFERENCE} counts as a full one")
        console.print(f"overhead: seconds per pass, relative to {REFERENCE}; should be at most {self.limit}")
        console.print("by image: the same, but small batches count by their images")
        memory = "keeps: bytes per additional task"
        if on_device:
            memory += "; on device: the part of it on the device; allocated: in use there; asked: after a prediction"
        console.print(memory)
        if self.above():
            console.print(f"[red]! above {self.limit}:[/red] {', '.join(self.above())}")


def method_names(text: str) -> list[str]:
    """The methods in ``"all"`` or ``"more,derpp"``, without duplicates."""
    if text == ALL:
        return list(METHODS)
    return [method_class(name.strip()).name for name in dict.fromkeys(text.split(","))]


def measure(
    methods: Sequence[str], settings: Mapping[str, Any], size: CostSize, report: Callable[[str], None]
) -> Costs:
    """Measure ``methods``, always with :data:`REFERENCE` first. ``report`` is called with the name of each phase.

    ``settings`` apply to every method that has them, and override those of ``size``.
    """
    configs = _configs([REFERENCE, *methods], settings, size)
    batch = configs[REFERENCE].batch_size
    report(f"{REFERENCE}, for comparison")
    reference = _Stream(REFERENCE, configs[REFERENCE], size, batch)
    reference.run()
    learner = reference.learner
    result = Costs(
        **place_of(learner),
        tasks=size.tasks,
        images=size.images,
    )
    reference_passes = reference.passes()
    for number, (method, config) in enumerate(configs.items(), 1):
        report(f"{method}, {number} of {len(configs)}")
        # the stream has no name, so that it is freed before the next one counts memory
        result.methods.append(
            _cost(_Stream(method, config, size, batch, learner.backbone), reference, reference_passes)
        )
    return result


def _cost(stream: _Stream, reference: _Stream, reference_passes: Passes) -> MethodCost:
    config, size = stream.learner.config, stream.size
    after = stream.run()
    passes = stream.passes()
    times = [(stream.again(), reference.again()) for _ in range(size.repeats)]
    seconds, finetune_seconds = (min(side) for side in zip(*times, strict=True))
    return MethodCost(
        method=stream.learner.name,
        settings=config.record(),
        image_passes=passes,
        passes=passes.total / (size.images * (config.epochs if config.trains else 1)),
        seconds=seconds,
        finetune_seconds=finetune_seconds,
        overhead=(seconds / passes.total) / (finetune_seconds / reference_passes.total),
        image_overhead=(seconds / passes.images) / (finetune_seconds / reference_passes.images),
        after_task=after,
    )


@contextmanager
def counting(network: AdaptedViT, batch: int = 1) -> Iterator[Passes]:
    """Count the images that go through ``network``; fewer than ``batch`` at once count as ``batch``.

    Replayed CUDA graphs run no Python and are not counted.
    """
    passes = Passes()

    def count(features: Tensor) -> None:
        images = len(features)
        missing = max(0, batch - images)
        if features.requires_grad:
            passes.with_gradient += images
            passes.filling += missing
        else:
            passes.without_gradient += images
            passes.filling += missing * FORWARD_SHARE

    with network.observe_features(count):
        yield passes


class _Stream:
    """A learner and its stream of tasks, the last of which can be learned repeatedly."""

    def __init__(self, method: str, config: SgdConfig, size: CostSize, batch: int, backbone: Backbone | None = None):
        """``batch``: smaller batches count as this many images."""
        self.size = size
        self.batch = batch
        self._start = _allocated(resolve_device(config.device))
        self.learner: Learner = method_class(method)(config, backbone)
        self._before_last: dict[str, Tensor] = {}
        self._unread_before_last: Pictures | None = None
        self._passes = Passes()

    def run(self) -> list[AfterTask]:
        """Learn all tasks."""
        after = []
        for _ in range(self.size.tasks):
            self._before_last = {key: value.detach().cpu().clone() for key, value in self.learner.state().items()}
            self._unread_before_last = self.learner.memory.unread
            with counting(self.learner.network, self.batch) as self._passes:
                self._learn(self.learner)
            after.append(self._after_task())
        return after

    def again(self) -> float:
        """Learn the last task again, from the same state; seconds."""
        return self._learn_last(self.learner)

    def passes(self) -> Passes:
        """Passes of the last task. Those of compiled code are counted with an uncompiled learner."""
        learner = self.learner
        if not learner.compiled:
            return self._passes
        plain = type(learner)(learner.config.model_copy(update={"compile": "off"}), learner.backbone)
        with counting(plain.network, self.batch) as passes:
            self._learn_last(plain)
        return passes

    def _learn_last(self, learner: Learner) -> float:
        classes, task_sizes = self.learner.classes[:-CLASSES_PER_TASK], self.learner.task_sizes[:-1]
        learner.restore(classes, task_sizes, self._before_last, self._unread_before_last)
        return self._learn(learner)

    def _learn(self, learner: Learner) -> float:
        task, device = len(learner.task_sizes), learner.device
        images = made_up_images(self.size.images, seed=task)
        labels = [f"{task}-{i % CLASSES_PER_TASK}" for i in range(len(images))]
        if device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats(device)
        learner.checked_images = 0  # their forward passes are no part of a method
        wait_for(device)
        started = time.perf_counter()
        learner.learn_task(images, labels)
        wait_for(device)
        return time.perf_counter() - started

    def _after_task(self) -> AfterTask:
        learner, device = self.learner, self.learner.device
        kept = [(value.nbytes, value.device.type) for value in learner.state().values()]  # not held: some are made anew
        unread = learner.memory.unread.nbytes if learner.memory.unread is not None else 0
        result = AfterTask(sum(size for size, _ in kept) + unread, None, None, None, None)
        if device.type == "cuda":
            result.peak = torch.cuda.max_memory_allocated(device) - self._start
            result.kept_on_device = sum(size for size, place in kept if place == "cuda")
            result.allocated = _allocated(device) - self._start
            learner.scores(made_up_images(1))
            result.allocated_asked = _allocated(device) - self._start
        return result


def _configs(methods: Sequence[str], settings: Mapping[str, Any], size: CostSize) -> dict[str, SgdConfig]:
    classes = {name: method_class(name).Config for name in methods}
    known = {key for config in classes.values() for key in config.model_fields}
    for key in settings:
        if key not in known:
            raise unknown_name("setting", key, known)
    wanted = {**size.settings, **settings}
    return {name: config.parse(config.choose(wanted)) for name, config in classes.items()}


def _allocated(device: torch.device) -> int:
    """Bytes in use on ``device`` after garbage collection; 0 if the device does not count them."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def _size(count: float | None) -> str:
    """``12.3 kB``"""
    if count is None:
        return "-"
    return f"{'-' if count < 0 else ''}{decimal(round(abs(count)))}"
