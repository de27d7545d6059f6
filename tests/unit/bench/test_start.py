"""The time until a new process has made a training step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import morecl
from morecl.bench import start

SETTINGS = {"device": "cpu", "image_size": 8, "bottleneck": 4, "batch_size": 8}


@pytest.fixture(autouse=True)
def _quick_python(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setenv("PYTHONPATH", str(Path(morecl.__file__).parents[1]))  # as the process that has the imports


def test_it_takes_as_long_as_the_process_until_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "import time; from morecl.training import ProtectedSGD as S; f = S.step; "
    wait += "S.step = lambda *a: (time.sleep(1.5), f(*a), print('a step', flush=True))[1]; "
    monkeypatch.setattr(start, "PROGRAM", wait + start.PROGRAM)
    monkeypatch.setattr(start, "DONE", "a step")  # what the process says within its first step
    assert start.first_step(SETTINGS) > 1.5


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="unknown setting 'epoch'; did you mean 'epochs'"):
        start.first_step({"epoch": 1})
