"""Finding records."""

from __future__ import annotations

from pathlib import Path

import pytest

from morecl.errors import InputError
from morecl.records import write_record
from morecl.report.collect import Collected, collect
from synthetic import make_record


def test_collect_searches_folders_and_counts_a_record_once(tmp_path: Path) -> None:
    first, second = make_record(seed=0), make_record(seed=1)
    write_record(tmp_path / "a" / "b" / "result.json", first)
    write_record(tmp_path / "c" / "result.json", second)
    write_record(tmp_path / "copy" / "result.json", first)
    write_record(tmp_path / "c" / "other.json", make_record(seed=2))
    assert collect([tmp_path, tmp_path / "c" / "result.json"]).records == [first, second]
    assert collect([tmp_path / "c" / "other.json"]) == Collected([make_record(seed=2)], [])


def test_collect_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no result\.json found in .*empty"):
        (tmp_path / "empty").mkdir()
        collect([tmp_path / "empty"])
    with pytest.raises(InputError, match=r"there is no file or folder .*nowhere"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        collect([tmp_path])


def test_a_damaged_record_is_no_reason_to_lose_the_others(tmp_path: Path) -> None:
    write_record(tmp_path / "whole" / "result.json", make_record())
    assert collect([tmp_path]).notes == []
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "result.json").write_text("{" if number else '{"schema": "morecl.result/9"}')
    found = collect([tmp_path])
    assert found.records == [make_record()] and len(found.problems) == 5
    [note] = found.notes
    assert note.startswith("5 records that cannot be read are left out: ")
    assert f"{tmp_path / '0' / 'result.json'} has the format morecl.result/9" in note
    assert f"{tmp_path / '2' / 'result.json'} is not valid JSON" in note and note.endswith("; and 2 more.")
