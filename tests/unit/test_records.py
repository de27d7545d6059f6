"""The record of a run: written, read, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from morecl.errors import InputError
from morecl.files import compact_json
from morecl.records import read_record, write_record
from synthetic import make_record

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_round_trip(tmp_path: Path) -> None:
    record = make_record(seed=3)
    write_record(tmp_path / "result.json", record)
    assert read_record(tmp_path / "result.json") == record == read_record(str(tmp_path / "result.json"))
    value = json.loads((tmp_path / "result.json").read_text())
    assert value["schema"] == "morecl.result/1"
    assert value["accuracy_matrix"][0][1:] == [None] * 4
    assert len(value["auc_per_step"]) == 4


def test_a_list_is_one_line_and_a_matrix_one_per_row(tmp_path: Path) -> None:
    write_record(tmp_path / "result.json", make_record(tasks=10))
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert len(lines) < 120
    row = next(i for i, line in enumerate(lines) if "accuracy_matrix" in line)
    assert [len(json.loads(line.rstrip(","))) for line in lines[row + 1 : row + 11]] == [10] * 10
    assert [line.count(",") for line in lines if '"class_order":' in line] == [20]


def test_compact_json_is_the_same_value() -> None:
    nested = {'é"': [], "b": {}, "c": [[1, 2.5], []], "d": [{"e": None}, {"f": [True]}], "g": "x\n"}
    assert json.loads(compact_json(nested)) == nested
    with pytest.raises(ValueError, match="Out of range"):
        compact_json({"a": [float("nan")]})


def test_every_committed_record_is_read_and_written_again_without_loss(tmp_path: Path) -> None:
    paths = sorted(RESULTS.rglob("result.json"))
    assert len(paths) > 100
    for path in paths:
        record = read_record(path)
        write_record(tmp_path / "again.json", record)
        assert read_record(tmp_path / "again.json") == record


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_record().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other.result/1"}, "schema"),
        ({"schema": 2}, "schema"),
        ({"surprise": 1}, "surprise"),
        ({"seed": "one"}, "seed"),
        ({"metrics": None}, "metrics"),
        ({"accuracy_matrix": [["x"]]}, r"accuracy_matrix\.0\.0"),
    ],
)
def test_what_is_no_record_says_where(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "result.json"
    write_record(path, make_record())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=f"result.json is not a morecl record: {message}"):
        read_record(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("task_sizes", [], "task_sizes is empty"),
        ("aca_per_step", [], "aca_per_step has 0 numbers for 5 tasks"),
        ("accuracy_matrix", [], "accuracy_matrix is not 5 x 5"),
        ("accuracy_matrix", [[1.0]] * 5, "accuracy_matrix is not 5 x 5"),
        ("til_matrix", [[1.0] * 5] * 4 + [[1.0] * 4], "til_matrix is not 5 x 5"),
        ("til_matrix", [[1.0] * 5] * 4 + [[None] * 5], "til_matrix has no number"),
        ("til_matrix", [[101.0] * 5] * 5, r"til_matrix\.0\.0: 101.0 is not a percentage"),
        ("roc.true_positive_rate", [0.0, 100.0], "roc: a curve has as many x as y values"),
        ("roc", {"false_positive_rate": [], "true_positive_rate": []}, "roc: a curve has"),
        ("metrics.aca", float("nan"), r"metrics\.aca: nan is not a percentage between 0 and 100"),
        ("metrics.aca", 12.0, r"metrics.aca is 12.0, but aca_per_step gives \d"),
        ("metrics.aia", 12.0, r"metrics.aia is 12.0, but aca_per_step gives \d"),
        ("metrics.til_accuracy", 12.0, r"metrics.til_accuracy is 12.0, but til_matrix gives \d"),
        ("metrics.auc", 12.0, r"metrics.auc is 12.0, but auc_per_step gives \d"),
        ("metrics.iauc", 12.0, r"metrics.iauc is 12.0, but auc_per_step gives \d"),
        ("metrics.auc", None, r"metrics.auc is None, but auc_per_step gives \d"),
        ("auc_per_step", [], r"metrics.auc is \d.+, but auc_per_step gives None"),
        ("class_order", [], "class_order has 0 classes, the tasks 10"),
        ("metrics.aca", 1000.0, r"metrics\.aca: 1000.0 is not a percentage"),
        ("metrics.auc", -1.0, r"metrics\.auc: -1.0 is not a percentage"),
        ("metrics.bwt", -101.0, r"metrics\.bwt: -101.0 is not a difference"),
        ("seconds.train", -1.0, r"seconds\.train: Input should be greater"),
        ("seconds.train", float("inf"), r"seconds\.train: Input should be a finite"),
        ("entries.total", -1, r"entries\.total: Input should be greater"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, place: str, value: object, message: str) -> None:
    path = tmp_path / "result.json"
    write_record(path, make_record())
    record = json.loads(path.read_text())
    *outer, last = place.split(".")
    part = record
    for name in outer:
        part = part[name]
    part[last] = value
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=f"result.json is not a morecl record: {message}"):
        read_record(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"seed": ' + "1" * 5000 + "}"])
def test_json_that_python_cannot_read_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"result\.json is not a morecl record"):
        read_record(path)


def test_a_record_of_a_newer_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_record(path, make_record())
    path.write_text(path.read_text().replace("morecl.result/1", "morecl.result/2"))
    with pytest.raises(InputError, match=r"has the format morecl\.result/2.*a newer morecl is needed"):
        read_record(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_record(path, make_record())
    value = json.loads(path.read_text())
    del value["metrics"]["aca"]
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"metrics\.aca: Field required"):
        read_record(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": "morecl.result/1"'])
def test_broken_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(InputError, match=r"result\.json"):
        read_record(tmp_path / "result.json")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the record .*result\.json: No such file or directory$"):
        read_record(tmp_path / "result.json")
