"""``morecl report`` from the command line: mistakes are reported before anything is written."""

from __future__ import annotations

import html
import os
import subprocess
import sys
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
        (["--out", "x.txt"], "--out x.txt: the ending names no format; use .md, .tex, .html, or give --format"),
        (["--out", "x"], "--out x: the ending names no format"),
        (["--paper-weights", "1a2b3c4d"], "'1a2b3c4d' is not like 1a2b3c4d=611 or 1a2b3c4d=200"),
        (["--format", "pdf"], "error: unknown format 'pdf'. Known: html, latex, md, text."),
        (["--format", "text", "--out", "x.md"], "--out goes with --format md, latex or html"),
        (
            ["--format", "html", "--out", "run"],
            "run is a folder; give --out the name of a file, such as run/report.html",
        ),
        (
            ["--format", "md", "--out", "run/result.json/a/b.md"],
            "run/result.json/a/b.md cannot be written: run/result.json is a file, not a folder",
        ),
    ],
)
def test_mistakes_write_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert report(monkeypatch, "run", *options, "--figures", "figures") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in run.rglob("*")) == ["result.json", "run"]


def test_report_and_figures_are_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(monkeypatch, "run", "--format", "md", "--out", "new/a.md", "--figures", "figures") == 0
    assert capsys.readouterr().out == "new/a.md\n"
    assert (run / "new" / "a.md").read_text().startswith("# Results")
    assert len(list((run / "figures").glob("*.png"))) == 7


@pytest.mark.parametrize("form", ["text", "md", "latex", "html"])
def test_a_damaged_record_is_named_in_the_report_and_beside_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], form: str
) -> None:
    (run / "<b>").mkdir()
    (run / "<b>" / "result.json").write_text('{"method": "more"')
    assert report(monkeypatch, ".", "--format", form) == 1
    out, err = (" ".join(html.unescape(text.decode()).split()) for text in capsysbinary.readouterr())
    problem = "<b>/result.json is not valid JSON (line 1: "
    assert f"left out: {problem}" in err and "MORE" in out
    assert f"Left out, since it cannot be read: {problem}" in out.replace("\\", "")


def test_stderr_names_all_damaged_records(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        (run / str(number)).mkdir()
        (run / str(number) / "result.json").write_text("{")
    assert report(monkeypatch, ".", "--format", "md") == 1
    told = capsys.readouterr()
    assert [line.split()[2] for line in told.err.splitlines()] == [f"{number}/result.json" for number in range(5)]
    assert "; and 2 more." in told.out
    (run / "run" / "result.json").unlink()
    assert report(monkeypatch, ".") == 2


@pytest.mark.parametrize(("out_is", "err_is"), [(True, True), (True, False), (False, True)])
def test_a_terminal_shows_a_damaged_record_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out_is: bool, err_is: bool
) -> None:
    (run / "b").mkdir()
    (run / "b" / "result.json").write_text("{")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: out_is)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: err_is)
    assert report(monkeypatch, ".") == 1
    out, err = capsys.readouterr()
    assert "left out: b/result.json" in err and ("Left out" in out) == (not (out_is and err_is))


@pytest.mark.parametrize(
    ("name", "start"), [("a.md", "# Results"), ("a.tex", "% Needs"), ("a.HTML", "<!doctype html>")]
)
def test_the_ending_of_the_file_chooses_the_format(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: str
) -> None:
    assert report(monkeypatch, "run", "--out", name) == 0
    assert (run / name).read_text(encoding="utf-8").startswith(start)
    assert report(monkeypatch, "run", "--out", name, "--format", "md") == 0  # which is stronger
    assert (run / name).read_text(encoding="utf-8").startswith("# Results")


def test_weights_that_are_declared_the_papers_have_its_numbers(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record("gd", "cifar10-5t", backbone="deit_small_patch16_224")
    write_record(run / "run" / "gd" / "result.json", record)
    assert report(monkeypatch, "run/gd", "--out", "a.md") == 0
    assert "[89.16 ± 0.53†]" in (run / "a.md").read_text(encoding="utf-8")
    declared = f"{record.backbone.sha256[:12]}=200"
    assert report(monkeypatch, "run/gd", "--out", "a.md", "--paper-weights", declared) == 0
    text = (run / "a.md").read_text(encoding="utf-8")
    assert "[80.44 ± 0.86]" in text and "Weights taken for the paper's, as declared" in text
    assert report(monkeypatch, "run/gd", "--out", "a.md") == 0  # not declared any more
    assert "[89.16 ± 0.53†]" in (run / "a.md").read_text(encoding="utf-8")
    assert report(monkeypatch, "run/gd", "--paper-weights", declared, "--paper-weights", declared) == 2
    assert f"{declared[:8]} is given twice" in capsys.readouterr().err


def script(command: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """``morecl COMMAND`` in a shell whose locale is ASCII only."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    line = f'"{sys.executable}" -m morecl {command}'
    return subprocess.run(line, shell=True, cwd=folder, env=os.environ | ascii_only, capture_output=True, timeout=120)


@pytest.mark.parametrize("format_", ["md", "html"])
def test_documents_are_utf8_whatever_the_locale(tmp_path: Path, format_: str) -> None:
    for seed in range(2):
        write_record(tmp_path / f"{seed}" / "result.json", make_record(benchmark="folder:Blüten", seed=seed))
    done = script(f"report . --format {format_}", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("utf-8")
    assert "folder:Blüten" in text and "±" in text


def test_the_summary_survives_a_locale_without_its_letters(tmp_path: Path) -> None:
    write_record(tmp_path / "result.json", make_record(benchmark="folder:Blüten"))
    done = script("report .", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"folder:Bl\\xfcten" in done.stdout


@pytest.mark.parametrize("options", ["", "--format md"])
def test_a_closed_stdout_is_no_crash(run: Path, options: str) -> None:
    done = script(f"report run {options} >&-", run)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_terminal_shows_names_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "result.json", make_record(benchmark="folder:p[/q]:heart:[b]"))
    assert report(monkeypatch, tmp_path) == 0
    assert "folder:p[/q]:heart:[b] in 5 tasks" in capsys.readouterr().out


def test_a_seed_that_was_run_twice_counts_once_in_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, level in enumerate((60.0, 70.0)):
        write_record(tmp_path / str(place) / "result.json", make_record(level=level))
    assert report(monkeypatch, tmp_path) == 0
    text = capsys.readouterr().out
    [line] = [line for line in text.splitlines() if line.split()[:2] == ["MORE", "Digits-5T"]]
    mean = (make_record(level=60.0).metrics.aca + make_record(level=70.0).metrics.aca) / 2
    assert line.split()[2:4] == ["1", f"{mean:.2f}"]
    assert "the same seed and class order are averaged and count as one" in " ".join(text.split())
