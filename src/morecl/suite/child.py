"""One run as a process of its own: its command, its log, its end. The same here and on a node of a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from morecl.errors import InputError
from morecl.locking import BUSY
from morecl.records import Record, read_record
from morecl.run import RESULT, RUN
from morecl.suite.plan import PlannedRun

DIVERGED = "stopped:"  # how the last line of a run whose training diverged begins
_GRACE_SECONDS = 20.0
_TAIL_BYTES = 2000

# Asks Linux for SIGTERM when the parent ends, however it ends, and becomes the command.
_BIND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A run in its own process. It is stopped when this process ends, on Linux even if that is killed."""

    def __init__(self, run: PlannedRun, environment: Mapping[str, str], cwd: Path | None = None):
        arguments = command(run)
        if sys.platform == "linux":
            arguments = [sys.executable, "-c", _BIND, str(os.getpid()), *arguments]
        with log_of(run).open("ab") as output:
            # Own session: Ctrl-C in the terminal reaches only this process, which then stops the others.
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
            )


def command(run: PlannedRun) -> list[str]:
    """``morecl run`` with all options of the request, or ``morecl resume`` if the run has begun."""
    start = [sys.executable, "-m", "morecl"]
    if (run.folder / RUN).is_file():
        return [*start, "resume", str(run.folder)]
    request = run.request
    arguments = [*start, "run", request.benchmark, "--method", request.method, "--out", str(run.folder)]
    arguments += ["--class-order", request.class_order, "--seed", str(request.seed)]
    for option in ("data_root", "tasks", "train_per_class", "test_per_class", "validation"):
        value = getattr(request, option)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            arguments += [f"--{option.replace('_', '-')}", text]
    if request.keep_checkpoints:
        arguments.append("--keep-checkpoints")
    for key, value in request.settings.items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    return arguments


def environment_for(threads: int | None) -> dict[str, str]:
    """The environment of a run; ``threads``: ``OMP_NUM_THREADS``, unless the user sets it."""
    environment = dict(os.environ)
    environment.pop("FORCE_COLOR", None)
    environment |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def stop(children: Sequence[Child]) -> None:
    """End all processes: SIGTERM, so that they leave nothing half-written, and after a grace period SIGKILL.

    Not SIGINT: a child inherits it as ignored where this process was started with ``&`` in a script, by nohup or cron.
    """
    for child in children:
        child.process.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    try:
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=max(0.0, until - time.monotonic()))
    finally:  # also when interrupted again
        for child in children:
            child.process.kill()  # no effect on a process that has ended
            child.process.wait()


def log_of(run: PlannedRun) -> Path:
    """Where the output of the run goes."""
    return run.folder.with_name(f"{run.folder.name}.log")


def opened_log(run: PlannedRun) -> int:
    """Create the log if there is none; returns where the next output will begin."""
    log = log_of(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return file.tell()


def last_line(run: PlannedRun, begin: int) -> str:
    """The last line in the run's log after ``begin``, without the benchmark and the method in front of it."""
    line = next((line.strip() for line in reversed(_last_lines(run, begin)) if line.strip()), "")
    return " ".join(line.removeprefix(f"{run.request.benchmark} {run.request.method}").split())


def _last_lines(run: PlannedRun, begin: int) -> list[str]:
    """The end of the run's log, after ``begin``."""
    with log_of(run).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace").split("\n")


def result(run: PlannedRun, code: int, begin: int) -> Record | str:
    """The record of a run whose process ended with ``code``, or why there is none. A reason that begins with ``BUSY``:
    another process was at work there, of this suite or of another one that writes into the same log."""
    try:
        if code == 0:
            return read_record(run.folder / RESULT)
        if code > 0 and (said := next((line for line in _last_lines(run, begin) if BUSY in line), None)):
            return said[said.index(BUSY) :]
        ending = f"killed by {signal.Signals(-code).name}" if code < 0 else last_line(run, begin)
    except InputError as error:
        ending = str(error)
    return f"{ending or f'exit code {code}'} (see {log_of(run)})"
