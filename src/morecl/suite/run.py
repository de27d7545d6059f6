"""Many runs, several at once, each in a process of its own: one that fails or is killed takes no other with it.

What is finished is skipped, what was begun goes on from its last checkpoint, so the same command again is the way to go
on after an interruption. What a run prints goes to the file beside its folder, ``order-K-seed-S.log``.

With ``jobs`` > 1 each process gets cores // jobs threads (``OMP_NUM_THREADS``, unless the environment sets it). On a
CPU a run is bit-identical to another only with the same number of threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from morecl.config import LearnerConfig
from morecl.data import load_recipe
from morecl.errors import InputError
from morecl.methods import method_class
from morecl.records import Record, read_record
from morecl.runner import RESULT, RUN, RunRequest, effective_settings, read_request
from morecl.suite.plan import PlannedRun

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 20.0
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Outcome:
    """How a run of the suite ended. ``reason`` says why one failed."""

    run: PlannedRun
    status: Literal["finished", "skipped", "failed"]
    record: Record | None = None
    reason: str = ""


def run_suite(runs: Sequence[PlannedRun], console: Console, *, jobs: int = 1) -> list[Outcome]:
    """Run all that is not finished, ``jobs`` at once, and say how each ended, in the order of ``runs``.

    Raises ``InputError`` before anything starts if a folder holds a run of something else. When interrupted (ctrl-C,
    SIGTERM) all processes are stopped first.
    """
    if jobs < 1:
        raise InputError(f"--jobs is 1 or more, not {jobs}")
    outcomes: dict[Path, Outcome] = {}
    for run in runs:
        record = finished_record(run.request, run.folder)
        if record:
            outcomes[run.folder] = Outcome(run, "skipped", record)
    waiting = deque(run for run in runs if run.folder not in outcomes)
    done = f", {len(outcomes)} finished before" if outcomes else ""
    console.print(f"{len(runs)} runs{done}, {len(waiting)} to do, {jobs} at once", highlight=False)
    environment = _environment(jobs)
    running: list[_Job] = []
    with _display(console) as display, _terminable():
        everything = display.add_task("all runs", total=len(runs), completed=len(outcomes), detail="")
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.popleft()
                    running.append(_Job(run, environment, display))
                for job in [job for job in running if job.ended()]:
                    running.remove(job)
                    outcome = outcomes[job.run.folder] = job.outcome()
                    display.advance(everything)
                    console.print(_line(outcome), highlight=False, soft_wrap=True)
                time.sleep(_POLL_SECONDS if running else 0)
        finally:
            _stop(running)
    return [outcomes[run.folder] for run in runs]


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table at the end, and the reason of each failure."""
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


def finished_record(request: RunRequest, folder: Path) -> Record | None:
    """The record in ``folder`` if ``request`` is finished there, ``None`` if it is not.

    A folder with a run of something else, finished or begun, is an ``InputError``: it is neither used nor replaced.
    Settings are compared as they take effect, so one that is set to its default is no difference; where a finished run
    was computed (device, data root) is none either, but one that goes on must go on as it began.
    """
    if not (folder / RUN).is_file():
        return None
    there = read_request(folder)
    if (folder / RESULT).is_file():
        record = read_record(folder / RESULT)
        here = _what(request, _config(request).record())
        _same(folder, _what(there, record.config), here, apart_from={*LearnerConfig.with_role("machine"), "data_root"})
        return record
    begun, asked = (_what(one, _config(one).model_dump(mode="json")) for one in (there, request))
    _same(folder, begun, asked, apart_from=set())
    return None


def _config(request: RunRequest) -> LearnerConfig:
    located = request.located()
    settings = effective_settings(located, load_recipe(located.benchmark))
    return method_class(request.method).Config.parse(settings)


def _what(request: RunRequest, config: dict[str, Any]) -> dict[str, Any]:
    located = request.located()
    said = located.model_dump(mode="json", exclude={"settings", "directory", "plan"})
    return {**config, **said, **located.planned(load_recipe(located.benchmark))}


def _same(folder: Path, there: dict[str, Any], here: dict[str, Any], apart_from: set[str]) -> None:
    """Settings that only one side knows are of another version of the method and cannot be compared."""
    for key in sorted((there.keys() & here.keys()) - apart_from):
        if there[key] != here[key]:
            raise InputError(
                f"{folder} holds a run with {key} = {there[key]!r}, not {here[key]!r}; choose another --out, or "
                "delete that folder to run it anew"
            )


class _Job:
    """A run in its own process."""

    def __init__(self, run: PlannedRun, environment: dict[str, str], display: Progress):
        self.run = run
        self.log = run.folder.with_name(f"{run.folder.name}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.display = display
        with self.log.open("ab") as file:
            self.begin = file.tell()
            self.process = _spawn(_command(run), environment, file)
        self.row = display.add_task(escape(run.title), total=None, detail="starting")

    def ended(self) -> bool:
        if self.process.poll() is None:
            self.display.update(self.row, detail=escape(self._last_line()))
            return False
        self.display.remove_task(self.row)
        return True

    def outcome(self) -> Outcome:
        code = self.process.returncode
        try:
            if code == 0:
                return Outcome(self.run, "finished", read_record(self.run.folder / RESULT))
            ending = f"killed by {signal.Signals(-code).name}" if code < 0 else self._last_line()
        except InputError as error:
            ending = str(error)
        return Outcome(self.run, "failed", reason=f"{ending or f'exit code {code}'} (see {self.log})")

    def _last_line(self) -> str:
        """The last line that this process, not an earlier one, has written."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.begin, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return " ".join(line.removeprefix(f"{self.run.request.benchmark} {self.run.request.method}").split())


def _command(run: PlannedRun) -> list[str]:
    """``morecl run`` with the request spelled out, or ``morecl resume`` where a run was begun."""
    start = [sys.executable, "-m", "morecl"]
    if (run.folder / RUN).is_file():
        return [*start, "resume", str(run.folder)]
    request = run.request
    command = [*start, "run", request.benchmark, "--method", request.method, "--out", str(run.folder)]
    command += ["--class-order", request.class_order, "--seed", str(request.seed)]
    for option in ("data_root", "tasks", "train_per_class", "test_per_class", "validation"):
        value = getattr(request, option)
        if value is not None:
            command += [f"--{option.replace('_', '-')}", str(value)]
    for key, value in request.settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return command


def _spawn(command: list[str], environment: dict[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    # A session of its own: ctrl-C in the terminal reaches this process alone, which then stops the others.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _stop(jobs: Sequence[_Job]) -> None:
    """Interrupt, so that nothing half-written stays; what has not ended after a while is killed."""
    for job in jobs:
        job.process.send_signal(signal.SIGINT)
    until = time.monotonic() + _GRACE_SECONDS
    for job in jobs:
        try:
            job.process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()


def _environment(jobs: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("FORCE_COLOR", None)
    environment |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // jobs)))
    return environment


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is taken as ctrl-C inside (in the main thread, which alone may say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
