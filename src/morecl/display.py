"""What the terminal shows while a run goes on. Without a terminal only the line after each task is printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from morecl.data import TaskStream
from morecl.evaluator import Step
from morecl.methods import Learner
from morecl.progress import EpochDone
from morecl.records import Record
from morecl.runner import Watcher


@contextmanager
def watching(console: Console, title: str) -> Iterator[Watcher]:
    """A watcher that draws a bar for the whole run: task, epoch, loss, images/s, time left."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[detail]}[/dim]"),
        TimeElapsedColumn(),
        TextColumn("[dim]left[/dim]"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    row = bar.add_task(title, total=None, detail="reading data")
    total_tasks = 0

    def started(learner: Learner, stream: TaskStream, done: int) -> None:
        nonlocal total_tasks
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
            f"task {event.task + 1}/{total_tasks} epoch {event.epoch}/{event.epochs} "
            f"loss {event.loss:.3f} {event.images_per_second:.0f} images/s"
        )
        bar.update(row, completed=event.task * event.epochs + event.epoch, detail=detail)

    def task(index: int, step: Step, seconds: float) -> None:
        detection = "" if step.auc is None else f"  unknown-vs-known AUC {step.auc:6.2f}"
        console.print(
            f"{title}  task {index + 1}/{total_tasks}  accuracy on all seen {step.aca:6.2f} %{detection}"
            f"  [dim]{seconds:.0f} s[/dim]"
        )

    with bar:
        yield Watcher(started=started, epoch=epoch, task=task)


def summary(records: Sequence[Record], console: Console) -> None:
    """One line a run, best accuracy last to be named: what a terminal has room for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", style="bold")
    table.add_column("benchmark")
    table.add_column("seed", justify="right")
    heads = ("ACA %", "AIA %", "reduction", "task told %", "AUC", "IAUC", "train s", "total s")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    best = max(record.metrics.aca for record in records)
    for record in records:
        m = record.metrics
        numbers = [m.aca, m.aia, m.reduction_rate, m.til_accuracy, m.auc, m.iauc]
        cells = ["-" if value is None else f"{value:.2f}" for value in numbers]
        cells += [f"{record.seconds['train']:.1f}", f"{record.seconds['total']:.1f}"]
        style = "green" if len(records) > 1 and m.aca == best else None
        table.add_row(record.method, record.benchmark, str(record.seed), *cells, style=style)
    console.print(table)
    console.print(
        "[dim]ACA: accuracy on all classes after the last task. AIA: its mean over the tasks. AUC: unknown against "
        "known after the second last task, IAUC: mean over tasks.[/dim]"
    )
