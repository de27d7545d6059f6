"""``morecl suite`` and ``morecl tune`` from the command line, with real but small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calling import exit_code
from morecl.records import read_record
from morecl.run import RUN, RunRequest, Watcher, launch
from morecl.suite import child
from morecl.suite import run as run_suite

SUITE = """
description = "small"
[settings]
image_size = 8
bottleneck = 4
epochs = 1

[[runs]]
methods = ["finetune"]
benchmarks = ["digits-5t"]
variant = "small"
train_per_class = 4
test_per_class = 2

[[runs]]
methods = ["ncm"]
benchmarks = ["mnist-5t"]
variant = "tiny"
train_per_class = 2
tasks = 2
"""


def write_mnist(root: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(10), 3)
    images = rng.integers(0, 255, (30, 28, 28), dtype=np.uint8)
    np.savez(
        root / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels, classes=list("0123456789")
    )


def interrupted(folder: Path, request: RunRequest) -> None:
    """A run that was stopped after its first task."""

    def after_first(index: int, *_: Any) -> None:
        if index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.start(request, folder, watcher=Watcher(task=after_first))
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "checkpoint-1", RUN]


def test_runs_resumes_survives_and_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data, file = tmp_path / "all [runs]", tmp_path / "data", tmp_path / "mine.toml"
    data.mkdir()
    file.write_text(SUITE)
    (data / "mnist.npz").write_bytes(b"not an archive")
    begun = out / "digits-5t" / "finetune-small" / "order-0-seed-0"
    settings = {"image_size": 8, "bottleneck": 4, "epochs": 1, "device": "cpu"}
    request = RunRequest(
        method="finetune",
        benchmark="digits-5t",
        settings=settings,
        data_root=str(data),
        train_per_class=4,
        test_per_class=2,
    )
    interrupted(begun, request)
    command = ["suite", file, "--out", out, "--data-root", data, "--device", "cpu", "--jobs", 2]

    assert exit_code(monkeypatch, *command) == 1
    shown = capsys.readouterr().out
    assert "mnist.npz is not an .npz file" in shown and "1 of 2 runs failed" in shown
    assert not (out / "mnist-5t" / "ncm-tiny" / "order-0-seed-0").exists()
    assert "resuming after task 1 of 5" in begun.with_name("order-0-seed-0.log").read_text()
    whole = launch.start(request, tmp_path / "whole")
    assert read_record(begun / "result.json").accuracy_matrix == whole.accuracy_matrix

    write_mnist(data)
    written = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert exit_code(monkeypatch, *command) == 0
    shown = capsys.readouterr().out
    assert "2 runs, 1 finished before, 1 to do" in shown and shown.count("was finished") == 1
    assert f"morecl report '{out}' --format html" in shown
    assert {path: path.stat().st_mtime_ns for path in written} == written
    fresh = read_record(out / "mnist-5t" / "ncm-tiny" / "order-0-seed-0" / "result.json")
    assert (fresh.data.train_images, fresh.data.test_images) == (20, 30)
    assert fresh.config["image_size"] == 8 and fresh.config["device"] == "cpu" and len(fresh.task_sizes) == 2

    def nothing_may_start(*_: Any) -> None:
        raise AssertionError("a finished suite started a process")

    monkeypatch.setattr(child, "Child", nothing_may_start)
    assert exit_code(monkeypatch, *command) == 0
    assert capsys.readouterr().out.count("was finished") == 2
    assert exit_code(monkeypatch, *command, "--set", "epochs=2") == 2
    assert "holds a run with epochs = 1, not 2" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["suite", "smok"], "did you mean 'smoke'"),
        (["suite", "svhn", "--seeds", "a"], "--seeds wants whole numbers"),
        (["tune", "digits-5t", "--lr", "1", "--epochs", "1.5", "--out", "x"], "--epochs wants whole numbers"),
        (["tune", "digits-5t", "--lr", "fast", "--epochs", "1", "--out", "x"], "--lr wants numbers"),
        (["tune", "digits-5t", "--lr", "0.1", "--epochs", "0", "--out", "x"], "epochs=0"),
        (["tune", "digits-5t", "--lr", "0.1", "--epochs", "1", "--validation", "2", "--out", "x"], "between 0 and 1"),
        (["tune", "digits-5t", "--method", "ncm", "--lr", "1", "--epochs", "1", "--out", "x"], "trains nothing"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_interrupted_commands_say_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_suite, "run_suite", interrupt)
    monkeypatch.setattr(launch, "start", interrupt)
    file = tmp_path / "mine.toml"
    file.write_text('description = "a"\n[[runs]]\nmethods = ["ncm"]\nbenchmarks = ["digits-5t"]\n')
    tune = ["tune", "digits-5t", "--method", "finetune", "--lr", "0.1", "--epochs", "1", "--out", "x"]
    for command in (["suite", "mine.toml"], tune):
        assert exit_code(monkeypatch, *command) == 130
        assert "the same command continues" in capsys.readouterr().err


def test_tune_prints_what_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "digits-5t", "--method", "finetune", "--lr", "0.001", "--epochs", "1", "--out", tmp_path / "out"]
    command += ["--train-per-class", 4, "--validation", 0.25, "--set", "image_size=8", "--set", "bottleneck=4"]
    assert exit_code(monkeypatch, *command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "best: --set lr=0.001 --set epochs=1" in shown and "the test set was not used" in shown
    assert json.loads((tmp_path / "out" / "tune.json").read_text())["best"]["epochs"] == 1


def test_there_is_no_such_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "list", "suits") == 2
    assert "error: unknown list 'suits'; did you mean 'suites'?" in capsys.readouterr().err


def test_list_suites(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "list", "suites") == 0
    shown = capsys.readouterr().out
    assert "table-main" in shown and "smoke" in shown
