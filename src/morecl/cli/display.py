"""What a run shows while it works: a live line in a terminal, otherwise a line every half minute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from morecl.data.datasets import FOLDER
from morecl.progress import Clock, EpochDone, ProgressLine, TimeLeft, shown_by

if TYPE_CHECKING:  # these import torch
    from morecl.data import TaskStream
    from morecl.evaluator import Step
    from morecl.methods import Learner
    from morecl.run import Watcher

PLAIN_INTERVAL = 30.0  # seconds between lines within a task if the output is not a terminal
LARGER_BACKBONE, LARGER_SIZE = "deit_small_patch16_224", 224


@contextmanager
def watching(
    console: Console, title: str, clock: Clock = time.monotonic, notes: Sequence[str] = ()
) -> Iterator[Watcher]:
    """A watcher that shows a run's task, epoch, loss, images per second and time left; ``notes`` as a run begins."""
    from morecl.run import Watcher

    display = _RunDisplay(console, title, clock, notes)
    watcher = Watcher(started=display.started, epoch=display.epoch, task=display.task)
    if not console.is_terminal:
        yield watcher
        return
    live = Live(console=console, get_renderable=display.line, refresh_per_second=4, transient=True)
    with live, shown_by(display.reading):
        yield watcher


class _RunDisplay:
    """Prints a line per task, and holds what the live line shows in between. Work is counted in epochs."""

    def __init__(self, console: Console, title: str, clock: Clock, notes: Sequence[str]):
        self._console = console
        self._title = title
        self._notes = notes
        self._clock = clock
        self._left = TimeLeft(clock)
        self._tasks = 0
        self._epochs = 1
        self._status = "reading data"
        self._event: EpochDone | None = None
        self._printed = clock()

    def started(self, learner: Learner, stream: TaskStream, done: int) -> None:
        self._tasks = len(stream)
        self._epochs = learner.config.epochs
        self._left.start(self._tasks * self._epochs, done * self._epochs)
        self._status = f"on {learner.device}"
        self._printed = self._clock()
        if done:
            self._console.print(f"[dim]resuming after task {done} of {self._tasks}[/dim]")
        else:
            for note in (*self._notes, *folder_notes(learner, stream)):
                self._console.print(note, style="dim", markup=False, emoji=False, highlight=False)

    def reading(self, what: str, done: int, total: int) -> None:
        if total and not self._left.total:
            self._left.start(total)
        self._left.reach(done)
        self._status = f"{what} {done:,}/{total:,}" if total else what

    def epoch(self, event: EpochDone) -> None:
        self._event = event
        if not event.stage:
            self._left.reach(event.task * event.epochs + event.epoch)
        if not self._console.is_terminal and self._clock() - self._printed >= PLAIN_INTERVAL:
            pieces = (self._position(event), event.step, f"loss {event.loss:.2f}", event.speed, str(self._left))
            self._print(*(piece for piece in pieces if piece))

    def task(self, index: int, step: Step, seconds: float) -> None:
        self._left.reach((index + 1) * self._epochs)
        detection = [] if step.auc is None else [f"AUC {step.auc:.2f}"]
        accuracy = f"accuracy on all seen {step.aca:.2f} %"
        self._print(f"task {index + 1}/{self._tasks}", accuracy, *detection, f"[dim]{seconds:.0f} s[/dim]")

    def line(self) -> ProgressLine:
        event = self._event
        if event is None:
            left = str(self._left) if self._left.done else ""
            return ProgressLine(self._left.share, self._title, self._status, left=left)
        return ProgressLine(
            share=self._left.share,
            title=self._title,
            position=self._position(event),
            step=event.step,
            loss=f"loss {event.loss:.2f}",
            speed=event.speed,
            left=str(self._left),
        )

    def _position(self, event: EpochDone) -> str:
        return f"task {event.task + 1}/{self._tasks}"

    def _print(self, *pieces: str) -> None:
        self._console.print("  ".join([escape(self._title), *pieces]), emoji=False)
        self._printed = self._clock()


def folder_notes(learner: Learner, stream: TaskStream) -> list[str]:
    """What a user should know about a run on a folder: the images it does not learn, and their size."""
    dataset = stream.dataset
    if not dataset.name.startswith(FOLDER):
        return []
    counts = np.bincount(dataset.y_test, minlength=len(dataset.classes))
    fewest, most = int(counts.min()), int(counts.max())
    each = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    images = "image" if most == 1 else "images"
    purpose = "testing" if stream.scored_on == "test" else "validation"
    total = len(dataset.y_train) + len(dataset.y_test)
    held_out = f"held out for {purpose}, never learned: {each} {images} per class ({len(dataset.y_test)} of {total})"
    size = learner.backbone.input.resize
    backbone = f"backbone {learner.backbone.architecture or learner.backbone.name}"
    if dataset.chosen_side:
        then = "" if dataset.side == size else f", then to {size} px for {backbone}"
        return [held_out, f"images are resized to {dataset.side} px, the recipe's folder_size{then}"]
    resized = f"images are resized to {size} px for {backbone}"
    if size < LARGER_SIZE and learner.config.image_size is None:
        resized += f"; --backbone {LARGER_BACKBONE} keeps {LARGER_SIZE} px"
    return [held_out, resized]
