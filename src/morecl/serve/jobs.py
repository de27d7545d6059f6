"""Lessons given over HTTP: one at a time, the others wait; each in a process of its own, so that answers stay fast."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from morecl.cores import usable_cores
from morecl.errors import InputError
from morecl.images import ImageArray
from morecl.serve.limits import Limits, RefusedError, not_kept
from morecl.serve.teaching import Order

State = Literal["queued", "running", "done", "failed", "cancelled"]
FINAL = frozenset({"done", "failed", "cancelled"})
COMMAND = (sys.executable, "-P", "-m", "morecl.serve.teaching")
TICK = 1.0  # seconds between two looks at the model's folder


@dataclass
class Job:
    """A lesson and how far it is. Changed only by :class:`Jobs`, under its lock."""

    classes: dict[str, int]  # name -> images
    more: bool
    unreadable: list[str] = field(default_factory=list)  # uploads that were left out, and why
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    state: State = "queued"
    step: str = "waiting"
    share: float = 0.0  # of the work that is done, 0 to 1
    seconds_left: float | None = None
    cancelling: bool = False
    error: str | None = None
    version: int | None = None  # in use after it
    note: str | None = None  # why it learned nothing, which is no mistake
    lessons: list[dict[str, Any]] = field(default_factory=list)  # morecl.classifier.Lesson
    changes: int = 0  # grows with each change

    @property
    def ended(self) -> bool:
        return self.state in FINAL

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Labels(NamedTuple):
    """The class of each image of a lesson, and the name of the file that it came in."""

    names: list[str]
    files: list[str]


class Jobs:
    """The queue of lessons and the thread that runs them.

    Args:
        uploads: private folder for the images of lessons that wait or run.
        refresh: loads the newest version from disk and puts it in use; called after each lesson and, when there is
            nothing to do, every second, because others may change the model as well.
        newest: number of the newest version on disk, to tell whether a killed lesson had been saved.
        ended: told the state of each job that ends.
    """

    def __init__(
        self,
        model: Path,
        uploads: Path,
        *,
        refresh: Callable[[], None],
        newest: Callable[[], int],
        ended: Callable[[str], None] = lambda state: None,
        device: str | None = None,
        limits: Limits | None = None,
        command: Sequence[str] = COMMAND,
    ):
        self._model, self._uploads, self._device, self._command = model, uploads, device, list(command)
        self._refresh, self._newest, self._on_end = refresh, newest, ended
        self._limits = limits or Limits()
        self._jobs: dict[str, tuple[Job, Labels]] = {}  # in order of arrival
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self.changing = threading.Lock()  # held while a lesson runs, or whoever else changes the model
        self._thread = threading.Thread(target=self._work, name="lessons", daemon=True)
        self._thread.start()

    # ---- what requests call -----------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise :class:`RefusedError` if no further lesson can wait."""
        with self._changed:
            if self._closed:
                raise RefusedError(503, "the server is stopping")
            if sum(job.state == "queued" for job, _ in self._jobs.values()) >= self._limits.queued_jobs:
                raise RefusedError(503, "too many lessons wait already; try again later", retry_after=30)

    def submit(self, images: ImageArray, labels: Labels, *, more: bool, unreadable: Sequence[str] = ()) -> Job:
        """Put a lesson in the queue: images (N, S, S, 3) and what belongs to each."""
        self.check_room()
        job = Job(dict(Counter(labels.names)), more, list(unreadable))
        folder = self._folder(job)
        try:
            folder.mkdir(mode=0o700)
            np.save(folder / "images.npy", images, allow_pickle=False)
            with self._changed:
                self.check_room()
                self._jobs[job.id] = job, labels
                self._drop_old()
                self._changed.notify_all()
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise not_kept(error) from error
            raise
        return job

    def get(self, identifier: str) -> Job:
        with self._changed:
            if identifier not in self._jobs:
                raise RefusedError(404, "there is no such job; finished ones are dropped after a while")
            return self._jobs[identifier][0]

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        with self._changed:
            return [job.as_dict() for job, _ in reversed(self._jobs.values())]

    def snapshot(self, job: Job) -> dict[str, Any]:
        with self._changed:
            return job.as_dict()

    @property
    def waiting(self) -> int:
        """Jobs that wait or run."""
        with self._changed:
            return sum(not job.ended for job, _ in self._jobs.values())

    def cancel(self, job: Job) -> None:
        """Stop it. What a running one has learned is lost, unless it was already saved."""
        with self._changed:
            if job.ended:
                raise RefusedError(409, f"this job has ended already: {job.state}")
            if job.state == "queued":
                self._end(job, "cancelled")
                return
            self._change(job, cancelling=True, step="stopping")
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Stop the running lesson and forget those that wait."""
        with self._changed:
            self._closed = True
            for job, _ in self._jobs.values():
                if not job.ended:
                    self.cancel(job)
            self._changed.notify_all()
        self._thread.join()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None, timeout=TICK)
                found = None if self._closed else self._next()
                if self._closed:
                    return
            if found is None:
                self._refresh_quietly()
                continue
            with self.changing:
                try:
                    self._teach(*found)
                except Exception as error:  # this thread must go on, or no further lesson would ever begin
                    logging.getLogger(__name__).exception("a lesson failed")
                    self._end(found[0], "failed", error=f"the lesson failed: {type(error).__name__}: {error}")

    def _next(self) -> tuple[Job, Labels] | None:
        return next((entry for entry in self._jobs.values() if entry[0].state == "queued"), None)

    def _teach(self, job: Job, labels: Labels) -> None:
        before: int | None = None  # the version that is taught, once the process has the model for itself
        last: dict[str, Any] = {}
        try:
            process = self._start(job, labels)
            if process is None:
                return
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    with suppress(ValueError):
                        last = json.loads(line)
                        before = last.get("from", before)
                        self._hear(job, last)
                assert process.stdin is not None
                with suppress(OSError):
                    process.stdin.close()
            code = process.returncode
        except OSError as error:
            self._end(job, "failed", error=f"the lesson could not be started: {error.strerror or error}")
            return
        finally:
            with self._changed:
                self._process = None
            shutil.rmtree(self._folder(job), ignore_errors=True)
        if "error" in last:
            self._end(job, "failed", error=str(last["error"]))
        elif "version" in last or (before is not None and self._newest() > before):  # saved, even if killed right then
            self._change(job, step="switching to the new version", share=0.98, seconds_left=None)
            try:
                self._refresh()
            except InputError as error:
                self._end(job, "failed", error=f"saved, but the new version cannot be loaded: {error}")
                return
            found = {"version": last.get("version"), "lessons": last.get("lessons", []), "note": last.get("note")}
            self._end(job, "done", **found)
        elif job.cancelling:
            self._end(job, "cancelled")
        else:
            killed = f"the process that learned was ended (code {code}); the model is as it was before"
            self._end(job, "failed", error=killed)

    def _start(self, job: Job, labels: Labels) -> subprocess.Popen[str] | None:
        """The process, with its order given; ``None`` if the job was cancelled meanwhile."""
        images = str(self._folder(job) / "images.npy")
        order = Order(str(self._model), images, labels.names, labels.files, job.more, self._device)
        threads = str(max(1, usable_cores() // 2))
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | dict(os.environ)
        with self._changed:
            if job.ended:
                return None
            self._change(job, state="running", step="starting")
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env=environment,
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it ended at once; its exit code tells
            process.stdin.write(json.dumps(asdict(order)) + "\n")
            process.stdin.flush()  # and stays open: its end tells the process that the server is gone
        return process

    def _hear(self, job: Job, event: dict[str, Any]) -> None:
        if "step" in event and not job.cancelling:
            share = max(job.share, float(event.get("share", 0.0)))
            self._change(job, step=str(event["step"]), share=share, seconds_left=event.get("left"))

    def _refresh_quietly(self) -> None:
        with suppress(InputError):  # the service keeps the reason; the version in use goes on
            self._refresh()

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _folder(self, job: Job) -> Path:
        return self._uploads / job.id

    def _change(self, job: Job, **values: Any) -> None:
        with self._changed:
            for key, value in values.items():
                setattr(job, key, value)
            job.changes += 1
            self._changed.notify_all()

    def _end(self, job: Job, state: State, **values: Any) -> None:
        shutil.rmtree(self._folder(job), ignore_errors=True)
        step = {"done": "learned", "failed": "failed", "cancelled": "cancelled"}[state]
        share = 1.0 if state == "done" else job.share
        self._change(job, state=state, step=step, share=share, seconds_left=None, cancelling=False, **values)
        self._on_end(state)

    def _drop_old(self) -> None:
        ended = [job.id for job, _ in self._jobs.values() if job.ended]
        for identifier in ended[: max(0, len(ended) - self._limits.kept_jobs)]:
            del self._jobs[identifier]
