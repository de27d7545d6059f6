"""A run's process that may not outlive the one that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import os, pathlib, sys, time
from morecl.run import RunRequest
from morecl.suite import child
from morecl.suite.plan import PlannedRun
child.command = lambda run: [sys.executable, "-c", sys.argv[1], str(run.folder)]
run = PlannedRun(RunRequest(method="ncm", benchmark="digits-5t"), pathlib.Path(sys.argv[2]), "run")
child.Child(run, dict(os.environ), cwd=run.folder.parent)
time.sleep(60)
"""
RUN = """
import os, pathlib, sys, time
from morecl.interrupts import sigterm_as_interrupt
here = pathlib.Path(sys.argv[1]).parent
try:
    with sigterm_as_interrupt():
        (here / "began.txt").write_text(os.getcwd())
        time.sleep(60)
except KeyboardInterrupt:
    (here / "tidy.txt").write_text("tidied up")
"""


def wait_for_text(file: Path) -> str:
    until = time.monotonic() + 30
    while not file.exists() or not file.read_text():
        assert time.monotonic() < until, file
        time.sleep(0.02)
    return file.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_run_ends_tidily_when_its_parent_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, RUN, str(tmp_path / "run")], env=environment)
    try:
        assert wait_for_text(tmp_path / "began.txt") == str(tmp_path)
    finally:
        parent.kill()
        parent.wait()
    assert wait_for_text(tmp_path / "tidy.txt") == "tidied up"
