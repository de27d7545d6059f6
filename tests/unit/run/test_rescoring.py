"""Rescoring: the record of a run that would have answered differently, without training again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from morecl import load
from morecl.errors import InputError
from morecl.records import Record, read_record
from morecl.run import RunRequest, rescore, start

SMALL: dict[str, Any] = {"epochs": 1, "lr": 0.005, "image_size": 16, "bottleneck": 4, "back_update_epochs": 1}
SMALL |= {"device": "cpu"}


def request(method: str = "more", keep: bool = True, **settings: Any) -> RunRequest:
    return RunRequest(
        method=method,
        benchmark="digits-5t",
        settings=SMALL | settings,
        tasks=3,
        train_per_class=8,
        test_per_class=4,
        keep_checkpoints=keep,
    )


def results(record: Record) -> dict[str, Any]:
    """All that does not depend on the clock."""
    return record.model_dump(exclude={"seconds", "peak_memory_bytes"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "more"
    start(request(), folder)
    return folder


@pytest.mark.parametrize(
    "method, settings", [("more", {"coefficient": False}), ("morerp", {"projection": 50, "ridge_weight": 0.5})]
)
def test_a_rescored_record_is_that_of_a_run_of_its_own(
    trained: Path, tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    out, record = rescore(trained, method, settings)
    again = start(request(method, **settings), tmp_path / "again")
    assert results(record) == results(again)
    assert results(record) != results(read_record(trained / "result.json"))
    assert read_record(out / "result.json") == record
    assert out.parent == trained
    assert load(out / "model").name == method


def test_the_folder_has_one_name_however_a_setting_is_written(trained: Path) -> None:
    folders = {rescore(trained, "more", {"coefficient": value})[0].name for value in (False, "off", "0")}
    assert folders == {"rescored-more-coefficient-false"}


@pytest.mark.parametrize(
    "method, settings, message",
    [
        ("hat", {}, "holds a run of 'more'; only a run of 'hat' itself can be rescored by it"),
        ("more", {"epochs": 2}, "trained with other settings: epochs=2 instead of 1"),
        ("more", {"temperture": 1.0}, "did you mean 'temperature'"),
        ("mroe", {}, "did you mean 'more'"),
        ("more", {"coefficient": False, "c": 3.0}, "c would change nothing with coefficient=false"),
    ],
)
def test_what_would_need_training_is_refused(
    trained: Path, method: str, settings: dict[str, Any], message: str
) -> None:
    before = sorted(path.name for path in trained.iterdir())
    with pytest.raises(InputError, match=message):
        rescore(trained, method, settings)
    assert sorted(path.name for path in trained.iterdir()) == before


def test_a_rescored_record_says_whether_the_run_or_rescoring_shared_a_card(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rescore(trained, "more", {"c": 10.0})[1].shared is False
    monkeypatch.setenv("MORECL_SHARED", "1")
    assert rescore(trained, "more", {"c": 15.0})[1].shared is True
    start(request(), tmp_path / "shared")
    monkeypatch.delenv("MORECL_SHARED")
    assert rescore(tmp_path / "shared", "more", {"c": 10.0})[1].shared is True


def test_a_run_without_its_checkpoints_is_refused(tmp_path: Path) -> None:
    start(request(keep=False), tmp_path / "run")
    with pytest.raises(InputError, match="--keep-checkpoints"):
        rescore(tmp_path / "run", "more", {"coefficient": False})


def test_a_run_that_has_not_finished_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "run.json").write_text(request().model_dump_json(), encoding="utf-8")
    with pytest.raises(InputError, match=f"is not finished: `morecl resume '{folder}'` first"):
        rescore(folder, "more", {"coefficient": False})


def test_a_method_that_does_not_fit_is_refused_before_checkpoints_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    asked = RunRequest(method="ncm", benchmark="digits-5t")
    (folder / "run.json").write_text(asked.model_dump_json(), encoding="utf-8")
    with pytest.raises(InputError, match="holds a run of 'ncm'; method 'morerp' uses networks that 'more' trains"):
        rescore(folder, "morerp")


def test_starting_over_removes_rescored_records(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    rescore(folder, None, {"temperature": 1.0})
    assert (folder / "rescored-more-temperature-1.0" / "result.json").is_file()
    start(request(), folder, overwrite=True)
    assert not list(folder.glob("rescored-*"))
