"""Files and folders appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from morecl.errors import InputError
from morecl.files import atomic_folder, atomic_path, check_target, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_json(tmp_path: Path) -> None:
    write_text(tmp_path / "deep" / "er" / "a.txt", "ünïcode")
    assert (tmp_path / "deep" / "er" / "a.txt").read_text(encoding="utf-8") == "ünïcode"
    write_json(tmp_path / "a.json", {"x": [1, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1, None]}
    write_json(tmp_path / "a.json", 2)
    assert (tmp_path / "a.json").read_text() == "2\n"
    assert names(tmp_path) == ["a.json", "deep"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": object()}])
def test_what_is_not_json_leaves_the_old_file(tmp_path: Path, value: object) -> None:
    write_json(tmp_path / "a.json", 1)
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", value)
    assert (tmp_path / "a.json").read_text() == "1\n"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_file_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_path(tmp_path / "new.bin") as path:
        path.write_bytes(b"half")
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_folder_leaves_the_old_one(tmp_path: Path, error: type[BaseException]) -> None:
    with atomic_folder(tmp_path / "f") as folder:
        (folder / "a").write_text("old")
    with pytest.raises(error), atomic_folder(tmp_path / "f") as folder:
        (folder / "a").write_text("new")
        raise error
    assert names(tmp_path) == ["f"]
    assert (tmp_path / "f" / "a").read_text() == "old"


def test_a_full_disk_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    for write, name in ((atomic_path, "file.txt"), (atomic_folder, "folder")):
        with pytest.raises(OSError, match="No space") as caught, write(tmp_path / name):
            raise OSError(28, "No space left on device")
        assert caught.value.filename == str(tmp_path / name)
        with pytest.raises(OSError, match="No space") as caught, write(tmp_path / name) as temporary:
            raise OSError(28, "No space left on device", str(temporary / "inside"))
        assert caught.value.filename == str(tmp_path / name) and str(caught.value).endswith(f"{name}'")
        with pytest.raises(OSError, match="denied") as caught, write(tmp_path / name):
            raise OSError(13, "Permission denied", "elsewhere")
        assert caught.value.filename == "elsewhere"


def test_a_full_disk_names_a_file_given_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (atomic_path, atomic_folder):
        with pytest.raises(OSError, match="No space") as caught, write(Path("sub") / "target") as temporary:
            raise OSError(28, "No space left on device", str(temporary.absolute() / "inside"))
        assert caught.value.filename == str(Path("sub") / "target")


def test_a_new_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with atomic_folder(tmp_path / "f") as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / content).write_text(content)
    assert names(tmp_path) == ["f"]
    assert names(tmp_path / "f" / "sub") == ["two"]


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "f") as folder:
        (folder / "a").write_text("x")
        assert not (tmp_path / "f").exists()
    with atomic_path(tmp_path / "g") as path:
        path.write_text("x")
        assert not (tmp_path / "g").exists()


def test_a_failed_exchange_keeps_one_complete_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename to the final name fails: what was there before is still whole, under one of two names."""
    with atomic_folder(tmp_path / "f") as folder:
        (folder / "a").write_text("old")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "f":
            raise OSError("disk gone")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="disk gone"), atomic_folder(tmp_path / "f") as folder:
        (folder / "a").write_text("new")
    whole = [path for path in (tmp_path / "f", tmp_path / ".f.old") if path.exists()]
    assert [(path / "a").read_text() for path in whole] == ["old"]
    assert len(names(tmp_path)) == 1


def test_permissions_follow_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking for it: that sets it for a moment, for all threads."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            write_text(tmp_path / "a", "x")
            with atomic_folder(tmp_path / "f") as folder:
                write_text(folder / "b", "x")
                save_file({"x": np.zeros(2)}, folder / "c.safetensors")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
        assert (tmp_path / "f").stat().st_mode & 0o777 == 0o750
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "f").iterdir()} == {0o640}
    finally:
        os.umask(before)


def test_a_place_that_cannot_be_written_is_refused_and_others_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.html").write_text("old")
    for place in ("old.html", "new.html", "deep/er/new.html"):
        check_target(tmp_path / place, "x.html")
    monkeypatch.chdir(tmp_path)
    check_target(Path("new.html"), "x.html")
    assert names(tmp_path) == ["old.html"] and (tmp_path / "old.html").read_text() == "old"

    def denied(dir: Path) -> None:
        assert dir == tmp_path
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", denied)  # the one who runs the tests may be root
    for place in ("old.html", "deep/er/new.html"):
        with pytest.raises(InputError, match=rf"{place} cannot be written \(Permission denied\); give --out another"):
            check_target(tmp_path / place, "x.html")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")
def test_nothing_can_be_written_to_proc_even_by_root() -> None:
    with pytest.raises(InputError, match=r"/proc/x\.html cannot be written"):
        check_target(Path("/proc/x.html"), "x.html")


def test_a_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path} is a folder; give the name of a file"):
        write_text(tmp_path, "x")
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", [".", "..", ""])
def test_the_working_folder_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="name a new folder"), atomic_folder(Path(place)):
        pass
    assert names(tmp_path) == ["here"] and names(tmp_path / "here") == []


def test_a_file_is_no_place_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(InputError, match="is a file; give the name of a folder"), atomic_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_text() == "x"
