"""``morecl cache list`` and ``clear``."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from calling import exit_code
from morecl.cli import cache
from morecl.data.cache import decoded, entries


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("MORECL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("pets [1]").mkdir()
    for i in range(5):
        Image.fromarray(np.full((20, 20, 3), i, np.uint8)).save(tmp_path / "pets [1]" / f"{i}.png")
    return sorted((tmp_path / "pets [1]").iterdir())


def test_listing_and_clearing(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "cache", "list") == 0
    assert capsys.readouterr().out == f"0 B of 100 GB in {tmp_path / 'cache'}\n"
    for side in (10, 20):
        decoded(files[0].parent, files, side)
    held = decoded(files[0].parent, files, 20)
    monkeypatch.setenv("MORECL_CACHE_GB", "0.5")
    assert exit_code(monkeypatch, "cache", "list") == 0
    out = capsys.readouterr().out
    rows = {line.split()[2]: line for line in out.splitlines() if line.startswith("pets_1_-")}
    assert rows.keys() == {"10", "20"} and "(now)" in rows["20"] and "(now)" not in rows["10"]
    assert "kB" in rows["20"] and "pets [1]" in "".join(out.split("\n")[1:3]).replace("\n", "")
    assert f"of 500 MB in {tmp_path / 'cache'}" in out

    assert exit_code(monkeypatch, "cache", "clear", "nowhere") == 2
    assert "there is no entry nowhere" in capsys.readouterr().err and len(entries(tmp_path / "cache")) == 2
    assert exit_code(monkeypatch, "cache", "clear") == 0
    out = capsys.readouterr().out
    assert out.startswith("removed 1, ") and "kept pets_1_-20-" in out and "in use" in out
    assert [entry.side for entry in entries(tmp_path / "cache")] == [20]
    del held
    (left,) = entries(tmp_path / "cache")
    assert exit_code(monkeypatch, "cache", "clear", left.name) == 0
    assert entries(tmp_path / "cache") == []


@pytest.mark.parametrize("width", [40, 80, 120, 150])
def test_names_stay_whole_in_a_narrow_terminal(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    folder = tmp_path / "photos of all the pets that I have ever seen"
    files[0].parent.rename(folder)
    decoded(folder, sorted(folder.iterdir()), 10)
    (entry,) = entries(tmp_path / "cache")
    console = Console(width=width, file=io.StringIO())
    monkeypatch.setattr(cache, "output_console", lambda: console)
    with console.capture() as shown:
        assert exit_code(monkeypatch, "cache", "list") == 0
    words = shown.get().split()
    assert len(entry.name) > 50 and {entry.name, "5", "10"} <= {word.strip(",") for word in words}


def test_a_bad_setting_is_named(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MORECL_CACHE_GB", "plenty")
    assert exit_code(monkeypatch, "cache", "list") == 2
    assert "MORECL_CACHE_GB='plenty' is not a number of gigabytes" in capsys.readouterr().err
    monkeypatch.setenv("MORECL_CACHE", str(files[0]))
    assert exit_code(monkeypatch, "cache", "clear") == 2
    assert "is a file; name a folder with MORECL_CACHE" in capsys.readouterr().err
