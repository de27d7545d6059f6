"""What the terminal shows while a run goes on. Without a terminal only the line after each task is printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from morecl.data import TaskStream
from morecl.evaluator import Step
from morecl.methods import Learner
from morecl.progress import EpochDone
from morecl.records import Record
from morecl.report.grid import Column, arrange, repetition_mean, repetitions
from morecl.report.notes import caveats
from morecl.runner import Watcher

_MEANINGS = {  # of the summary's columns
    "ACA": "accuracy on the images of all classes after the last task",
    "AIA": "mean over tasks of the accuracy so far",
    "told": "accuracy if the task is told, a mean over tasks (ACA is one over images)",
    "AUC": "unknown against known after the second last task",
    "IAUC": "mean over tasks of the AUC",
}
_LEFT_OUT_FIRST = ("s", "IAUC", "AIA", "AUC", "told", "runs")  # where the terminal is too narrow
_NAME = 12  # characters of a method's or a benchmark's name before it goes on in the next line, at least


@contextmanager
def watching(console: Console, title: str) -> Iterator[Watcher]:
    """A watcher that draws a bar for the whole run: task, epoch, loss, images/s, time left."""
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    row = bar.add_task(title, total=None, detail="reading data")
    total_tasks = epochs = 0

    def started(learner: Learner, stream: TaskStream, done: int) -> None:
        nonlocal total_tasks, epochs
        total_tasks = len(stream)
        epochs = getattr(learner.config, "epochs", 1)
        bar.update(row, total=total_tasks * epochs, completed=done * epochs, detail=f"on {learner.device}")
        skipped = stream.dataset.skipped
        if skipped:
            console.print(f"[yellow]{len(skipped)} unreadable images were left out[/yellow]")
        if done:
            console.print(f"[dim]going on after task {done} of {total_tasks}[/dim]")

    def epoch(event: EpochDone) -> None:
        detail = (
            f"task {event.task + 1}/{total_tasks} {event.stage or 'epoch'} {event.epoch}/{event.epochs} "
            f"loss {event.loss:.2f} {event.images_per_second:.0f} img/s"
        )
        bar.update(row, completed=None if event.stage else event.task * event.epochs + event.epoch, detail=detail)

    def task(index: int, step: Step, seconds: float) -> None:
        bar.update(row, completed=(index + 1) * epochs)
        detection = "" if step.auc is None else f"  AUC {step.auc:.2f}"
        console.print(
            f"{escape(title)}  task {index + 1}/{total_tasks}  accuracy on all seen {step.aca:.2f} %{detection}"
            f"  [dim]{seconds:.0f} s[/dim]",
            emoji=False,
        )

    with bar:
        yield Watcher(started=started, epoch=epoch, task=task)


def summary(records: Sequence[Record], console: Console) -> None:
    """One line a method and benchmark, means over runs; as many columns as fit. A benchmark's best is green."""
    grid = arrange(records)
    ranked: dict[Column, list[float]] = defaultdict(list)
    for row, places in grid.items():
        for column, runs in places.items():
            if row.competes:
                ranked[column].append(repetition_mean(runs, lambda r: r.metrics.aca) or 0.0)
    lines: list[dict[str, str]] = []
    green: list[bool] = []
    for row, places in grid.items():
        for column, runs in places.items():
            names = ("aca", "aia", "til_accuracy", "auc", "iauc")
            means = [repetition_mean(runs, attrgetter(f"metrics.{name}")) for name in names]
            cells = ["-" if value is None else f"{value:.2f}" for value in means]
            seconds = repetition_mean(runs, lambda r: r.seconds.get("total"))
            lines.append(
                {"method": row.label, "benchmark": column.label, "runs": str(len(repetitions(runs)))}
                | dict(zip(_MEANINGS, cells, strict=True))
                | {"s": f"{seconds or 0:.0f}"}
            )
            green.append(row.competes and len(ranked[column]) > 1 and means[0] == max(ranked[column]))
    heads = _fitting(lines, console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        name = head in ("method", "benchmark")
        style = "bold" if head == "method" else None
        table.add_column(head, style=style, justify="left" if name else "right", no_wrap=not name, overflow="fold")
    for line, best in zip(lines, green, strict=True):
        table.add_row(*(Text(line[head]) for head in heads), style="green" if best else None)
    console.print(table)
    legend = [f"{head}: {meaning}." for head, meaning in _MEANINGS.items() if head in heads]
    console.print(f"Percent. {' '.join(legend)}", style="dim", highlight=False)
    for note in caveats(grid):
        console.print(note, style="dim", markup=False, emoji=False)


def _fitting(lines: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that ``width`` has room for; names may take several lines, numbers may not."""
    widths = {head: max(len(line[head]) for line in (*lines, {head: head})) + 3 for head in lines[0]}
    for head in ("method", "benchmark"):
        widths[head] = min(widths[head], _NAME + 3)
    for head in _LEFT_OUT_FIRST:
        if sum(widths.values()) > width:
            del widths[head]
    return list(widths)
