"""Runs experiments in parallel, each in its own process, so a crash affects only one.

Finished runs are skipped and unfinished ones resumed, so after an interruption the same command continues. Several
suites may work in one folder: a run at which another process is at work is left to it. The output of a run goes to
``order-K-seed-S.log`` next to its folder.

On a CPU two runs are bit-identical only with the same number of threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from morecl.config import LearnerConfig
from morecl.errors import InputError, NewerFormatError
from morecl.interrupts import sigterm_as_interrupt
from morecl.locking import BUSY, is_claimed
from morecl.records import Record, read_record
from morecl.run import RESULT, RUN, ResolvedRun, RunRequest, rate_notes, read_request
from morecl.run.inputs import InputsNow
from morecl.run.settings import check_machine
from morecl.suite.plan import PlannedRun


@dataclass(frozen=True)
class Outcome:
    """How a run of the suite ended. ``reason`` says why it failed."""

    run: PlannedRun
    status: Literal["finished", "skipped", "failed"]
    record: Record | None = None
    reason: str = ""

    @classmethod
    def of(cls, run: PlannedRun, result: Record | str) -> Outcome:
        """Of a run that was carried out, with its record or the reason why there is none."""
        return cls(run, "failed", reason=result) if isinstance(result, str) else cls(run, "finished", result)


class Job(Protocol):
    """A run that was given to a place."""

    run: PlannedRun

    def ended(self) -> bool: ...

    def progress(self) -> str | None:
        """Its last line of output; ``None`` while it waits for its turn."""

    def outcome(self) -> Outcome:
        """How it ended; asked once it has."""


class Place(Protocol):
    """Where runs are carried out: :class:`morecl.suite.here.Here`, :class:`morecl.on_ray.runs.OnRay`."""

    title: str
    poll_seconds: float
    is_here: bool  # what this machine has is what the runs have

    def has_room(self) -> bool:
        """Whether another run can be given to it now."""

    def start(self, run: PlannedRun) -> Job: ...

    def stop(self) -> None:
        """End all that is running and leave nothing half-written."""


def run_suite(
    runs: Sequence[PlannedRun], console: Console, place: Place, *, done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run everything that is not finished in ``place``. Returns one outcome per run, in the order of ``runs``.

    Args:
        done: called with each outcome as it comes.

    Raises:
        InputError: a folder holds a different run. Nothing is started.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, after everything has been stopped.
    """
    inputs = InputsNow()
    outcomes: dict[Path, Outcome] = {}
    for run in runs:
        record = finished_record(run.request, run.folder, inputs)
        if record:
            outcomes[run.folder] = Outcome(run, "skipped", record)
    waiting = [run for run in runs if run.folder not in outcomes]
    if place.is_here:
        _check_machine(waiting)
    before = f", {len(outcomes)} finished before" if outcomes else ""
    console.print(f"{len(runs)} runs{before}, {len(waiting)} to do, {place.title}", highlight=False)
    for note in rate_notes(run.request.resolve() for run in waiting):
        _say(console, note)
    for outcome in outcomes.values():
        done(outcome)
    with _display(console) as display, sigterm_as_interrupt():
        display.add_task("all runs", total=len(runs), completed=len(outcomes), detail="")
        work = _Work(waiting, place, inputs, console, display)
        try:
            for outcome in work.outcomes():
                outcomes[outcome.run.folder] = outcome
                done(outcome)
        finally:
            place.stop()
    return [outcomes[run.folder] for run in runs]


class _Work:
    """The runs that are to be done: those that wait for their turn, and those that are under way in ``place``."""

    def __init__(
        self, runs: Iterable[PlannedRun], place: Place, inputs: InputsNow, console: Console, display: Progress
    ):
        self._waiting = deque(runs)
        self._running: list[Job] = []
        self._left: set[Path] = set()  # folders of runs that were left to other processes
        self._place, self._inputs, self._console, self._display = place, inputs, console, display
        self._everything = display.task_ids[0]
        self._rows: dict[Path, TaskID] = {}

    def outcomes(self) -> Iterator[Outcome]:
        """Of all runs, as they end."""
        while self._waiting or self._running:
            for outcome in (*self._start(), *self._look()):
                self._display.advance(self._everything)
                self._console.print(_line(outcome), highlight=False, soft_wrap=True)
                yield outcome
            time.sleep(self._place.poll_seconds if self._running or self._waiting else 0)

    def _start(self) -> Iterator[Outcome]:
        """Start what there is room for; the outcomes of runs that other processes finished meanwhile."""
        for _ in range(len(self._waiting)):
            if not self._place.has_room():
                return
            run = self._waiting.popleft()
            if is_claimed(run.folder):
                self._leave(run)
            elif ended := _ended_meanwhile(run, self._inputs):
                yield ended
            else:
                self._running.append(self._place.start(run))

    def _look(self) -> Iterator[Outcome]:
        """The outcomes of runs that have ended, but for those that were refused."""
        for job in list(self._running):
            folder = job.run.folder
            if not job.ended():
                _show_progress(job, self._rows, self._display)
                continue
            self._running.remove(job)
            if folder in self._rows:
                self._display.remove_task(self._rows.pop(folder))
            outcome = job.outcome()
            if outcome.status == "failed" and (record := _record_of_another(job.run, self._inputs)):
                yield Outcome(job.run, "skipped", record)
            elif outcome.reason.startswith(BUSY):
                self._leave(job.run)
            else:
                yield outcome

    def _leave(self, run: PlannedRun) -> None:
        """Leave it to the process that is at work there, and try it again later."""
        self._waiting.append(run)
        if run.folder not in self._left:
            self._left.add(run.folder)
            _say(self._console, f"{run.title}: another process is at work there; waiting for it to end")


