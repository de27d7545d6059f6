"""Runs experiments in parallel, each in its own process, so a crash affects only one.

Finished runs are skipped and unfinished ones resumed, so after an interruption the same command continues. The output
of a run goes to ``order-K-seed-S.log`` next to its folder.

With ``jobs`` > 1 each process gets cores // jobs threads (``OMP_NUM_THREADS``, unless the environment sets it). On a
CPU two runs are bit-identical only with the same number of threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from morecl.config import LearnerConfig
from morecl.errors import InputError
from morecl.interrupts import sigterm_as_interrupt
from morecl.records import Record, read_record
from morecl.run import RESULT, RUN, ResolvedRun, RunRequest, read_request
from morecl.suite.plan import PlannedRun

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 20.0
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Outcome:
    """How a run of the suite ended. ``reason`` says why it failed."""

    run: PlannedRun
    status: Literal["finished", "skipped", "failed"]
    record: Record | None = None
    reason: str = ""


def run_suite(runs: Sequence[PlannedRun], console: Console, *, jobs: int = 1) -> list[Outcome]:
    """Run everything that is not finished, ``jobs`` at a time. Returns one outcome per run, in the order of ``runs``.

    Raises:
        InputError: a folder holds a different run. Nothing is started.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, after all processes have been stopped.
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
    with _display(console) as display, sigterm_as_interrupt():
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


def finished_record(request: RunRequest, folder: Path) -> Record | None:
    """The record in ``folder`` if ``request`` is finished there, else ``None``.

    Effective settings are compared, so setting something to its default makes no difference. Nor does it matter on
    which machine a finished run was computed (device, data root), but an unfinished one must continue as it began.

    Raises:
        InputError: ``folder`` holds a different run, finished or not.
    """
    if not (folder / RUN).is_file():
        return None
    there = read_request(folder).resolve()
    here = request.resolve()
    if (folder / RESULT).is_file():
        record = read_record(folder / RESULT)
        found = _facts(there, record.config)
        wanted = _facts(here, here.config.record())
        _refuse_different(folder, found, wanted, apart_from={*LearnerConfig.with_role("machine"), "data_root"})
        return record
    found, wanted = (_facts(run, run.config.model_dump(mode="json")) for run in (there, here))
    _refuse_different(folder, found, wanted, apart_from=set())
    return None


def _facts(run: ResolvedRun, config: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same: settings, request and data."""
    request = run.request.model_dump(exclude={"settings", "directory", "plan", "keep_checkpoints"})
    paths = {"benchmark": run.benchmark, "data_root": str(run.data_root) if run.data_root else None}
    return {**config, **request, **paths, **run.plan}


def _refuse_different(folder: Path, found: dict[str, Any], wanted: dict[str, Any], apart_from: set[str]) -> None:
    """Raise :class:`InputError` at a difference. A setting that one side lacks is of another version; it is ignored."""
    for key in sorted((found.keys() & wanted.keys()) - apart_from):
        if found[key] != wanted[key]:
            raise InputError(
                f"{folder} holds a run with {key} = {found[key]!r}, not {wanted[key]!r}; choose another --out, or "
                "delete that folder to run it again"
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
        """The last line written by this process, not by an earlier one."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.begin, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return " ".join(line.removeprefix(f"{self.run.request.benchmark} {self.run.request.method}").split())


def _command(run: PlannedRun) -> list[str]:
    """``morecl run`` with all options of the request, or ``morecl resume`` if the run has begun."""
    start = [sys.executable, "-m", "morecl"]
    if (run.folder / RUN).is_file():
        return [*start, "resume", str(run.folder)]
    request = run.request
    command = [*start, "run", request.benchmark, "--method", request.method, "--out", str(run.folder)]
    command += ["--class-order", request.class_order, "--seed", str(request.seed)]
    for option in ("data_root", "tasks", "train_per_class", "test_per_class", "validation"):
        value = getattr(request, option)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            command += [f"--{option.replace('_', '-')}", text]
    if request.keep_checkpoints:
        command.append("--keep-checkpoints")
    for key, value in request.settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return command


def _spawn(command: list[str], environment: dict[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    # Own session: Ctrl-C in the terminal reaches only this process, which then stops the others.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _stop(jobs: Sequence[_Job]) -> None:
    """End all processes: SIGTERM, so that they leave nothing half-written, and after a grace period SIGKILL.

    Not SIGINT: a child inherits it as ignored where this process was started with ``&`` in a script, by nohup or cron.
    """
    for job in jobs:
        job.process.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    try:
        for job in jobs:
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(timeout=max(0.0, until - time.monotonic()))
    finally:  # also when interrupted again
        for job in jobs:
            job.process.kill()  # no effect on a process that has ended
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
