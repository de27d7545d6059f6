"""The commands for one's own images, as a user calls them: PNG folders of digits, the shipped backbone, a CPU.

Lessons are shorter than a user's (``EPOCHS``), so accuracies are lower; ``benchmarks/own_images.py`` measures the real
ones.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import typer
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

import morecl
from digit_photos import write_digits
from morecl import cli
from morecl.classifier import Classifier, ModelFolder, capacity, plan, store
from morecl.cli.options import all_expanded, expanded
from morecl.cli.own import predict
from morecl.cli.own.common import class_table
from morecl.cli.own.model import local_time, show_history, show_info
from morecl.cli.terminal import ESCAPED, printable, say
from morecl.data import decoding

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 5
SMALL = ["--backbone", "vit_mini_patch4_32", "--device", "cpu", "--set", "projection=200", "--set", "bottleneck=8"]
NEW = [*SMALL, "--set", "image_size=24"]
TEST = 15  # images of each digit
TINY = [*SMALL, "--set", "image_size=8"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join((self.out + self.err).split())


def call(*arguments: object, stdin: bytes = b"", terminal: bool = False) -> Done:
    """``morecl ARGUMENTS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["morecl", *map(str, arguments)])
        given = io.BytesIO(stdin)
        given.isatty = lambda: terminal  # type: ignore[method-assign]
        patch.setattr(sys, "stdin", io.TextIOWrapper(given))
        patch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
        patch.setattr(plan, "MOST_EPOCHS", EPOCHS)
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    return Done(code or 0, out.getvalue(), err.getvalue())


