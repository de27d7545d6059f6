"""The runs of a suite on a Ray cluster: one task is one run, in a folder that all nodes see.

A run whose node or worker is lost is given to another, where it resumes from its last checkpoint, at most ``TRIES``
times in all.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from morecl.errors import first_line
from morecl.on_ray import node
from morecl.on_ray.cluster import Cluster
from morecl.suite import child
from morecl.suite.plan import PlannedRun
from morecl.suite.run import Outcome

TRIES = 4
_INTERRUPTED = 130  # exit code of a run that was asked to end, as a node does to all when it shuts down
_LOST = {
    "NodeDiedError": "its node died",
    "LocalRayletDiedError": "its node died",
    "WorkerCrashedError": "its worker died",
    "OutOfMemoryError": "its node ran out of memory",
}
_STOP_SECONDS = 30.0  # longer than a run gets to end tidily


class OnRay:
    """A :class:`morecl.suite.run.Place`; Ray decides which run has its turn, so there is always room."""

    poll_seconds = 0.5
    is_here = False

    def __init__(self, cluster: Cluster, console: Console):
        self.title = cluster.title
        self._cluster = cluster
        self._console = console
        self._around = node.Surroundings.here(cluster.cpus)
        self._jobs: list[RayJob] = []

    def has_room(self) -> bool:
        return True

    def start(self, run: PlannedRun) -> RayJob:
        job = RayJob(run, self._cluster, self._around, self._console)
        self._jobs.append(job)
        return job

    def stop(self) -> None:
        """Interrupt the tasks, which stop their runs; kill what does not end, which stops the run too."""
        import ray

        tasks = [job.task for job in self._jobs if not job.over]
        for task in tasks:
            ray.cancel(task)
        left = tasks
        try:
            if tasks:
                _, left = ray.wait(tasks, num_returns=len(tasks), timeout=_STOP_SECONDS)
        finally:
            for task in left:
                with suppress(Exception):
                    ray.cancel(task, force=True)


class RayJob:
    """A run as a task of the cluster, or as several, if nodes are lost."""

    def __init__(self, run: PlannedRun, cluster: Cluster, around: node.Surroundings, console: Console):
        self.run = run
        self.over = False
        self._there = replace(run, folder=run.folder.absolute())
        self._around = around
        self._resources = cluster.resources(run.request.resolve().config.device)
        self._console = console
        self._tries = 0
        self._outcome: Outcome | None = None
        self._submit()

    def ended(self) -> bool:
        import ray

        if self._outcome is None and ray.wait([self.task], timeout=0)[0]:
            self._end()
        return self._outcome is not None

    def progress(self) -> str | None:
        return child.last_line(self.run, self._begin) or None

    def outcome(self) -> Outcome:
        assert self._outcome is not None
        return self._outcome

    def _submit(self) -> None:
        import ray

        self._tries += 1
        self._begin = child.opened_log(self.run)
        options = {**self._resources, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self.task: Any = ray.remote(**options)(node.carry_out).remote(
            self._there, self._around, self._resources["num_gpus"], self._tries
        )

    def _end(self) -> None:
        """Take what the task returned; submit it again if its node, its worker or its process was lost."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            code = ray.get(self.task)
            result = child.result(self.run, code, self._begin)
            lost = "its process was stopped" if code < 0 or code == _INTERRUPTED else None
        except RayTaskError as error:
            lost, result = None, node.reason(error)
        except RayError as error:
            lost = _LOST.get(type(error).__name__) or f"{type(error).__name__}: {first_line(error)}"
            result = f"lost {self._tries} times, last: {lost} (see {child.log_of(self.run)})"
        if lost and self._tries < TRIES:
            title, count = escape(self.run.title), f"try {self._tries + 1} of {TRIES}"
            text = f"[yellow]lost[/yellow]     {title}: {escape(lost)}; it resumes elsewhere, {count}"
            self._console.print(text, highlight=False, soft_wrap=True)
            self._submit()
            return
        self.over = True
        self._outcome = Outcome.of(self.run, result)
