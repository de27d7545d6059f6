"""``torchrun --nproc-per-node 2 -m morecl run``: one run, one record, and a clear end if a rank dies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import parallel_work as work
from calling import exit_code
from morecl import ranks
from morecl.records import read_record
from torchrun import torchrun


def measured(folder: Path) -> dict[str, Any]:
    """The record without times."""
    value = read_record(folder / "result.json").model_dump()
    del value["seconds"]
    return value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_the_metrics_are_those_of_one_process(two_ranks: Path, tmp_path: Path) -> None:
    work.run(tmp_path / "alone")
    alone, together = measured(tmp_path / "alone"), measured(two_ranks / "run")
    assert (alone.pop("ranks"), together.pop("ranks")) == (1, 2)
    assert alone == together
    assert names(two_ranks / "run") == ["model", "result.json", "run.json"]


def test_a_rank_that_dies_ends_the_run_and_it_can_be_resumed(two_ranks: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    shutil.copytree(two_ranks / "killed", out)
    code, shown, errors = json.loads((two_ranks / "killed.json").read_text())
    assert code not in (0, 124)
    assert shown.count("task 1/2") == 1
    told = " ".join(errors.split())
    assert "rank 0 of 2 lost the others" in told or "stopped; `torchrun" in told
    assert "torchrun --nproc-per-node 2 -m morecl resume" in told
    assert names(out) == ["checkpoint-1", "run.json"]

    resumed = torchrun("-m", "morecl", "resume", out)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("resuming after task 1 of 2") == 1
    assert resumed.stdout.count("record:") == 1
    assert measured(out) == measured(two_ranks / "run")
    state, expected = (load_file(folder / "model" / "state.safetensors") for folder in (out, two_ranks / "run"))
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert value.tobytes() == state[name].tobytes(), name


@pytest.fixture
def rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "PATIENCE", 0.0)


@pytest.mark.usefixtures("rank_1_of_2")
@pytest.mark.parametrize("command", ["suite", "tune", "learn", "serve", "list", "rescore", "bench"])
def test_other_commands_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert exit_code(monkeypatch, command, "x", "y") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"rank 1: error: `morecl {command}` runs in one process, and torchrun started 2" in told


@pytest.mark.usefixtures("rank_1_of_2")
def test_the_command_to_continue_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.command("resume x") == "torchrun --nproc-per-node 2 -m morecl resume x"
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert ranks.command("resume x") == "torchrun --nnodes 3 --nproc-per-node 2 -m morecl resume x"


def test_variables_of_other_launchers_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert (ranks.count(), ranks.rank(), ranks.is_main()) == (1, 0, True)
    assert ranks.command("resume x") == "morecl resume x"
