"""``morecl bench`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calling import exit_code
from morecl.bench.prediction import PredictionSize
from morecl.methods import METHODS

SMALL = ["--quick", "--device", "cpu", "--image-size", "8", "--set", "bottleneck=4", "--set", "epochs=1"]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    return exit_code(monkeypatch, "bench", *arguments)


def test_costs_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cost.json"
    assert call(monkeypatch, "--methods", "agem,ncm", *SMALL, "--out", file) == 0
    shown = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["schema"] == "morecl.cost/2"
    assert (record["backbone"], record["image_size"], record["limit"]) == ("vit_mini_patch4_32", 8, 1.5)
    assert [(row["method"], round(row["passes"], 3)) for row in record["methods"]] == [
        ("finetune", 1.0),
        ("agem", 2.0),
        ("ncm", 0.333),
    ]
    for row in record["methods"]:
        assert f" {row['method']} " in shown
        assert len(row["after_task"]) == record["tasks"]


def test_predictions_are_printed_written_and_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = PredictionSize(tasks=(1, 3), images=4, repeats=1)
    monkeypatch.setattr("morecl.bench.prediction.QUICK_PREDICTION", size)
    files = tmp_path / "bench.json", tmp_path / "bench.svg"
    assert call(monkeypatch, "--prediction", *SMALL, "--out", files[0], "--figure", files[1]) == 0
    record = json.loads(files[0].read_text())
    assert record["schema"] == "morecl.prediction/1" and (record["images"], record["image_size"]) == (4, 8)
    assert [(row["method"], row["tasks"]) for row in record["times"]] == [
        (method, tasks) for method in ("more", "morerp") for tasks in (1, 3)
    ]
    assert "times the first" in capsys.readouterr().out
    assert files[1].read_text().startswith("<?xml")
    assert call(monkeypatch, "--prediction", *SMALL, "--set", "projection=20") == 2
    assert "leave out the setting projection" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [[], ["--methods", "ncm"], ["--profile"], ["--prediction"]])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("folder", "folder is a folder; give --out the name of a file, such as folder/bench.json"),
        ("file/bench.json", "file/bench.json cannot be written: file is a file"),
    ],
)
def test_a_bad_out_path_is_reported_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: list[str],
    out: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for module in ("speed.bench", "cost.measure", "profile.measure", "prediction.measure"):
        monkeypatch.setattr(f"morecl.bench.{module}", lambda *_: pytest.fail("measured"))
    assert call(monkeypatch, *kind, "--quick", "--out", out) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "derp"], "unknown method 'derp'; did you mean 'derpp'?"),
        (["--methods", ""], f"Known: {', '.join(sorted(METHODS))}"),
        (["--methods", "all", "--set", "epoch=1"], "unknown setting 'epoch'; did you mean 'epochs'?"),
        (["--methods", "ncm", "--set", "memory_size=1"], "unknown setting 'memory_size'"),
        (["--methods", "ncm", "--image-size", "1"], "image_size=1"),
        (["--set", "epoch=1"], "unknown setting 'epoch'; did you mean 'epochs'?"),
        (["--prediction", "--set", "epoch=1"], "unknown setting 'epoch'; did you mean 'epochs'?"),
        (["--prediction", "--figure", "times.pdf"], "times.pdf is no name for a figure; end it in .svg or .png"),
        (["--prediction", "--figure", "/"], "/ is a folder; give --figure the name of a file"),
        (["--prediction", "--methods", "more"], "leave out --methods"),
        (["--prediction", "--profile"], "give one at a time"),
        (["--figure", "times.svg"], "add --prediction"),
    ],
)
def test_bad_arguments_are_reported_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    assert call(monkeypatch, *arguments, "--quick", "--out", tmp_path / "cost.json") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
