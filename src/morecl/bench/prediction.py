"""Time of a prediction against the number of tasks learned, with MORE and MORE-RP.

MORE asks every task's network about every image, so its time grows with the tasks. MORE-RP asks a fixed number, so its
time should hardly grow: after 20 and after 100 tasks at most :data:`LIMIT` times that after 5. What does grow is its
kernel, with the images learned: here :data:`KEPT_PER_TASK` of them per task.

Learners are grown without training. Their adapters and masks are random, about half of the neurons open. MORE-RP's
classifier is made so that the images spread over all networks: that is its most expensive case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from morecl.bench.common import CLASSES_PER_TASK, Measured, in_turn, made_up_images, place_of
from morecl.errors import InputError
from morecl.kernel_ridge import KernelRidge
from morecl.methods import method_class
from morecl.methods.more import More
from morecl.methods.morerp import Morerp
from morecl.nn.backbone import Backbone
from morecl.scoring import Features

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT = 1.3
METHODS = ("more", "morerp")
FLAT = "morerp"  # the method whose time should not grow
KEPT_PER_TASK = 500  # images whose features MORE-RP keeps


@dataclass(frozen=True)
class PredictionSize:
    """How much the benchmark measures. ``settings`` apply to the methods that have them."""

    tasks: tuple[int, ...] = (5, 20, 100)
    images: int | None = None  # per prediction; as many as ``predict`` takes at once if not given
    repeats: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)


QUICK_PREDICTION = PredictionSize(images=32, repeats=2, settings={"image_size": 16})


@dataclass(frozen=True)
class PredictionTime:
    """The median time of a prediction of all images."""

    method: str
    tasks: int
    networks: int  # that were asked about at least one image
    seconds: float


@dataclass(kw_only=True)
class Predictions(Measured):
    """The record of the benchmark."""

    SCHEMA = "morecl.prediction/1"

    images: int
    limit: float = LIMIT
    times: list[PredictionTime] = field(default_factory=list)

    def growth(self, row: PredictionTime) -> float:
        """How many times as long as the same method takes after the fewest tasks."""
        return row.seconds / min((r for r in self.times if r.method == row.method), key=lambda r: r.tasks).seconds

    def above(self) -> list[PredictionTime]:
        """Where the time of :data:`FLAT` has grown beyond the limit."""
        return [row for row in self.times if row.method == FLAT and self.growth(row) > self.limit]

    def figure(self) -> Figure:
        """Seconds against tasks, one line per method."""
        from morecl.report import plots

        rows = {method: [row for row in self.times if row.method == method] for method in METHODS}
        lines = {name: ([r.tasks for r in own], [r.seconds for r in own]) for name, own in rows.items()}
        figure = plots.time_lines(lines, plots.WIDE)
        figure.suptitle(f"Prediction of {self.images} images, {self.headline}", fontsize=10, color=plots.INK)
        return figure

    def show(self, console: Console) -> None:
        """Print the record as a table."""
        console.print(f"{self.headline}; {self.images} images per prediction")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", style="bold")
        for head in ("tasks", "networks asked", "ms", "images/s", "times the first"):
            table.add_column(head, justify="right")
        for row in self.times:
            high = row in self.above()
            table.add_row(
                row.method,
                str(row.tasks),
                str(row.networks),
                f"{1000 * row.seconds:,.1f}",
                f"{self.images / row.seconds:,.0f}",
                f"{self.growth(row):.2f}{' !' if high else '  '}",
                style="red" if high else None,
            )
        console.print(table)
        console.print(f"{FLAT} should take at most {self.limit} times as long after any number of tasks")


def measure(settings: Mapping[str, Any], size: PredictionSize, report: Callable[[str], None]) -> Predictions:
    """Measure all :data:`METHODS`. ``report`` is called with the name of each phase.

    ``settings`` apply to every method that has them, and override those of ``size``.
    """
    Morerp.Config.parse(settings)  # it has all settings of MORE
    learners: list[More] = []
    for name in METHODS:
        config = method_class(name).Config
        for tasks in size.tasks:
            report(f"{name} after {tasks} tasks")
            made = config.parse(config.choose({**size.settings, **settings}))
            learners.append(grown(name, made, tasks, learners[0].backbone if learners else None))
    images = made_up_images(size.images or learners[0].eval_batch_size)
    for learner in learners:
        if isinstance(learner, Morerp):
            spread(learner, images)
    report("predictions")

    def predicting(learner: More) -> Callable[[], object]:
        return lambda: learner.answer(Features(learner, learner.prepare(images), one_pass=False))

    times = in_turn([predicting(learner) for learner in learners], learners[0].device, size.repeats)
    result = Predictions(**place_of(learners[0]), images=len(images))
    for learner, taken in zip(learners, times, strict=True):
        asked = networks_asked(learner, images)
        result.times.append(PredictionTime(learner.name, len(learner.tasks), asked, taken))
    return result


@torch.no_grad()
def grown(method: str, config: Any, tasks: int, backbone: Backbone | None = None) -> More:
    """A learner as large as after ``tasks`` tasks, with random adapters and masks."""
    learner = cast(More, method_class(method)(config, backbone))
    draw = torch.Generator().manual_seed(0)
    for part in learner.adapters.parameters():
        part.copy_(0.02 * torch.randn(part.shape, generator=draw))
    for k in range(tasks):
        learner.classes.extend(f"{k}-{c}" for c in range(CLASSES_PER_TASK))
        learner.task_sizes.append(CLASSES_PER_TASK)
        learner._grow(CLASSES_PER_TASK)
        learner.rule.grow(CLASSES_PER_TASK)
        net = learner.tasks[-1]
        net.samples.fill_(10 * learner.network.dim)
        for square in (net.covariance, net.precision):
            square.copy_(torch.eye(learner.network.dim))
    return learner


@torch.no_grad()
def spread(learner: Morerp, images: Any) -> None:
    """Give the ridge classifier :data:`KEPT_PER_TASK` images of each task. Each of ``images`` is ranked by
    those that are made from it.

    Random images look alike to a network, so their features are measured by how much they differ.
    """
    ridge = learner.rule.ridge
    if not isinstance(ridge, KernelRidge):
        raise InputError("predictions are measured with MORE-RP's kernel: leave out the setting projection")
    z = learner.embed(learner.prepare(images), learner.rule.network)
    ridge.clear()
    ridge.scale.copy_((z - z.mean(0)).std())
    draw = torch.Generator().manual_seed(0)
    kept = KEPT_PER_TASK * len(learner.tasks)
    rows = torch.arange(kept, device=z.device) % len(z)
    noise = 0.1 * ridge.scale.float() * torch.randn(kept, z.shape[1], generator=draw).to(z)
    ridge.add(z[rows] + noise, torch.arange(kept, device=z.device) % ridge.classes)
    own = torch.arange(ridge.classes, device=z.device) == ridge.columns[:, None]
    ridge.dual = own.to(z)


@torch.no_grad()
def networks_asked(learner: More, images: Any) -> int:
    """How many of the tasks' networks are asked about at least one image."""
    if not isinstance(learner, Morerp):
        return len(learner.tasks)
    rule = learner.rule
    _, ridge = rule.compare(learner.embed(learner.prepare(images), rule.network))
    return int(rule._ranking(ridge).any(0).sum())