def answers(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@dataclass(frozen=True)
class Story:
    """Digits 0 to 4 in two tasks; then, in a copy, 5 to 9."""

    folder: Path
    model: Path  # knows 0 to 4
    all_ten: Path  # knows all
    lessons: list[Done]

    @property
    def test(self) -> Path:
        return self.folder / "test"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    model, all_ten = folder / "model", folder / "all-ten"
    lessons = [
        call("learn", model, write_digits(folder / "first", [0, 1, 2], 0, 40), *NEW),
        call("learn", model, write_digits(folder / "second", [3, 4], 0, 40)),
    ]
    shutil.copytree(model, all_ten)
    lessons.append(call("learn", all_ten, write_digits(folder / "third", range(5, 10), 0, 20)))
    write_digits(folder / "test", range(10), 100, 100 + TEST)
    assert [done.code for done in lessons] == [0, 0, 0], lessons
    return Story(folder, model, all_ten, lessons)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows 0 and 1, learned within seconds; copy it before you change it."""
    folder = tmp_path_factory.mktemp("tiny")
    done = call("learn", folder / "model", write_digits(folder / "photos", [0, 1], 0, 60), *TINY)
    assert done.code == 0, done.err
    return folder / "model"


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


# ---- the story ----------------------------------------------------------------------------------------------------


def test_a_lesson_says_what_was_learned_and_what_is_promised(story: Story) -> None:
    first, second, third = story.lessons
    assert "new class images learned held back accuracy" in first.words
    assert "0 32 8" in first.words and "2 32 8" in first.words  # a fifth of 40 is held back
    assert "of new images of the classes it knows, like those held back, at most 5 % are called" in first.words
    assert "24 held-back images" in first.words and "40 held-back images" in second.words
    assert "Not promised: how many images of other classes are caught" in first.words
    assert "on the other classes" in second.words and "on the other classes" not in first.words
    assert "Before they were taught," in third.words
    assert "version 2 of" in second.words and "version 3 of" in third.words


def test_what_was_never_taught_is_mostly_unknown_then_known(story: Story) -> None:
    before = answers(call("predict", story.model, story.test, "--json"))
    digits = np.array([int(Path(a["path"]).parent.name) for a in before])
    unknown = np.array([a["unknown"] for a in before])
    print(f"unknown: {unknown[digits >= 5].mean():.0%} of 5 to 9, {unknown[digits < 5].mean():.0%} of 0 to 4")
    assert unknown[digits >= 5].mean() > 0.4
    assert unknown[digits < 5].mean() < 0.15
    assert np.mean([a["label"] == str(d) for a, d in zip(before, digits, strict=True) if d < 5]) > 0.8
    after = answers(call("predict", story.all_ten, story.test, "--json"))
    first = np.array([a["top"][0]["label"] == str(d) for a, d in zip(after, digits, strict=True)])
    assert first[digits >= 5].mean() > 0.6 and first[digits < 5].mean() > 0.6


def test_json_has_the_fields_and_the_answers_of_the_library(story: Story) -> None:
    files = sorted((story.test / "7").iterdir())[:12] + sorted((story.test / "1").iterdir())[:4]
    found = answers(call("predict", story.model, *files, "--json", "--top", 3, "--accept", 0.9))
    expected = morecl.Classifier.open(story.model).predict(files, top=3, accept=0.9)
    for answer, file, own in zip(found, files, expected, strict=True):
        fields = ["path", "label", "confidence", "ood_score", "threshold", "unknown", "top", "task"]
        assert list(answer) == fields
        assert answer["path"] == str(file)
        assert (answer["label"] is None) == answer["unknown"] == (answer["ood_score"] > answer["threshold"])
        assert len(answer["top"]) == 3 and answer["confidence"] == answer["top"][0]["confidence"]
        assert answer["label"] == own.label and answer["task"] in (1, 2)
        assert answer["ood_score"] == pytest.approx(own.ood_score, rel=1e-4)
    assert {a["unknown"] for a in found} == {True, False}


def test_csv_is_the_same(story: Story) -> None:
    folder = story.test / "8"
    rows = list(csv.DictReader(io.StringIO(call("predict", story.model, folder, "--csv", "--top", 2).out)))
    found = answers(call("predict", story.model, folder, "--json", "--top", 2))
    for row, answer in zip(rows, found, strict=True):
        assert row["path"] == answer["path"]
        assert row["label"] == (answer["label"] or "")
        assert row["unknown"] == str(answer["unknown"]).lower()
        assert float(row["ood_score"]) == answer["ood_score"]
        assert row["top_2"] == answer["top"][1]["label"]
        assert float(row["top_2_confidence"]) == answer["top"][1]["confidence"]


def test_the_table_has_a_line_per_image_and_a_sum(story: Story) -> None:
    done = call("predict", story.model, story.test / "9")
    head, *lines, last = done.out.splitlines()
    found = answers(call("predict", story.model, story.test / "9", "--json"))
    assert head.split() == ["answer", "confidence", "or", "image"]
    assert len(lines) == len(found) == TEST
    for line, answer in zip(lines, found, strict=True):
        assert line.split()[0] == (answer["label"] or "unknown")
        assert line.endswith(answer["path"])  # never cut where the output is no terminal
        assert ("unknown" not in line) or answer["unknown"]
    assert last.startswith(f"{TEST} images, {sum(a['unknown'] for a in found)} unknown; ")


def test_the_time_is_that_of_the_whole_command(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch, with which the answers begin, takes 300 s here, and so does loading the model."""
    now = 0.0
    found, loaded = Classifier.answers, ModelFolder.load_newest

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        now += 300
        return loaded(*arguments, **options)

    def answered(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal now
        now += 300
        yield from found(*arguments, **options)

    monkeypatch.setattr(ModelFolder, "load_newest", slow)
    monkeypatch.setattr(Classifier, "answers", answered)
    monkeypatch.setattr(predict, "time", SimpleNamespace(monotonic=lambda: now))
    done = call("predict", tiny, write_digits(tmp_path / "inbox", [0], 0, 2))
    assert done.code == 0 and "2 images, 0 unknown; 10.0 minutes" in done.words, done.words


def test_broken_images_are_named_and_the_rest_is_answered(story: Story, tmp_path: Path) -> None:
    good = sorted((story.test / "0").iterdir())[:2]
    (tmp_path / "broken.png").write_bytes(b"no image")
    cut = good[0].read_bytes()
    (tmp_path / "cut.png").write_bytes(cut[: len(cut) // 2])
    listed = [good[0], tmp_path / "broken.png", "", tmp_path / "missing.png", tmp_path / "cut.png", good[1]]
    done = call("predict", story.model, "-", "--json", stdin="\n".join(map(str, listed)).encode())
    assert done.code == 1
    assert [a["path"] for a in answers(done)] == [str(good[0]), str(good[1])]
    lines = done.err.splitlines()
    assert len(lines) == 3
    assert [Path(line.split(": ")[1]).name for line in lines] == ["broken.png", "missing.png", "cut.png"]
    assert lines[1].endswith("does not exist")
    assert call("predict", story.model, good[0], "--json").code == 0


@pytest.mark.parametrize("end", ["\n", "\0"])
def test_a_list_may_name_folders_and_end_its_lines_with_nul(story: Story, end: str) -> None:
    folder, other = story.test / "0", sorted((story.test / "1").iterdir())[0]
    done = call("predict", story.model, "-", "--json", stdin=f"{folder}{end}  {end}{other}{end}".encode())
    assert done.code == 0
    assert [a["path"] for a in answers(done)] == [*map(str, sorted(folder.iterdir())), str(other)]


@pytest.mark.parametrize("form", ["--json", "--csv", "--device=cpu"])
def test_a_list_without_images_is_a_mistake(story: Story, tmp_path: Path, form: str) -> None:
    for listed in ("", "\n", f"{tmp_path}\n"):
        done = call("predict", story.model, "-", form, stdin=listed.encode())
        assert (done.code, done.out) == (2, "") and "the list of paths on stdin names no image" in done.err
    assert call("predict", story.model, "-", sorted((story.test / "0").iterdir())[0], form).code == 0


def test_an_empty_folder_is_no_mistake(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "inbox" / "today").mkdir(parents=True)
    (tmp_path / "inbox" / "today" / "list.txt").write_text("no image")
    photos = write_digits(tmp_path / "photos", [0], 0, 2)
    told = f"{tmp_path}/inbox has no images; they are found by their extension, such as .jpg or .png"
    done = call("predict", tiny, tmp_path / "inbox", "--json")
    assert (done.code, done.out, done.err.splitlines()) == (0, "", [told])
    done = call("predict", tiny, tmp_path / "inbox", "--csv")
    assert (done.code, len(done.out.splitlines())) == (0, 1)  # the heads
    done = call("predict", tiny, tmp_path / "inbox")
    assert done.code == 0 and told in done.words and "0 images, 0 unknown" in done.words
    done = call("predict", tiny, tmp_path / "inbox", photos, "--json")
    assert (done.code, len(answers(done)), done.err.splitlines()) == (0, 2, [told])
    done = call("predict", tiny, tmp_path / "inbox", "-", "--json")
    assert (done.code, done.out) == (2, "") and "the list of paths on stdin names no image" in done.err
    assert call("predict", tiny, tmp_path / "inbox", tmp_path / "gone").err.splitlines() == [
        f"error: there is no file or folder {tmp_path}/gone"
    ]


def test_a_folder_that_may_not_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_digits(tmp_path / "photos", [0, 1], 0, 2)
    scan = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == photos / "0":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert list(predict.images_in(str(photos))) == [*map(str, sorted((photos / "1").glob("*"))), str(photos / "0")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "gone.png").symlink_to("nowhere")
    assert [Path(p).name for p in predict.images_in(str(tmp_path))] == ["gone.png", "x.png"]


def test_names_of_files_are_no_commands_to_the_terminal(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [2, 3], 0, 10)
    (photos / "2" / "a\x1b[31m\n:smile:[red].png").write_bytes(b"bad")
    shutil.copy(sorted((photos / "3").iterdir())[0], photos / "2" / "b\x1b[2J.png")
    shown = "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}:smile:[red].png"
    done = call("learn", copy, photos)
    assert done.code == 0 and f"not readable: {photos}/2/{shown}: not an image" in done.words
    assert "b\N{REPLACEMENT CHARACTER}[2J.png ('2')" in done.words.replace("- ", "-")
    for command in (["predict", copy, photos], ["evaluate", copy, photos], ["forget", copy, ":smile:"]):
        said = call(*command)
        assert "\x1b" not in said.out + said.err
    assert "unknown class ':smile:'" in said.err
    assert "\x1b" not in done.out + done.err
    screenshot = "at 9.41\N{NARROW NO-BREAK SPACE}PM\N{NO-BREAK SPACE}.png"
    assert printable(screenshot) == screenshot
    assert printable("\udcff \ud800 é") == r"\xff \ud800 é"  # a byte that is not UTF-8, half a sign
    assert "\udcff é".encode("ascii", ESCAPED) == rb"\xff \xe9"
    assert printable("\u2028\u202e\t") == 3 * "\N{REPLACEMENT CHARACTER}"  # a line, right to left, a tab


def test_a_large_photo_is_no_attack(tiny: Path, tmp_path: Path) -> None:
    Image.new("1", (10_000, 10_000)).save(tmp_path / "large.png")
    done = call("predict", tiny, tmp_path, "--json")
    assert (done.code, done.err) == (0, ""), done.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_not_readable(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    monkeypatch.setattr(Image, "open", lambda path: pytest.fail(f"{path} is opened"))  # which would wait for ever
    for done in (call("predict", tiny, pipe), call("predict", tiny, "-", stdin=f"{pipe}\n".encode())):
        assert done.code == 1 and f"not readable: {pipe}: not a regular file" in done.words


def test_evaluation_agrees_with_the_answers(story: Story, tmp_path: Path) -> None:
    done = call("evaluate", story.model, story.test, "--out", tmp_path / "page.html")
    assert done.code == 0, done.err
    found = answers(call("predict", story.model, story.test, "--json"))
    for digit in range(10):
        own = [a for a in found if Path(a["path"]).parent.name == str(digit)]
        right = f"{100 * np.mean([a['label'] == str(digit) for a in own]):.1f} %" if digit < 5 else "never taught"
        assert f"{digit} {TEST} {right} {100 * np.mean([a['unknown'] for a in own]):.1f} %" in done.words
    confidence = np.mean([a["confidence"] for a in found if int(Path(a["path"]).parent.name) < 5])
    assert f"Confidence: {100 * confidence:.1f} % on average" in done.words
    assert "AUC" in done.words
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "model on test" in page and "Confusion matrix" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_class_that_is_only_in_test_is_a_stranger(tmp_path: Path) -> None:
    write_digits(tmp_path / "photos" / "train", [0, 1], 0, 30)
    write_digits(tmp_path / "photos" / "test", [0, 1, 2], 100, 110)
    assert call("learn", tmp_path / "model", tmp_path / "photos", *TINY).code == 0
    done = call("evaluate", tmp_path / "model", tmp_path / "photos")
    assert done.code == 0 and "2 10 never taught" in done.words and "lessons" not in done.words
    found = Classifier.open(tmp_path / "model").evaluate(tmp_path / "photos")
    assert {each.name: (each.known, each.images) for each in found.classes}["2"] == (False, 10)
    assert found.seen == 0


def test_an_evaluation_on_pictures_of_a_lesson_says_so(copy: Path, tmp_path: Path) -> None:
    new = write_digits(tmp_path / "new", [0, 1], 100, 110)  # the first 60 of each were taught
    found = answers(call("predict", copy, new, "--json"))
    right = np.mean([a["label"] == Path(a["path"]).parent.name for a in found])
    both = write_digits(Path(shutil.copytree(new, tmp_path / "both")), [0, 1], 0, 5)
    done = call("evaluate", copy, both, "--out", tmp_path / "page.html")
    note = "Not all new: 10 of 30 images were in its lessons, so the figures are better than on new images; "
    note += f"without them, known classes are {100 * right:.1f} % right."
    assert done.code == 0 and note in done.words
    assert note in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "lessons" not in call("evaluate", copy, new).words
    old = write_digits(tmp_path / "old", [0], 0, 5)
    note = "5 of 5 images were in its lessons, so the figures are better than on new images."
    assert note in call("evaluate", copy, old).words


def test_the_json_of_an_evaluation_has_the_figures_of_the_table(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [0, 1, 8, 9], 100, 110)
    write_digits(photos, [0], 0, 2)  # both were taught
    (photos / "0" / "bad.png").write_bytes(b"bad")
    shown = call("evaluate", copy, photos)
    done = call("evaluate", copy, photos, "--json", "--out", tmp_path / "page.html")
    assert (shown.code, done.code) == (1, 1) and done.err.count("not readable") == 1
    found = json.loads(done.out)  # nothing else is there
    assert "Confusion matrix" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [(each["name"], each["known"], each["images"]) for each in found["classes"]] == [
        ("0", True, 12),
        ("1", True, 10),
        ("8", False, 10),
        ("9", False, 10),
    ]
    for each in found["classes"]:
        right = f"{each['accuracy']:.1f} %" if each["known"] else "never taught"
        assert f"{each['name']} {each['images']} {right} {each['rejected']:.1f} %" in shown.words
        assert each["rejected"] == pytest.approx(100 * each["unknown"] / each["images"])
    known = f"Known classes: {found['accuracy']:.1f} % right, {found['known_rejected']:.1f} % called"
    forced = f"{found['accuracy_forced']:.1f} % right if it always had to answer"
    strangers = f'never taught: {found["unknown_rejected"]:.1f} % called "unknown"; AUC {found["auc"]:.1f} %'
    confidence = f"{100 * found['mean_confidence']:.1f} % on average"
    calibration = f"calibration error {100 * found['calibration_error']:.1f} %"
    seen = f"{found['seen']} of {found['images']} images were in its lessons"
    new = f"without them, known classes are {found['accuracy_new']:.1f} % right"
    for words in (known, forced, strangers, confidence, calibration, seen, new):
        assert words in shown.words, words
    assert (found["seen"], found["images"]) == (2, 42)
    assert found["unreadable"] == [f"{photos}/0/bad.png: not an image, or of an unknown kind"]
    info = json.loads(call("info", copy, "--json").out)
    assert found["promise"] == info["promise"] and found["promise"]["share"] == 0.05
    accepted = json.loads(call("evaluate", copy, photos, "--json", "--accept", 0.9).out)
    assert accepted["promise"]["share"] == pytest.approx(0.1)


def test_the_json_of_an_evaluation_says_what_cannot_be_measured(tiny: Path, tmp_path: Path) -> None:
    strangers = write_digits(tmp_path / "strangers", [8], 0, 3)
    done = call("evaluate", tiny, strangers, "--json")
    found = json.loads(done.out)
    assert (done.code, found["accuracy"], found["auc"], found["classes"][0]["accuracy"]) == (0, None, None, None)
    for file in (strangers / "8").iterdir():
        file.write_bytes(b"bad")
    done = call("evaluate", tiny, strangers, "--json", "--out", tmp_path / "page.html")
    assert (done.code, done.out) == (2, "") and not (tmp_path / "page.html").exists()


def test_info_and_history_tell_what_there_is(story: Story) -> None:
    info = json.loads(call("info", story.model, "--json").out)
    assert [each["name"] for each in info["classes"]] == ["0", "1", "2", "3", "4"]
    assert [each["task"] for each in info["classes"]] == [1, 1, 1, 2, 2]
    assert all(each["images"] == 32 and each["held_back"] == 8 for each in info["classes"])
    assert [point["classes"] for point in info["curve"]] == [3, 5]
    assert [version["number"] for version in info["versions"]] == [1, 2]
    assert info["bytes"]["version"] <= info["bytes"]["all_versions"]
    assert info["tasks_left"] is None or info["tasks_left"] >= 0
    text = call("info", story.model).words
    assert "vit_mini_patch4_32 at 24 px; 2 tasks, 5 classes" in text and "blocks.0" not in text
    taken = list(info["capacity"].values())
    assert f"{np.mean(taken):.0f} % are taken, {max(taken):.0f} % in the fullest layer." in text
    first, second = info["curve"]
    assert (
        f"After each change: {first['accuracy']:.1f} % (learn, 3 classes), {second['accuracy']:.1f} % (learn, 5" in text
    )
    history = call("history", story.model).words
    assert "learn '0', '1', '2'" in history and "2 (in use)" in history
    assert "The newest 5 versions are kept" in history


# ---- changes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 120])
def test_tables_keep_names_and_numbers_in_a_narrow_terminal(width: int) -> None:
    table = class_table("new class", "images learned", "held back", "accuracy")
    table.add_row("robin", "1,234", "100", "100.0 %")
    console = Console(width=width, file=io.StringIO())
    with console.capture() as shown:
        console.print(table)
    lines = [line.split() for line in shown.get().splitlines() if line.strip()]
    assert lines[-1] == ["robin", "1,234", "100", "100.0", "%"]
    heads = {word for line in lines[:-1] for word in line if word.isalpha()}
    assert heads == {"new", "class", "images", "learned", "held", "back", "accuracy"}


def test_no_line_ends_between_a_number_and_its_percent_sign() -> None:
    text = "    Promise: of new images of the classes it knows, at most 5 % are unknown, 0.1 % or 12.5 % of [b]:smile:"
    for width in range(12, 130):
        console = Console(width=width, file=io.StringIO())
        with console.capture() as shown:
            say(console, text)
        lines = shown.get().splitlines()
        assert all(len(line) <= width and not line.lstrip().startswith("%") for line in lines), lines
        assert " ".join(shown.get().split()) == text.strip()


def shown_at(width: int, show: Callable[[Console], None]) -> str:
    """The words that ``show`` prints to a terminal of ``width`` columns, none of them cut."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as shown:
        show(console)
    assert "…" not in shown.get() and all(cell_len(line) <= width for line in shown.get().splitlines())
    return " ".join(shown.get().split())


@pytest.mark.parametrize("name", ["robin", "long-name-" * 6])
def test_info_is_not_cut_in_a_narrow_terminal(story: Story, name: str) -> None:
    info = Classifier.open(story.model).info()
    classes = (replace(info.classes[0], name=name, images=12_345, accuracy=100.0), *info.classes[1:])
    info = replace(info, classes=classes)
    for width in range(20, 130):
        words = shown_at(width, lambda console: show_info(console, info))
        for each in classes:
            numbers = f"{each.images:,} {each.remembered} {each.held_back} {each.accuracy:.1f} %"
            entry = (
                f"task {each.task}, images learned {each.images:,}, remembered {each.remembered}, "
                f"held back {each.held_back}, accuracy {each.accuracy:.1f} %"
            )
            assert f" {each.task} {numbers}" in words or (width < 80 and entry in words), width


def test_of_many_changes_the_last_are_shown(story: Story) -> None:
    curve = [{"action": "add", "classes": 5, "accuracy": float(n)} for n in range(30)]
    info = replace(Classifier.open(story.model).info(), curve=tuple(curve))
    words = shown_at(100, lambda console: show_info(console, info))
    assert "After the last 10 of 30 changes: 20.0 % (add, 5 classes), 21.0 %" in words and "19.0 %" not in words


def test_history_is_not_cut_in_a_narrow_terminal(story: Story) -> None:
    versions = ModelFolder(story.all_ten).versions()
    for width in range(20, 130):
        words = shown_at(width, lambda console: show_history(console, versions, [1_234_567] * len(versions)))
        assert words.count("1.2 MB") == len(versions) and f"{len(versions)} (in use)" in words
        for version in versions:
            assert local_time(version.created) in words
            table = f"{version.classes} {version.images} {version.accuracy:.1f} %"
            entry = f"{version.classes} classes, {version.images} images, accuracy {version.accuracy:.1f} %"
            assert table in words or (width < 90 and entry in words), width


def test_undo_gives_back_the_answers_of_before(story: Story, tmp_path: Path) -> None:
    model = Path(shutil.copytree(story.all_ten, tmp_path / "model"))
    done = call("undo", model)
    assert done.code == 0 and "version 2 is in use" in done.out
    question = [story.test / "3", "--json"]
    assert call("predict", model, *question).out == call("predict", story.model, *question).out
    assert call("undo", model).code == 0
    assert call("undo", model).code == 2
    assert [version.number for version in ModelFolder(model).versions()] == [1]


def test_undo_does_not_say_removed_of_what_is_still_there(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("rename", copy, "1", "one").code == 0
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    done = call("undo", copy)
    assert (done.code, done.out) == (2, "")
    assert f"{copy}/versions/2 could not be removed: remove it by hand. Version 1 is in use" in done.words
    assert [version.number for version in ModelFolder(copy).versions()] == [1]


def test_an_evaluation_that_could_not_be_written_does_not_begin(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelFolder, "load", lambda *_, **__: pytest.fail("it has begun"))
    (tmp_path / "file").touch()
    for out in ("/proc/x.html", tmp_path / "file" / "x.html"):
        done = call("evaluate", tiny, write_digits(tmp_path / "photos", [0], 0, 2), "--out", out)
        assert done.code == 2 and f"{out} cannot be written" in done.words


def test_old_versions_go_when_there_are_too_many(copy: Path, tmp_path: Path) -> None:
    for digit in (2, 3):
        photos = write_digits(tmp_path / str(digit), [digit], 0, 10)
        assert call("learn", copy, photos, "--keep", 2).code == 0
    assert [version.number for version in ModelFolder(copy).versions()] == [2, 3]
    assert sorted(p.name for p in (copy / "versions").iterdir()) == ["2", "3"]


def test_later_changes_keep_as_many_versions_as_learn_was_told(copy: Path, tmp_path: Path) -> None:
    assert call("learn", copy, write_digits(tmp_path / "2", [2], 0, 10), "--keep", 7).code == 0
    for step in range(6):
        assert call("rename", copy, f"2{'x' * step}", f"2{'x' * (step + 1)}").code == 0
    assert [version.number for version in ModelFolder(copy).versions()] == [2, 3, 4, 5, 6, 7, 8]
    assert "The newest 7 versions are kept" in call("history", copy).words
    assert call("learn", copy, write_digits(tmp_path / "3", [3], 0, 10)).code == 0
    assert [version.number for version in ModelFolder(copy).versions()] == [3, 4, 5, 6, 7, 8, 9]


def test_a_full_model_says_so_and_goes_on_learning(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = call("info", copy).words
    assert re.search(r"About (1 more task has|\d+ more tasks have) room; classes taught together share a task", shown)
    monkeypatch.setattr(capacity, "FULL", 100.0)
    done = call("learn", copy, write_digits(tmp_path / "2", [2], 0, 10))
    assert done.code == 0 and "Note: the model is full: too few neurons are free for a further task like" in done.words
    shown = call("info", copy).words
    assert "The model is full: too few neurons are free" in shown and "has room." in shown and "About" not in shown


def test_a_full_disk_leaves_the_model_and_says_so(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_digits(tmp_path / "2", [2], 0, 10)
    assert call("rename", copy, "1", "one").code == 0
    before = tree(copy)

    def full(target: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(store, "write_json", full)
    for arguments in (["undo"], ["forget", "0", "--yes"], ["rename", "0", "zero"], ["learn", photos]):
        done = call(arguments[0], copy, *arguments[1:])
        assert (
            done.code == 2
            and (
                f"{copy}/model.json: No space left on device. Nothing has changed; make room on the disk and repeat the"
            )
            in done.words
        )
        monkeypatch.undo()  # the next change removes what was written of a version
        assert call("info", copy).code == 0
        assert {k: v for k, v in tree(copy).items() if not k.startswith("versions/3")} == before
        monkeypatch.setattr(store, "write_json", full)


def test_an_argument_that_begins_with_a_dash_has_a_way_out(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture = next(write_digits(tmp_path / "photos", [0], 0, 1).rglob("*.png"))
    picture.rename(tmp_path / "-dash me.png")
    done = call("predict", copy, "-dash me.png")
    assert (
        done.code == 2 and "No such option: -d. If '-dash me.png' is the name of a class or a file, put" in done.words
    )
    assert "put -- before it: -- '-dash me.png'; a file may also be ./'-dash me.png'" in done.words
    for given in (["--", "-dash me.png"], ["./-dash me.png"]):
        assert call("predict", copy, *given).code == 0
    assert "put -- before it: -- -1-;" in call("rename", copy, "1", "-1-").words
    assert call("rename", copy, "--", "1", "-1-").code == 0
    typo = call("predict", copy, picture, "--jsn").words
    assert "--json" in typo and "put --" not in typo


def test_rename(copy: Path, tmp_path: Path) -> None:
    assert call("rename", copy, "1", "one").code == 0
    assert Classifier.open(copy).classes == ["0", "one"]
    for old, new in (("2", "x"), ("one", "0"), ("one", "unknown"), ("one", " ")):
        before = tree(copy)
        assert call("rename", copy, old, new).code == 2
        assert tree(copy) == before


def test_a_class_is_found_however_its_accents_are_written(copy: Path) -> None:
    assert call("rename", copy, "1", "cafe\u0301").code == 0
    assert Classifier.open(copy).classes == ["0", "caf\u00e9"]
    assert call("rename", copy, "0", "caf\u00e9").code == 2
    assert call("forget", copy, "cafe\u0301", "--yes").code == 0
    assert Classifier.open(copy).classes == ["0"]


def test_whoever_stops_at_the_question_forgets_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(copy)

    def question(*_: object) -> bool:
        with ModelFolder(copy).changing():  # others may, while it is asked
            raise typer.Abort

    monkeypatch.setattr(typer, "confirm", question)
    done = call("forget", copy, "1", terminal=True)
    assert done.code == 130 and "stopped; nothing has changed" in done.err
    assert tree(copy) == before


def test_what_was_not_asked_about_is_not_forgotten(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def question(*_: object) -> bool:
        assert call("rename", copy, "0", "null").code == 0  # another process
        return True

    monkeypatch.setattr(typer, "confirm", question)
    done = call("forget", copy, "1", terminal=True)
    assert done.code == 2 and "was changed meanwhile: version 2 is in use. Nothing was forgotten" in done.words
    assert [version.number for version in ModelFolder(copy).versions()] == [1, 2]


def test_a_tilde_that_the_shell_left_is_the_home_folder(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    copy.rename(tmp_path / "kept")
    photos = write_digits(tmp_path / "photos", [0], 0, 2)
    assert call("evaluate", "~/kept", "~/photos", "--out=~/page.html").code == 0
    assert call("info", "~nobody/m").code == 2
    asked = [
        call("predict", "~/kept", "~/photos/0", "--json"),
        call("predict", "~/kept", "-", "--json", stdin=b"~/photos\n"),
    ]
    assert [len(answers(done)) for done in asked] == [2, 2] and asked[0].out == asked[1].out
    (answer,) = Classifier.open("~/kept").predict([f"~/photos/0/{next(photos.rglob('*.png')).name}"])
    assert answer.error is None
    assert (tmp_path / "page.html").is_file() and not (tmp_path / "~").exists() and photos.is_dir()


def test_a_class_may_be_called_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_digits(tmp_path / "signs", [0, 1], 0, 10)
    (photos / "0").rename(photos / "~")
    monkeypatch.chdir(photos)
    done = call("learn", tmp_path / "model", ".", *TINY)
    assert done.code == 0 and "~ 8 2" in done.words, done.words
    asked = [
        call("predict", tmp_path / "model", "~", "--json"),
        call("predict", tmp_path / "model", "-", "--json", stdin=b"~"),
    ]
    assert [len(answers(done)) for done in asked] == [10, 10]


def test_every_path_of_a_command_may_begin_with_a_tilde() -> None:
    found = 0
    commands = [info.callback for info in cli.app.registered_commands]
    for command in commands:
        assert command is not None
        for name, kind in get_type_hints(command, include_extras=True).items():
            taken, *details = get_args(kind) if get_origin(kind) is Annotated else (kind,)
            if taken in (Path, Path | None, list[Path]):
                found += 1
                wanted = all_expanded if taken == list[Path] else expanded
                assert details[0].callback is wanted, (command.__name__, name)
    assert found > 20


def test_names_of_strangers_do_not_reach_the_terminal_as_they_are(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [0, 5], 0, 2)
    (photos / "5").rename(photos / "a\x1b[31mred\x07")
    done = call("evaluate", copy, photos)
    assert done.code == 0 and "\x1b" not in done.out and "\x07" not in done.out
    assert "a\N{REPLACEMENT CHARACTER}[31mred" in done.out


def test_the_page_of_an_evaluation_takes_any_name(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [0, 5], 0, 2)
    (photos / "5").rename(photos / os.fsdecode(b"caf\xe9"))
    (photos / "0" / os.fsdecode(b"kap\xfct.jpg")).write_bytes(b"bad")
    done = call("evaluate", copy, photos, "--out", tmp_path / "page.html")
    assert done.code == 1 and r"kap\xfct.jpg: not an image" in done.words, done.err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert r"kap\xfct.jpg: not an image" in page and r"caf\xe9" in page


def test_a_model_is_not_taught_in_a_folder_that_is_not_utf8(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Classifier, "learn", lambda *_, **__: pytest.fail("it has been taught"))
    photos = write_digits(tmp_path / "photos", [2], 0, 5)
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    done = call("learn", folder, photos, *TINY)
    assert done.code == 2 and r"caf\xe9 is not UTF-8" in done.words and not folder.exists()
    copy.rename(folder)
    for command in (["learn", folder, photos], ["predict", folder, photos], ["rename", folder, "0", "nought"]):
        done = call(*command)
        assert done.code == 2 and r"caf\xe9" in done.words and "damaged" not in done.words
        assert done.words.endswith("rename the folder"), done.words


def test_forget_removes_the_class_and_older_versions(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [2], 0, 20)
    assert call("learn", copy, photos).code == 0
    before = tree(copy)
    refused = call("forget", copy, "1")
    assert refused.code == 2 and "--yes" in refused.err and tree(copy) == before
    assert "without '1' too few images are held back (16), so nothing will be called unknown" in refused.words
    assert "nothing will be called unknown" not in call("forget", copy, "2").words  # it has 4 of the 28
    assert call("forget", copy, "7", "--yes").code == 2
    asked = write_digits(tmp_path / "asked", [0, 2], 100, 110)
    said = answers(call("predict", copy, asked, "--json"))
    done = call("forget", copy, "1", "--yes")
    assert done.code == 0 and "2 older versions removed" in done.out
    assert 'No image is called "unknown": with 16 held-back images at least 5.9 % of known images' in done.words
    assert b"'1'" not in (copy / "model.json").read_bytes()  # its name has left the folder
    assert [p.name for p in (copy / "versions").iterdir()] == ["3"]
    now = answers(call("predict", copy, asked, "--json"))
    assert all(choice["label"] != "1" for answer in now for choice in answer["top"])
    for one, other in zip(said, now, strict=True):
        if one["top"][0]["label"] != "1":
            assert one["top"][0]["label"] == other["top"][0]["label"]
    assert call("learn", copy, write_digits(tmp_path / "again", [1], 0, 20)).code == 0  # its name is free again


def test_classes_that_differ_only_in_capitals_are_told_of(copy: Path, tmp_path: Path) -> None:
    assert call("rename", copy, "0", "Null").code == 0
    photos = write_digits(tmp_path / "photos", [2, 3, 4], 0, 10)
    for digit, name in (("2", "null"), ("3", "Eins"), ("4", "eins")):
        (photos / digit).rename(photos / name)
    done = call("evaluate", copy, photos)
    assert "'null' counts as never taught; if it is 'Null', which the model knows" in done.err
    assert "'eins'" not in done.err  # both are strangers
    done = call("learn", copy, photos)
    assert done.code == 0
    for pair in ("'null' and 'Null'", "'eins' and 'Eins'"):
        note = f"{pair} are two classes, though they look alike."
        assert note in done.err and note not in done.out, "told before training, and once"
    done = call("rename", copy, "1", "EINS")
    assert done.code == 0 and "'EINS' and 'eins' look alike" in done.words
    assert "alike" not in call("rename", copy, "EINS", "one").words + call("rename", copy, "one", "One").words


def test_more_photos_of_a_class_raise_its_accuracy(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_digits(tmp_path / "photos", [0, 8], 0, 40)
    write_digits(tmp_path / "photos", [3], 0, 10)
    assert call("learn", model, tmp_path / "photos", *NEW).code == 0
    test = write_digits(tmp_path / "test", [3], 100, 150)

    def right() -> float:
        return float(np.mean([a["top"][0]["label"] == "3" for a in answers(call("predict", model, test, "--json"))]))

    before = right()
    write_digits(tmp_path / "photos", [3], 10, 60)
    write_digits(tmp_path / "photos", [5], 0, 20)  # new
    done = call("learn", model, tmp_path / "photos", "--more")
    assert done.code == 0, done.err
    assert "% on these classes" in done.out and "% on the new classes" in done.out
    print(f"accuracy on 3: {before:.0%} with 10 images, {right():.0%} with 60")
    assert right() >= before
    assert [(v.number, v.action, v.what) for v in ModelFolder(model).versions()[1:]] == [
        (2, "learn", "'5', and more images of '3'"),
    ]
    again = call("learn", model, tmp_path / "photos", "--more")
    assert again.code == 0 and "nothing new in" in again.out
    write_digits(tmp_path / "photos", [6], 0, 20)
    assert call("learn", model, tmp_path / "photos", "--more").code == 0  # nothing more of the others is no error
    assert Classifier.open(model).classes == ["0", "3", "8", "5", "6"]


@pytest.mark.parametrize("options", [[], ["--more"]])
def test_nothing_new_is_no_error_unless_images_are_lost_and_changes_nothing(
    copy: Path, tmp_path: Path, options: list[str]
) -> None:
    photos = write_digits(tmp_path / "photos", [0, 1], 0, 20)
    before = tree(copy)
    done = call("learn", copy, photos, *options)
    assert (done.code, done.err) == (0, ""), done
    assert f"nothing new in {photos}: every image was seen before. {copy} stays at version 1" in done.words
    for number in range(2):
        (photos / "1" / f"bad-{number}.png").write_bytes(b"bad")
    done = call("learn", copy, photos, *options)
    assert done.code == 2 and "every image was seen before, or could not be read" in done.words
    assert all(f"not readable: {photos}/1/bad-{number}.png" in done.words for number in range(2))
    for bad in (photos / "1").glob("bad-*"):
        bad.unlink()
    seen = sorted((photos / "1").iterdir())[0]
    seen.rename(photos / "0" / "moved.png")
    done = call("learn", copy, photos, *options)
    assert done.code == 2 and "moved.png (taught as '1', now '0')" in done.words
    assert tree(copy) == before


def test_a_mistake_is_an_error_though_nothing_is_new(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [0], 0, 63)
    before = tree(copy)
    done = call("learn", copy, photos)
    assert done.code == 2 and "it knows every class in" in done.words
    assert "--more takes in 3 further images of them" in done.words
    shutil.copytree(write_digits(tmp_path / "seen", [0], 0, 20) / "0", tmp_path / "renamed" / "nought")
    done = call("learn", copy, tmp_path / "renamed", "--more")
    assert done.code == 2 and "nothing to learn of 'nought': every image was seen before" in done.words
    assert "(taught as '0', now 'nought')" in done.words and "`morecl rename`" in done.words
    (tmp_path / "broken" / "0").mkdir(parents=True)
    (tmp_path / "broken" / "0" / "x.png").write_bytes(b"bad")
    for options in ([], ["--more"]):
        done = call("learn", copy, tmp_path / "broken", *options)
        assert done.code == 2 and "nothing to learn of '0': no image could be read" in done.words
    assert tree(copy) == before


def test_pictures_in_two_classes_and_taught_wrongly_are_named(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [2, 3], 0, 12)
    one, other = sorted((photos / "2").iterdir())[:2]
    for file in (one, other):
        shutil.copy(file, photos / "3" / f"copy-of-{file.name}")
    first = call("learn", copy, photos)
    assert first.code == 0 and "2 8 2" in first.words and "3 10 2" in first.words  # 10 of 12 images, and 12
    assert "Note: 2 pictures were left out, being in several classes at once: " in first.words
    assert f"{one} ('2') and {photos / '3' / f'copy-of-{one.name}'} ('3')" in first.words
    assert "seen before" not in first.words
    wrong = next(p for p in sorted((photos / "2").iterdir()) if p not in (one, other))
    for file in (one, other):
        file.unlink()
    wrong.rename(photos / "3" / wrong.name)
    second = call("learn", copy, photos, "--more")
    assert second.code == 0 and "3 2 2" in second.words  # the two copies
    assert f"{photos / '3' / wrong.name} (taught as '2', now '3')" in second.words
    assert call("forget", copy, "2", "--yes").code == 0
    third = call("learn", copy, photos, "--more")
    assert third.code == 0 and "3 1 2" in third.words and "Note: " not in third.words, third.words


def test_a_picture_in_a_known_and_a_new_class_is_learned_as_neither(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [1], 60, 70)
    write_digits(tmp_path / "photos", [2], 0, 10)
    file = sorted((photos / "1").iterdir())[0]
    shutil.copy(file, photos / "2" / "copy.png")
    done = call("learn", copy, photos, "--more")
    assert done.code == 0, done.err
    assert f"1 picture was left out, being in several classes at once: {file} ('1') and {photos}/2/copy" in done.words
    assert "1 7 14" in done.words and "2 8 2" in done.words and "Left out" not in done.words  # 9 and 10 images
    file.unlink()
    assert call("learn", copy, photos, "--more").words.count("2 1 2") == 1  # the copy, now that the other is gone
    (photos / "3").mkdir()
    shutil.copy(sorted(write_digits(tmp_path / "more", [1], 80, 81).rglob("*.png"))[0], photos / "1" / "x.png")
    shutil.copy(photos / "1" / "x.png", photos / "3" / "y.png")
    before = tree(copy)
    refused = call("learn", copy, photos, "--more")
    assert refused.code == 2 and "nothing to learn of '3': every image is in several classes" in refused.words
    assert tree(copy) == before


def test_a_new_class_without_images_is_refused_before_the_first_lesson(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [1], 60, 70)
    before = tree(copy)
    (photos / "2").mkdir()
    for number in range(2):
        (photos / "2" / f"bad-{number}.png").write_bytes(b"bad")
    done = call("learn", copy, photos, "--more")
    assert done.code == 2 and "nothing to learn of '2': no image could be read" in done.words, done
    assert all(f"not readable: {photos}/2/bad-{number}.png" in done.words for number in range(2))
    shutil.rmtree(photos / "2")
    shutil.copytree(write_digits(tmp_path / "seen", [0], 0, 20) / "0", photos / "nought")
    done = call("learn", copy, photos, "--more")
    assert done.code == 2 and "nothing to learn of 'nought': every image was seen before" in done.words
    assert "`morecl rename`" in done.words
    (photos / "nought").rename(photos / "Unknown")
    done = call("learn", copy, photos, "--more")
    assert done.code == 2 and "'Unknown' cannot name a class" in done.words
    assert tree(copy) == before


@pytest.mark.parametrize("others", [[], [1], [2]])  # beside the class: none, one it knows, a new one
def test_a_renamed_class_is_not_taught_anew_under_its_old_name(
    others: list[int], copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("rename", copy, "0", "nought").code == 0
    photos = write_digits(tmp_path / "photos", [0], 0, 63)  # three more than it was taught
    write_digits(photos, others, 60, 70)
    before = tree(copy)
    for options in ([], ["--more"]):
        with monkeypatch.context() as patch:
            patch.setattr(Classifier, "add", lambda *_, **__: pytest.fail("a lesson began"))
            done = call("learn", copy, photos, *options)
        assert done.code == 2 and "'0' would be a new class, but more of its images" in done.words, done.words
        assert "taught as 'nought' (60) than are new (3)" in done.words and "rename its folder, too" in done.words
    taught = write_digits(tmp_path / "taught", [0, *others], 0, 40)
    done = call("learn", copy, taught, "--more")  # nothing of it is new
    way_out = "every image was seen before. If a class was renamed, rename its folder, too"
    assert done.code == 2 and way_out in done.words
    assert tree(copy) == before
    (photos / "0").rename(photos / "nought")
    done = call("learn", copy, photos, "--more")
    assert done.code == 0 and "nought 2 13 " in done.words, done.words  # of the three one is held back


def test_a_class_with_more_new_images_than_old_ones_is_a_class(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [2], 0, 12)
    known = sorted(write_digits(tmp_path / "known", [0], 0, 12).rglob("*.png"))
    for file in known[:12]:
        shutil.copy(file, photos / "2" / f"known-{file.name}")
    done = call("learn", copy, photos)
    assert done.code == 0 and "2 10 2" in done.words and "12 images stay what the model was taught" in done.words


def test_a_picture_in_a_class_that_is_left_alone_is_not_learned_as_a_new_one(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [1], 60, 63)
    write_digits(tmp_path / "photos", [2], 0, 10)
    file = sorted((photos / "1").iterdir())[0]
    shutil.copy(file, photos / "2" / "copy.png")
    done = call("learn", copy, photos)
    assert done.code == 0 and "2 8 2" in done.words, done.words  # 10 images
    assert f"1 picture was left out, being in several classes at once: {file} ('1') and {photos}/2/copy" in done.words


@pytest.mark.parametrize("options", [[], ["--more"]])
def test_known_and_new_classes_are_read_once_and_are_one_version(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    photos = write_digits(tmp_path / "photos", [1], 60, 70)
    write_digits(tmp_path / "photos", [2], 0, 10)
    (photos / "2" / "bad.png").write_bytes(b"bad")
    opened: list[Path] = []

    def open_image(file: Path, sized: Any) -> Any:
        opened.append(file)
        return morecl.images.open_image(file, sized)

    monkeypatch.setattr(decoding, "open_image", open_image)
    done = call("learn", copy, photos, *options)
    assert done.code == 0, done.err
    assert sorted(opened) == sorted(photos.rglob("*.png"))
    assert done.words.count(f"not readable: {photos}/2/bad.png") == 1
    assert "2 8 2" in done.words and ("1 8 14" in done.words) == bool(options)  # 10 images each
    first, second = ModelFolder(copy).versions()
    more = ", and more images of '1'" if options else ""
    assert (second.number, second.action, second.what) == (2, "learn", f"'2'{more}")
    assert second.images == first.images + (16 if options else 8)
    assert call("undo", copy).code == 0 and Classifier.open(copy).classes == ["0", "1"]


def test_images_lost_of_known_classes_are_named_beside_new_ones(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [1], 0, 10)
    write_digits(tmp_path / "photos", [2], 0, 10)
    (photos / "1" / "bad.png").write_bytes(b"bad")
    done = call("learn", copy, photos, "--more")
    assert done.code == 0 and "2 8 2" in done.words, done
    assert f"not readable: {photos}/1/bad.png" in done.words
    assert "nothing new of '1': every image was seen before, or could not be read" in done.words
    assert [v.action for v in ModelFolder(copy).versions()] == ["learn", "learn"]


def test_known_classes_beside_new_ones_are_left_alone(copy: Path, tmp_path: Path) -> None:
    done = call("learn", copy, write_digits(tmp_path / "photos", [1, 2], 20, 40))
    assert done.code == 0
    assert "left alone, since it knows them: '1'" in done.err
    assert ModelFolder(copy).versions()[-1].what == "'2'"


def test_training_on_everything_promises_nothing(tmp_path: Path) -> None:
    done = call("learn", tmp_path / "model", write_digits(tmp_path / "photos", [0, 1], 0, 20), "--all", *TINY)
    assert done.code == 0
    assert "0 20 0 -" in done.words
    assert 'No image is called "unknown": no images were held back. Teach it more images. 19 held back' in done.words


def test_too_few_images_for_the_promise_say_what_is_possible(tmp_path: Path) -> None:
    done = call("learn", tmp_path / "model", write_digits(tmp_path / "photos", [0, 1], 0, 20), *TINY)
    assert "with 8 held-back images at least 11.1 %" in done.words
    assert "Possible: `morecl predict --accept 0.88`, or more images. 19 held back are needed" in done.words
    measured = call("evaluate", tmp_path / "model", tmp_path / "photos")
    assert "Possible: `morecl evaluate --accept 0.88`" in measured.words
    exported = call("export", tmp_path / "model", tmp_path / "model.onnx")
    assert "Possible: `morecl export --accept 0.88`" in exported.words
    asked = call("predict", tmp_path / "model", tmp_path / "photos", "--json", "--accept", 0.88)
    assert all(answer["threshold"] is not None for answer in answers(asked))
    asked = call("predict", tmp_path / "model", tmp_path / "photos", "--json")
    assert all(answer["threshold"] is None and not answer["unknown"] for answer in answers(asked))
    assert "No image is called" in asked.err


# ---- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbone", "auto"], "--backbone belongs to a new model"),
        (["--method", "more", "--seed", "1", "--set", "lr=1"], "--method, --seed, --set belong to a new model"),
        (["--minutes", "0"], "--minutes must be more than 0"),
        (["--minutes", "nan"], "--minutes must be more than 0"),
    ],
)
def test_options_that_cannot_be_used(copy: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    photos = write_digits(tmp_path / "photos", [2], 0, 5)
    before = tree(copy)
    done = call("learn", copy, photos, *arguments)
    assert done.code == 2 and message in done.words
    assert tree(copy) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "mroe"], "did you mean 'more'?"),
        (["--set", "projektion=3"], "unknown setting 'projektion'"),
        (["--set", "epochs=3"], "epochs is chosen from the number of images"),
        (["--method", "single"], "is a reference for experiments"),
        (["--more"], "--more is for classes that a model knows"),
        (["--backbone", "no_such_vit"], "no_such_vit"),
    ],
)
def test_a_new_model_is_not_made_from_bad_options(tmp_path: Path, arguments: list[str], message: str) -> None:
    photos = write_digits(tmp_path / "photos", [0, 1], 0, 5)
    done = call("learn", tmp_path / "model", photos, *arguments)
    assert done.code == 2 and message in done.words
    assert not (tmp_path / "model").exists()


def rubbish(folder: Path) -> Iterator[tuple[Path, str]]:
    (folder / "empty").mkdir(parents=True)
    yield folder / "empty", "has no class folders"
    (folder / "file").write_text("x")
    yield folder / "file", "is a file; name a folder"
    yield folder / "missing", "there is no folder"
    (folder / "no-images" / "a").mkdir(parents=True)
    (folder / "no-images" / "a" / "x.txt").write_text("x")
    yield folder / "no-images", "has no images"
    (folder / "broken" / "a").mkdir(parents=True)
    (folder / "broken" / "a" / "x.png").write_bytes(b"\x89PNG\r\n")
    yield folder / "broken", "no image could be read"
    write_digits(folder / "named", [2], 0, 5)
    (folder / "named" / "2").rename(folder / "named" / "Unknown")
    yield folder / "named", "cannot name a class"
    write_digits(folder / "blank", [2, 3], 0, 5)
    (folder / "blank" / "3").rename(folder / "blank" / "2 ")
    yield folder / "blank", "blank/2 ' begins or ends with a blank; rename the folder"
    write_digits(folder / "flat" / "x", [2], 0, 5)
    yield folder / "flat" / "x" / "2", "has no class folders"


def test_rubbish_folders_change_nothing(copy: Path, tmp_path: Path) -> None:
    before = tree(copy)
    for number, (folder, message) in enumerate(rubbish(tmp_path / "rubbish")):
        for model in (copy, tmp_path / f"new-{number}"):
            options = [] if model == copy else TINY
            done = call("learn", model, folder, *options)
            assert (done.code, message in done.words) == (2, True), (folder, done)
            assert "Traceback" not in done.err
        assert not (tmp_path / f"new-{number}").exists()
    assert tree(copy) == before


def test_some_unreadable_images_are_named_and_counted(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [2], 0, 10)
    for number in range(7):
        (photos / "2" / f"bad-{number}.png").write_bytes(b"bad")
    done = call("learn", copy, photos)
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if line.startswith("not readable")]
    assert len(lines) == 6 and lines[-1] == "not readable: 2 more images"


def test_models_broken_links_and_photos_in_no_class_are_left_out(copy: Path, tmp_path: Path) -> None:
    write_digits(tmp_path, [2], 0, 10)  # beside the model
    (tmp_path / "2" / "gone.png").symlink_to("nowhere.png")
    (tmp_path / "2" / "loop.png").symlink_to("loop.png")
    (tmp_path / "stray.png").write_bytes(b"")
    for command, code in (("learn", 0), ("evaluate", 1)):
        done = call(command, copy, tmp_path)
        assert done.code == code, done
        assert done.words.count("not readable: ") == 2
        assert done.words.count("itself, in no class folder, and is left out") == 1
    assert Classifier.open(copy).classes == ["0", "1", "2"]


def test_a_class_of_which_nothing_can_be_read_says_why(copy: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [2], 0, 10)
    (photos / "2" / "bad.png").write_bytes(b"bad")
    (photos / "deep").mkdir()
    for number in range(3):
        Image.fromarray(np.full((8, 8), 9000 + number, np.uint16)).save(photos / "deep" / f"{number}.png")
    done = call("learn", copy, photos)
    assert done.code == 2
    assert "deep/0.png: mode I;16: only 8 bits per channel are supported, and 2 more)" in done.words, done.err


@pytest.mark.parametrize("command", ["info", "history", "undo", "predict", "evaluate", "rename", "forget", "export"])
def test_a_folder_without_a_model_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"")
    rest = {"predict": ["x.png"], "evaluate": ["."], "rename": ["a", "b"], "forget": ["a", "--yes"]}
    for path, message in ((tmp_path / "none", "there is no model"), (tmp_path, "holds no model")):
        done = call(command, path, *rest.get(command, []), *(["out.onnx"] if command == "export" else []))
        assert done.code == 2 and message in done.words, done
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["learn", "evaluate"])
def test_a_model_is_no_folder_of_images(tiny: Path, command: str) -> None:
    """Its own folders have no images; nobody should be told to remove them."""
    done = call(command, tiny, tiny)
    assert done.code == 2 and f"{tiny} is a model; name a folder of images" in done.words


def test_options_of_predict_that_do_not_go_together(tiny: Path, tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", [0], 0, 2)
    for options, message in ((["--top", 3], "--top goes with --json or --csv"), (["--json", "--csv"], "not both")):
        done = call("predict", tiny, photos, *options)
        assert done.code == 2 and message in done.words
    assert all(len(answer["top"]) == 2 for answer in answers(call("predict", tiny, photos, "--json")))


def test_paths_that_are_not_there_are_refused_at_once(tiny: Path, tmp_path: Path) -> None:
    assert "there is no file or folder" in call("predict", tiny, tmp_path / "missing.png").words
    assert "--json or --csv" in call("predict", tiny, tmp_path, "--json", "--csv").words
    assert "--accept must lie between" in call("predict", tiny, tmp_path, "--accept", 95).words
    assert call("evaluate", tiny, tmp_path, "--out", tmp_path).code == 2
    refused = call("export", tiny, tmp_path)
    assert refused.code == 2 and "give OUT.onnx the name of a file" in refused.words and "--out" not in refused.words


def test_a_damaged_model_is_an_error_message(copy: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    for file in sorted(p for p in copy.rglob("*") if p.is_file() and p.name != ".lock"):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        done = call("predict", copy, tmp_path / "x.png")
        assert done.code == 2 and "Traceback" not in done.err, file
        file.write_bytes(whole)
    assert call("predict", copy, tmp_path / "x.png").code == 0


def test_undo_leaves_a_damaged_version(story: Story, tmp_path: Path) -> None:
    model = Path(shutil.copytree(story.model, tmp_path / "model"))
    (model / "versions" / "2" / "learner.json").unlink()
    done = call("predict", model, story.test / "0")
    assert done.code == 2 and f"`morecl undo {model}` removes it and goes back to version 1" in done.words
    assert call("undo", model).code == 0
    assert call("predict", model, story.test / "0").code == 0


def test_folders_that_may_not_be_used_say_so(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_digits(tmp_path / "photos", [2], 0, 10)
    (tmp_path / "link").symlink_to("nowhere")
    done = call("learn", tmp_path / "link", photos, *TINY)
    assert done.code == 2 and f"{tmp_path}/link is a link to nowhere, which is not there" in done.words
    before, access = tree(copy), os.access
    denied = {(photos / "2", os.R_OK), (copy, os.W_OK)}  # the one who runs the tests may be root, who may do anything

    def allowed(path: Any, mode: int) -> bool:
        return not any(Path(path) == one and mode & right for one, right in denied) and access(path, mode)

    monkeypatch.setattr(os, "access", allowed)
    done = call("learn", copy, photos)
    assert done.code == 2 and f"{photos}/2 may not be read" in done.words
    denied.discard((photos / "2", os.R_OK))
    (photos / "2" / "more").mkdir()
    denied.add((photos / "2" / "more", os.R_OK))
    done = call("learn", copy, photos)
    assert done.code == 2 and f"{photos}/2/more may not be read" in done.words
    denied.discard((photos / "2" / "more", os.R_OK))
    for command in (
        ["learn", copy, photos],
        ["rename", copy, "0", "x"],
        ["undo", copy],
        ["forget", copy, "0", "--yes"],
    ):
        done = call(*command)
        assert done.code == 2 and f"{copy} may not be written to" in done.words, done
    assert tree(copy) == before


def test_two_cannot_change_a_model_at_once(copy: Path, tmp_path: Path) -> None:
    with ModelFolder(copy).changing():
        done = call("learn", copy, write_digits(tmp_path / "photos", [2], 0, 5))
        assert done.code == 2 and "another process is at work" in done.words
        assert call("predict", copy, tmp_path / "photos").code == 0  # reading goes on


@pytest.mark.parametrize("options", [[], ["--json"], ["--csv"]])
def test_a_closed_pipe_has_its_own_exit_code(commands: Path, tiny: Path, tmp_path: Path, options: list[str]) -> None:
    photos = write_digits(tmp_path / "photos", [0], 0, 40)
    reader, writer = os.pipe()
    os.close(reader)
    command = [commands / "morecl", "predict", tiny, photos, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with os.fdopen(writer) as closed:
        done = subprocess.run(command, env=environment, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


# ---- interruptions ------------------------------------------------------------------------------------------------


def test_ctrl_c_changes_nothing(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from morecl.cli.own.learn import LessonDisplay

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = tree(copy)
    monkeypatch.setattr(LessonDisplay, "epoch", interrupt)
    photos = write_digits(tmp_path / "photos", [2, 3], 0, 10)
    for model, options in ((copy, []), (tmp_path / "new", TINY)):
        done = call("learn", model, photos, *options)
        assert done.code == 130 and "nothing has changed" in done.err
    assert tree(copy) == before
    assert not (tmp_path / "new").exists()


def test_a_second_lesson_that_fails_takes_back_the_first(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_digits(tmp_path / "photos", [1], 60, 70)
    write_digits(tmp_path / "photos", [2], 0, 10)
    before, added = tree(copy), []
    add = Classifier.add
    monkeypatch.setattr(Classifier, "add", lambda *a, **k: (added.append(1), add(*a, **k))[1])
    for error, code in ((KeyboardInterrupt(), 130), (morecl.DivergedError("the loss is nan"), 1)):

        def fail(*_: object, _error: BaseException = error, **__: object) -> None:
            raise _error

        with monkeypatch.context() as patch:
            patch.setattr(Classifier, "learn", fail)
            done = call("learn", copy, photos, "--more")
        assert done.code == code and "nothing has changed" in done.words, done
        assert tree(copy) == before
    assert added == [1, 1] and "the loss is nan; nothing has changed" in done.words
    assert call("learn", copy, photos, "--more").code == 0


def test_ctrl_c_after_saving_says_so(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = ModelFolder.commit

    def interrupted(*arguments: Any, **options: Any) -> None:
        commit(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelFolder, "commit", interrupted)
    done = call("learn", copy, write_digits(tmp_path / "photos", [2], 0, 10))
    assert done.code == 130 and f"version 2 of {copy} was saved already" in done.words
    renamed = call("rename", copy, "0", "zero")
    assert renamed.code == 130 and f"version 3 of {copy} was saved already" in renamed.words
    assert Classifier.open(copy).classes == ["zero", "1", "2"]


LEARN = f"""
import os, sys
print(os.getpid(), file=sys.stderr, flush=True)
from morecl.classifier import plan
plan.MOST_EPOCHS = {EPOCHS}
from morecl.cli import main
main()
"""


def start_learning(commands: Path, model: Path, photos: Path) -> tuple[subprocess.Popen[str], int]:
    """The command that learns, and the process that does it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [commands / "python", "-c", LEARN, "learn", model, photos]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    return process, int(process.stderr.readline())


def test_a_kill_leaves_the_old_model_or_the_new_one(commands: Path, tiny: Path, tmp_path: Path) -> None:
    """At random moments of the lesson, and while the new version is being written."""
    photos = write_digits(tmp_path / "photos", [2, 3], 0, 20)
    asked = write_digits(tmp_path / "asked", [0, 1, 2, 3], 100, 105)
    question = [asked, "--json"]
    whole = Path(shutil.copytree(tiny, tmp_path / "whole"))
    old = call("predict", whole, *question).out
    started = time.monotonic()
    assert start_learning(commands, whole, photos)[0].wait(timeout=300) == 0
    seconds = time.monotonic() - started
    new = [answer["label"] for answer in answers(call("predict", whole, *question))]
    draw = random.Random(5)
    for moment in ("learning", "writing"):  # benchmarks/own_images.py has 50 of them
        model = Path(shutil.copytree(tiny, tmp_path / f"killed-{moment}"))
        process, learner = start_learning(commands, model, photos)
        deadline = time.monotonic() + 20 * seconds
        if moment == "learning":
            time.sleep(draw.uniform(0.5, 1) * seconds)
        else:  # as soon as something is written
            while process.poll() is None and len(list((model / "versions").iterdir())) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.02))
        with suppress(ProcessLookupError):  # it was quick
            os.kill(learner, signal.SIGKILL)
        process.wait()
        done = call("predict", model, *question)
        assert done.code == 0, done.err
        if len(ModelFolder(model).versions()) == 1:
            assert done.out == old
        else:
            assert [answer["label"] for answer in answers(done)] == new
        assert call("learn", model, photos).code == 0
        assert Classifier.open(model).classes == ["0", "1", "2", "3"]
