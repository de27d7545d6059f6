"""What a node checks before it works, and how often a run that is lost is tried."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from morecl.errors import InputError
from morecl.locking import claimed
from morecl.on_ray import node
from morecl.on_ray.cluster import Cluster
from morecl.on_ray.node import Surroundings, carry_out
from morecl.run import RESULT, RunRequest
from morecl.suite import child
from morecl.suite.plan import PlannedRun

REQUEST = RunRequest(method="ncm", benchmark="digits-5t")


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Surroundings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MORECL_DATA", "data")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Surroundings.here(3)


@pytest.fixture
def run(tmp_path: Path) -> PlannedRun:
    run = PlannedRun(REQUEST, tmp_path / "run", "a run")
    child.opened_log(run)
    return run


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the Python code that takes the place of ``morecl run``."""
    return lambda code: monkeypatch.setattr(child, "command", lambda run: [sys.executable, "-c", code])


def test_a_run_gets_the_users_folder_threads_and_variables(
    around: Surroundings, run: PlannedRun, script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MORECL_DATA")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # as Ray sets it on the node
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.chdir("/")
    script(
        "import os, sys; e = os.environ\n"
        "shared = e.get('MORECL_SHARED', '')\n"
        "print(os.getcwd(), e['MORECL_DATA'], e['OMP_NUM_THREADS'], '[' + e['CUDA_VISIBLE_DEVICES'] + ']' + shared)\n"
        "sys.exit(5)"
    )
    for cards, shown in ((1.0, "[3]"), (0.25, "[3]1"), (0, "[]1")):
        assert carry_out(run, around, cards, 1) == 5
        assert child.last_line(run, 0) == f"{around.directory} data 3 {shown}"


def test_the_users_threads_win_over_those_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert Surroundings.here(2).variables["OMP_NUM_THREADS"] == "5"


def test_a_node_that_is_not_like_the_others_says_so(
    around: Surroundings, run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"has morecl .*, not 0\.0\.1; install the same everywhere"):
        carry_out(run, replace(around, version="0.0.1"), 0, 1)
    with pytest.raises(InputError, match=r"has no folder .*nowhere; work in a folder that all nodes see"):
        carry_out(run, replace(around, directory=around.directory / "nowhere"), 0, 1)
    monkeypatch.setattr(node, "_APPEAR_SECONDS", 0.1)
    child.log_of(run).unlink()
    with pytest.raises(InputError, match=r"does not see .*run\.log; --out has to be on storage that all nodes see"):
        carry_out(run, around, 0, 1)


def test_a_second_try_waits_for_the_claim_of_the_lost_node(
    around: Surroundings, run: PlannedRun, script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    script("print('worked')")
    monkeypatch.setattr(node, "EXPIRE_SECONDS", 0.5)
    with claimed(run.folder):
        (run.folder / "file").touch()
        began = time.monotonic()
        with pytest.raises(InputError, match="another process is at work"):
            carry_out(run, around, 0, 2)
        assert time.monotonic() - began > 0.7
    assert carry_out(run, around, 0, 2) == 0
    assert child.last_line(run, 0) == "worked" and "try 2" in child.log_of(run).read_text()


def test_a_run_that_ended_before_its_node_was_lost_is_not_run_again(
    around: Surroundings, run: PlannedRun, script: Callable[[str], None]
) -> None:
    script("raise SystemExit(1)")
    run.folder.mkdir()
    (run.folder / RESULT).touch()
    assert carry_out(run, around, 0, 2) == 0


@pytest.mark.parametrize(
    ("ends", "tries", "reason"),
    [
        (["NodeDiedError"] * 9, 4, "lost 4 times, last: its node died"),
        (["WorkerCrashedError", 1], 2, "last words"),
        ([130, -9, 2], 3, "last words"),
        ([-9] * 9, 4, "killed by SIGKILL"),
        (["failed"], 1, "what the node said"),
        ([1], 1, "last words"),
    ],
)
def test_a_lost_run_is_tried_again_a_few_times(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch, ends: list[Any], tries: int, reason: str
) -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from morecl.on_ray.runs import OnRay

    begun: list[int] = []

    def get(task: int) -> int:
        end = ends[task]
        if end == "failed":
            raise ray.exceptions.RayTaskError("f", "traceback", InputError("what the node said"))
        if isinstance(end, str):
            error = getattr(ray.exceptions, end)
            raise error("gone\nfor ever") if end == "NodeDiedError" else error()
        return int(end)

    class Task:
        def remote(self, planned: PlannedRun, around: Surroundings, cards: float, attempt: int) -> int:
            begun.append(attempt)
            with child.log_of(run).open("a") as log:
                log.write("last words\n")
            return len(begun) - 1

    monkeypatch.setattr(ray, "remote", lambda **options: lambda function: Task())
    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: (tasks, []))
    monkeypatch.setattr(ray, "get", get)
    console = Console(file=io.StringIO(), width=200)
    job = OnRay(Cluster(1, 0, 1, 1), console).start(run)
    while not job.ended():
        pass
    outcome = job.outcome()
    assert outcome.status == "failed" and outcome.reason.startswith(reason), outcome.reason
    assert begun == list(range(1, tries + 1))
    assert isinstance(console.file, io.StringIO) and console.file.getvalue().count("it resumes elsewhere") == tries - 1
