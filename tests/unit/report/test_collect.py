"""Finding records."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

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
    (tmp_path / "link").symlink_to("0")
    assert len(collect([tmp_path, tmp_path / "link"]).problems) == 5  # the same file
    [note] = found.notes
    assert note.startswith("Left out, since they cannot be read: ")
    assert f"{tmp_path / '0' / 'result.json'} has the format morecl.result/9" in note
    assert f"{tmp_path / '2' / 'result.json'} is not valid JSON" in note and note.endswith("; and 2 more.")
    (tmp_path / "whole" / "result.json").unlink()
    with pytest.raises(InputError, match=r"no record can be read: .*/0/.*/1/.*/2/.*/3/.*/4/"):
        collect([tmp_path])


def test_linked_folders_are_looked_into_once(tmp_path: Path) -> None:
    """Runs are moved to another disk, and links take their place."""
    for name, seed in (("runs/a", 0), ("disk/b", 1), ("disk/c", 2)):
        write_record(tmp_path / name / "result.json", make_record(seed=seed))
    runs = tmp_path / "runs"
    (runs / "b").symlink_to("../disk/b")
    (runs / "again").symlink_to(tmp_path / "disk" / "b")
    (runs / "a" / "up").symlink_to(runs)
    (runs / "lost").symlink_to("nowhere")
    assert [record.seed for record in collect([runs]).records] == [0, 1]
    (runs / "disk").symlink_to("../disk")
    found = collect([runs])
    assert sorted(record.seed for record in found.records) == [0, 1, 2] and found.problems == []


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    write_record(tmp_path / "whole" / "result.json", make_record())
    (tmp_path / "loop").mkdir()
    link = tmp_path / "loop" / "result.json"
    link.symlink_to("result.json")
    for given in ([tmp_path], [tmp_path / "whole", link], [tmp_path, link], [tmp_path, tmp_path / "loop"]):
        found = collect(given)
        assert found.records == [make_record()]
        assert found.problems == [f"{link} ({os.strerror(errno.ELOOP)})"]


@pytest.mark.parametrize("refused", [["read_text"], ["read_text", "stat"]])  # a file, or the folder that it is in
def test_a_file_that_may_not_be_read_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: list[str]
) -> None:
    whole, closed = (tmp_path / name / "result.json" for name in ("whole", "closed"))
    for path in (whole, closed):
        write_record(path, make_record())

    def refuse(name: str) -> None:  # root may read anything
        work = getattr(Path, name)

        def refusing(path: Path, **options: Any) -> Any:
            if path == closed:
                raise PermissionError(13, "Permission denied", str(path))
            return work(path, **options)

        monkeypatch.setattr(Path, name, refusing)

    for name in refused:
        refuse(name)
    found = collect([whole, closed, tmp_path])
    assert found == Collected([make_record()], [f"{closed} (Permission denied)"])
    assert found.notes == [f"Left out, since it cannot be read: {closed} (Permission denied)."]
    with pytest.raises(InputError, match=r"no record can be read: .* \(Permission denied\)"):
        collect([closed])


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_record(tmp_path / name / "result.json", make_record())
    scan = os.scandir

    def refusing(path: Any) -> Any:  # the one who runs the tests may be root, who may read anything
        if Path(path) in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    closed = {tmp_path / "b"}
    assert collect([tmp_path]).notes == [f"Left out, since it cannot be read: {tmp_path / 'b'} (Permission denied)."]
    closed = {tmp_path}
    with pytest.raises(InputError, match=r"no record can be read: .* \(Permission denied\)"):
        collect([tmp_path])