def _say(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False, emoji=False, highlight=False, soft_wrap=True)


def _check_machine(runs: Iterable[PlannedRun]) -> None:
    """Raise :class:`InputError` if a run needs a device, or a file with a backbone, that is not on this machine."""
    checked: set[tuple[str, str]] = set()
    for run in runs:
        config = run.request.resolve().config
        if (config.device, config.backbone) not in checked:
            checked.add((config.device, config.backbone))
            check_machine(config)


def _ended_meanwhile(run: PlannedRun, inputs: InputsNow) -> Outcome | None:
    """The outcome of a run that another process carried out since this suite began."""
    try:
        record = finished_record(run.request, run.folder, inputs)
    except InputError as error:
        return Outcome(run, "failed", reason=str(error))
    return Outcome(run, "skipped", record) if record else None


def _record_of_another(run: PlannedRun, inputs: InputsNow) -> Record | None:
    """The record of a run that failed here, if another process has finished it."""
    with suppress(InputError):
        return finished_record(run.request, run.folder, inputs)
    return None


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table of outcomes and the reason of each failure."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("benchmark", "method", "run", "status"):
        table.add_column(head, overflow="fold")
    for head in ("ACA %", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    colours = {"finished": "green", "skipped": "dim", "failed": "red"}
    words = {"finished": "finished", "skipped": "was finished", "failed": "FAILED"}
    for outcome in outcomes:
        folder, record = outcome.run.folder, outcome.record
        numbers = (f"{record.metrics.aca:.2f}", f"{record.seconds['total']:.0f}") if record else ("-", "-")
        places = [escape(part) for part in folder.parts[-3:]]
        table.add_row(*places, words[outcome.status], *numbers, style=colours[outcome.status])
    console.print(table)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        console.print(f"[red]failed:[/red] {_reason(outcome)}", highlight=False, soft_wrap=True)
    if failed:
        console.print(
            f"{len(failed)} of {len(outcomes)} runs failed; the same command tries them again", soft_wrap=True
        )


def finished_record(request: RunRequest, folder: Path, inputs: InputsNow | None = None) -> Record | None:
    """The record in ``folder`` if ``request`` is finished there, else ``None``.

    Effective settings are compared, so setting something to its default makes no difference. Nor does it matter on
    which machine a finished run was computed (device, data root), as long as images and weights are the same there; but
    an unfinished one must continue as it began.

    Args:
        inputs: the same for many runs, so that images and weights are looked at once.

    Raises:
        InputError: ``folder`` holds a different run, finished or not.
    """
    if not (folder / RUN).is_file():
        return None
    there = read_request(folder).resolve()
    here = request.resolve()
    if (folder / RESULT).is_file():
        record = _record(folder)
        found = _facts(there, record.config)
        wanted = _facts(here, here.config.record())
        _refuse_different(folder, found, wanted, apart_from={*LearnerConfig.with_role("machine"), "data_root"})
        _refuse_other_inputs(folder, there, here, record, inputs or InputsNow())
        return record
    found, wanted = (_facts(run, run.config.model_dump(mode="json")) for run in (there, here))
    _refuse_different(folder, found, wanted, apart_from=set())
    return None


def _record(folder: Path) -> Record:
    try:
        return read_record(folder / RESULT)
    except NewerFormatError:
        raise
    except InputError as error:
        raise InputError(f"{error}; delete its folder to run it again, or choose another --out") from error


def _facts(run: ResolvedRun, config: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same: settings, request and data."""
    request = run.request.model_dump(exclude={"settings", "directory", "plan", "keep_checkpoints"})
    paths = {"benchmark": run.benchmark, "data_root": str(run.data_root) if run.data_root else None}
    plan = {key: value for key, value in run.plan.items() if key != "settings"}  # those are part of ``config``
    return {**config, **request, **paths, **plan}


def _refuse_different(folder: Path, found: dict[str, Any], wanted: dict[str, Any], apart_from: set[str]) -> None:
    """Raise :class:`InputError` at a difference. A setting that one side lacks is of another version; it is ignored."""
    for key in sorted((found.keys() & wanted.keys()) - apart_from):
        if found[key] != wanted[key]:
            raise InputError(
                f"{folder} holds a run with {key} = {found[key]!r}, not {wanted[key]!r}; choose another --out, or "
                "delete that folder to run it again"
            )


def _refuse_other_inputs(
    folder: Path, there: ResolvedRun, here: ResolvedRun, record: Record, inputs: InputsNow
) -> None:
    """Raise :class:`InputError` if the run would have other images or weights today, or as it is asked for."""
    if inputs.other_images(there, here, record):
        other = f"images than {here.recipe.dataset} has now"
    elif inputs.other_weights(here, record):
        other = f"weights than {Path(here.config.backbone).name} has now"
    else:
        return
    raise InputError(
        f"{folder} holds a run on other {other}; choose another --out, or delete the run's folder to run it again"
    )


def _show_progress(job: Job, rows: dict[Path, TaskID], display: Progress) -> None:
    if display.disable or (text := job.progress()) is None:
        return
    folder = job.run.folder
    if folder not in rows:
        rows[folder] = display.add_task(escape(job.run.title), total=None, detail="")
    display.update(rows[folder], detail=escape(text))


def _display(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[detail]}[/dim]", table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def _line(outcome: Outcome) -> str:
    if outcome.record is None:
        return f"[red]failed[/red]   {_reason(outcome)}"
    record = outcome.record
    numbers = f"ACA {record.metrics.aca:6.2f} %  {record.seconds['total']:.0f} s"
    return f"[green]finished[/green] {escape(outcome.run.title)}  {numbers}"


def _reason(outcome: Outcome) -> str:
    return f"{escape(outcome.run.title)}: {escape(outcome.reason)}"
