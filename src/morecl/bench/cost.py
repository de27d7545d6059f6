"""What learning a task costs with each method: time per pass through the network, and memory from task to task.

Methods differ in how many passes they make (replay, distillation, rotations), and that is theirs to choose. What is
measured is whether a pass costs what it must: each method learns a stream of equal tasks, and in the last one

    overhead = (seconds / passes) / (seconds of finetune / passes of finetune)

should be at most :data:`LIMIT`. Passes are counted, not declared: an image that goes through the network with gradients
is one pass; without gradients it is a third of one, as the backward pass costs about twice the forward pass. Where
fewer images go through at once than are in a batch of finetune (HAL's anchors: one a class), they count as such a
batch: a GPU takes about as long for them. Passes that belong to no epoch (a teacher's outputs, herding, statistics,
anchors) count as well.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

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
from morecl.config import LearnerConfig, SgdConfig
from morecl.errors import unknown_name
from morecl.methods import METHODS, Learner, method_class
from morecl.methods.finetune import Finetune
from morecl.nn.backbone import Backbone
from morecl.nn.device import resolve_device
from morecl.nn.network import AdaptedViT

LIMIT = 1.5
FORWARD_SHARE = 1 / 3  # of a pass forward and backward
REFERENCE = Finetune.name
ALL = "all"


@dataclass(frozen=True)
class Size:
    """How much is measured. ``settings`` are those of the methods that have them."""

    tasks: int = 4
    images: int = 1024  # per task
    repeats: int = 3  # of the last task; the fastest counts, as whatever else runs here only adds
    settings: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 4, "memory_size": 200})


QUICK = Size(
    tasks=3,
    images=32,
    repeats=2,
    settings={
        "epochs": 2,
        "batch_size": 16,
        "memory_size": 24,
        "memory_batch_size": 16,
        "balanced_epochs": 2,  # stages whose length does not depend on the task's would take most of the time
        "anchor_steps": 5,
        "back_update_epochs": 2,
    },
)


@dataclass
class Passes:
    """Images that went through a network, each as often as it did."""

    with_gradient: int = 0
    without_gradient: int = 0
    filling: float = 0  # passes that small batches count beyond their images

    @property
    def images(self) -> float:
        return self.with_gradient + FORWARD_SHARE * self.without_gradient

    @property
    def total(self) -> float:
        return self.images + self.filling


@dataclass
class AfterTask:
    """Bytes when a task has been learned; on a device that does not count its memory (a CPU) only ``kept``.

    What is allocated is counted from before the learner was made, so without the backbone.
    """

    kept: int  # all that the learner's state holds, replay memory included
    kept_on_device: int | None
    allocated: int | None
    allocated_asked: int | None  # after one prediction: with what is computed for it and not thrown away
    peak: int | None  # while the task was learned


@dataclass
class MethodCost:
    """What learning the last task took."""

    method: str
    settings: dict[str, Any]
    image_passes: Passes
    passes: float  # per image of the task and epoch
    seconds: float
    finetune_seconds: float  # measured in turn with the above
    overhead: float
    image_overhead: float  # the same without counting small batches as whole ones
    after_task: list[AfterTask]

    def growth(self, name: str) -> float | None:
        """Bytes per further task, ``name`` being one of :class:`AfterTask`."""
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
        """The methods that cost more than they may."""
        return [cost.method for cost in self.methods if cost.overhead > self.limit]

    def show(self, console: Console) -> None:
        """The record as a table."""
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
        console.print(f"a batch smaller than those of {REFERENCE} as one of them")
        console.print(f"overhead: seconds per pass, relative to {REFERENCE}; to be at most {self.limit}")
        console.print("by image: the same, small batches counted by their images")
        further = "keeps: bytes per further task"
        if on_device:
            further += "; on device, allocated: those on the device, kept and in use; asked: in use after a prediction"
        console.print(further)
        if self.above():
            console.print(f"[red]! above {self.limit}:[/red] {', '.join(self.above())}")


def method_names(text: str) -> list[str]:
    """``"all"`` or ``"more,derpp"``: the methods, each once."""
    if text == ALL:
        return list(METHODS)
    return [method_class(name.strip()).name for name in dict.fromkeys(text.split(","))]


def measure(methods: Sequence[str], settings: Mapping[str, Any], size: Size, report: Callable[[str], None]) -> Costs:
    """The costs of ``methods``, :data:`REFERENCE` always among them and first; ``report`` is told what is measured.

    ``settings`` go to every method that has them, over those of ``size``.
    """
    configs = _configs([REFERENCE, *methods], settings, size)
    batch = cast(SgdConfig, configs[REFERENCE]).batch_size
    report(f"{REFERENCE}, to compare with")
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
        # no name for the stream: it must be gone when the next one begins to count memory
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
        passes=passes.total / (size.images * (config.epochs if isinstance(config, SgdConfig) and config.trains else 1)),
        seconds=seconds,
        finetune_seconds=finetune_seconds,
        overhead=(seconds / passes.total) / (finetune_seconds / reference_passes.total),
        image_overhead=(seconds / passes.images) / (finetune_seconds / reference_passes.images),
        after_task=after,
    )


@contextmanager
def counting(network: AdaptedViT, batch: int = 1) -> Iterator[Passes]:
    """Count what goes through ``network`` inside, less than ``batch`` images at once as so many. Replayed CUDA graphs
    run no Python and are not seen."""
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
    """A learner on its way through the tasks, the last of which can be learned again and again."""

    def __init__(self, method: str, config: LearnerConfig, size: Size, batch: int, backbone: Backbone | None = None):
        """``batch``: what a smaller batch counts as."""
        self.size, self.batch = size, batch
        self._start = _allocated(resolve_device(config.device))
        self.learner: Learner = method_class(method)(config, backbone)
        self._before_last: dict[str, Tensor] = {}
        self._passes = Passes()

    def run(self) -> list[AfterTask]:
        """Learn all tasks."""
        after = []
        for _ in range(self.size.tasks):
            self._before_last = {key: value.detach().cpu().clone() for key, value in self.learner.state().items()}
            with counting(self.learner.network, self.batch) as self._passes:
                self._learn(self.learner)
            after.append(self._after_task())
        return after

    def again(self) -> float:
        """Learn the last task anew; seconds."""
        return self._learn_last(self.learner)

    def passes(self) -> Passes:
        """Those of the last task."""
        learner = self.learner
        if not learner.compiled:
            return self._passes
        plain = type(learner)(learner.config.model_copy(update={"compile": "off"}), learner.backbone)
        with counting(plain.network, self.batch) as passes:
            self._learn_last(plain)
        return passes

    def _learn_last(self, learner: Learner) -> float:
        classes, task_sizes = self.learner.classes[:-CLASSES_PER_TASK], self.learner.task_sizes[:-1]
        learner.restore(classes, task_sizes, self._before_last)
        return self._learn(learner)

    def _learn(self, learner: Learner) -> float:
        task, device = len(learner.task_sizes), learner.device
        images = made_up_images(self.size.images, seed=task)
        labels = [f"{task}-{i % CLASSES_PER_TASK}" for i in range(len(images))]
        if device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats(device)
        wait_for(device)
        started = time.perf_counter()
        learner.learn_task(images, labels)
        wait_for(device)
        return time.perf_counter() - started

    def _after_task(self) -> AfterTask:
        learner, device = self.learner, self.learner.device
        state = learner.state().values()
        result = AfterTask(sum(value.nbytes for value in state), None, None, None, None)
        if device.type == "cuda":
            result.peak = torch.cuda.max_memory_allocated(device) - self._start
            result.kept_on_device = sum(value.nbytes for value in state if value.device.type == "cuda")
            result.allocated = _allocated(device) - self._start
            learner.scores(made_up_images(1))
            result.allocated_asked = _allocated(device) - self._start
        return result


def _configs(methods: Sequence[str], settings: Mapping[str, Any], size: Size) -> dict[str, LearnerConfig]:
    classes = {name: method_class(name).Config for name in methods}
    known = {key for config in classes.values() for key in config.model_fields}
    for key in settings:
        if key not in known:
            raise unknown_name("setting", key, known)
    wanted = {**size.settings, **settings}
    return {name: config.parse(config.choose(wanted)) for name, config in classes.items()}


def _allocated(device: torch.device) -> int:
    """Bytes in use on ``device`` once garbage is collected; 0 if it does not count."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def _size(count: float | None) -> str:
    """``12.3 kB``"""
    if count is None:
        return "-"
    return f"{'-' if count < 0 else ''}{decimal(round(abs(count)))}"
