"""What a record says about the code it was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from morecl.run.measurements import source_fingerprint


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("x = 1\n")
    (tmp_path / "two.py").write_text("y = 2\n")
    return tmp_path


def test_it_is_that_of_the_python_files_alone(package: Path) -> None:
    before = source_fingerprint(package)
    (package / "notes.txt").write_text("not code")
    assert source_fingerprint(package) == before and len(before) == 12
    assert source_fingerprint(package / "nothing") == "unknown"


@pytest.mark.parametrize("change", ["content", "name", "moved text"])
def test_any_change_shows(package: Path, change: str) -> None:
    before = source_fingerprint(package)
    if change == "content":
        (package / "two.py").write_text("y = 3\n")
    elif change == "name":
        (package / "two.py").rename(package / "three.py")
    else:  # the same bytes in the same order, cut elsewhere
        (package / "a" / "one.py").write_text("x = 1")
        (package / "two.py").write_text("\ny = 2\n")
    assert source_fingerprint(package) != before
