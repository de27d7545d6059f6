"""``morecl report`` from the command line: what is wrong is said before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from calling import exit_code
from morecl.records import write_record
from synthetic import make_record


def report(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    return exit_code(monkeypatch, "report", *arguments)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one record in it."""
    write_record(tmp_path / "run" / "result.json", make_record(tasks=2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x.txt"], "--out goes with --format md, latex or html"),
        (
            ["--format", "html", "--out", "run"],
            "run is a folder; give --out the name of a file, such as run/report.html",
        ),
    ],
)
def test_mistakes_write_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert report(monkeypatch, "run", *options, "--figures", "figures") == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in run.rglob("*")) == ["result.json", "run"]


def test_report_and_figures_are_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(monkeypatch, "run", "--format", "md", "--out", "new/a.md", "--figures", "figures") == 0
    assert capsys.readouterr().out == "new/a.md\n"
    assert (run / "new" / "a.md").read_text().startswith("# Results")
    assert len(list((run / "figures").glob("*.png"))) == 6


def test_the_terminal_shows_names_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "result.json", make_record(benchmark="folder:p[/q]:heart:[b]"))
    assert report(monkeypatch, tmp_path) == 0
    assert "folder:p[/q]:heart:[b] in 5 tasks" in capsys.readouterr().out
