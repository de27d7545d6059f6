"""The page of an evaluation: its numbers, its escaping, and how it looks in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from browser import Browser
from morecl.classifier.conformal import promise
from morecl.classifier.evaluation import evaluate
from morecl.classifier.page import confusion_shares, html, mix_ups
from morecl.classifier.results import Answer, Choice, Evaluation

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MEASURE = """<script>
const shown = [...document.querySelectorAll(".drawing")].filter(d => getComputedStyle(d).display !== "none");
const pre = document.createElement("pre");
pre.id = "measured";
pre.textContent = JSON.stringify({
  overflow: document.documentElement.scrollWidth - innerWidth,
  kinds: shown.map(d => d.className), widths: shown.map(d => d.getBoundingClientRect().width)});
document.body.append(pre);
</script>"""
# Pixels by which the widest table is wider than its frame; words of heads and names that do not fit on one line.
CUT = """(() => {
  const over = [...document.querySelectorAll(".scroll")].map(s => s.scrollWidth - s.clientWidth), broken = [];
  for (const cell of document.querySelectorAll(".plain :is(th, .text)"))
    for (const word of cell.textContent.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(cell.firstChild, word.index);
      range.setEnd(cell.firstChild, word.index + word[0].length);
      if (range.getClientRects().length > 1) broken.push(word[0]);
    }
  return [Math.max(...over), [...new Set(broken)]];
})()"""


def evaluation(
    known: int = 3, foreign: int = 2, each: int = 20, held_back: int = 40, first: str = "class 0"
) -> Evaluation:
    rng = np.random.default_rng(1)
    taught = [first, *(f"class {i}" for i in range(1, known))]
    limits = promise(rng.normal(size=held_back))
    answers, names = [], []
    for name in [*taught, *(f"other {i}" for i in range(foreign))]:
        for _ in range(each):
            is_known = name in taught
            guess = name if is_known and rng.random() < 0.8 else str(rng.choice(taught))
            ood = float(rng.normal(0 if is_known else 2))
            unknown = limits.threshold is not None and ood > limits.threshold
            sure = float(rng.uniform(0.3, 1))
            top = (Choice(guess, sure),)
            answers.append(Answer("x.png", None if unknown else guess, sure, ood, limits.threshold, unknown, top))
            names.append(name)
    return evaluate(answers, names, taught, limits)


def texts(page: str) -> str:
    """What a reader sees, without style and drawings."""
    page = re.sub(r"<(style|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_page_has_the_numbers_of_the_evaluation() -> None:
    found = evaluation()
    page = texts(html(found, "birds", "holiday"))
    assert "birds on holiday" in page
    assert "100 images: 3 classes it was taught, 2 it was never taught" in page
    for each in found.classes:
        right = "never taught" if each.accuracy is None else f"{each.accuracy:.1f}"
        assert f"{each.name} 20 {right} {each.rejected:.1f}" in page
    assert f"Measured here: {found.known_rejected:.1f} %" in page
    assert f"Measured here: {found.unknown_rejected:.1f} %" in page
    assert "at most 5 % are called unknown" in page
    assert f"Calibration error: {100 * (found.calibration_error or 0):.1f} %" in page


def test_the_confusion_matrix_is_in_percent_of_the_true_class() -> None:
    found = evaluation()
    matrix, rows, columns = confusion_shares(found)
    assert rows == ["class 0", "class 1", "class 2", "other 0", "other 1"]
    assert columns == ["class 0", "class 1", "class 2", "unknown"]
    assert matrix.sum(1) == pytest.approx(np.full(5, 100))
    for i, row in enumerate(rows):
        assert matrix[i].tolist() == [100 * found.confusion[row].get(c, 0) / 20 for c in columns]


def test_mix_ups_are_wrong_answers_the_most_frequent_first() -> None:
    found = evaluation()
    listed = list(mix_ups(found))
    wrong = {(t, a): n for t, row in found.confusion.items() for a, n in row.items() if a not in (t, "unknown")}
    assert {(each.true, each.answer): each.images for each in listed} == wrong
    assert [each.images for each in listed] == sorted(wrong.values(), reverse=True)
    assert all(each.share == each.images * 5 for each in listed)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_names_are_text_and_nothing_is_loaded() -> None:
    found = evaluation(first="<script>alert(1)</script> $x^{2$ & 'a\"")
    found = replace(found, unreadable=("<b>x</b>: bad",))
    page = html(found, "<i>m</i>", "d")
    tags = _Tags()
    tags.feed(page)
    assert "script" not in {tag for tag, _ in tags.found}
    assert "<i>m" not in page and "<b>x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; $x^{2$ &amp; &#39;a&#34;" in page
    for tag, attributes in tags.found:
        for key in ("src", "href", "xlink:href"):
            target = attributes.get(key) or "#"
            assert target.startswith(("#", "data:")), (tag, target)
    assert "url(http" not in page and "@import" not in page


def test_names_that_are_no_valid_text_are_shown_as_in_the_terminal() -> None:
    found = evaluation(first="caf\udce9")  # how Python holds a folder's name that is not UTF-8
    found = replace(found, unreadable=("kap\udcfct.jpg: bad\x1b",))
    page = html(found, "m\udcff", "d\udcfe")
    page.encode()
    assert r"m\xff on d\xfe" in texts(page) and r"kap\xfct.jpg: bad" in page and "\x1b" not in page
    rows = re.sub(r"<svg\b.*?</svg>", "", page, flags=re.DOTALL)
    assert rows.count(r"caf\xe9") >= 2 and page.count(r"caf\xe9") > rows.count(r"caf\xe9"), "tables and figures"


@pytest.mark.parametrize("held_back", [0, 5])
def test_too_few_held_back_images_are_said(held_back: int) -> None:
    page = texts(html(evaluation(held_back=held_back), "m", "d"))
    assert "No image is called unknown" in page
    assert "Promised:" not in page


@pytest.mark.parametrize(("known", "foreign"), [(1, 0), (2, 0), (40, 3), (120, 0)])
def test_any_number_of_classes_can_be_drawn(known: int, foreign: int) -> None:
    page = html(evaluation(known, foreign, each=2), "m", "d")
    assert ("ROC curve" in page) == (foreign > 0)
    assert page.count("<svg") == (6 if foreign else 4)  # each figure wide and narrow
    assert len(page) < 2e6


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(("width", "kind"), [(1280, "wide"), (500, "narrow")])
def test_it_fits_wide_and_narrow_windows(tmp_path: Path, width: int, kind: str) -> None:
    page = tmp_path / "page.html"
    text = html(evaluation(first="a-very-long-name-without-any-space-" * 4), "model" * 20, "data")
    page.write_text(text.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    match = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout)
    assert match is not None
    measured = json.loads(match[1])
    assert measured["kinds"] == [f"drawing {kind}"] * 3
    assert min(measured["widths"]) > 150
    assert measured["overflow"] <= 0


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_tables_are_not_cut_and_break_only_long_words(tmp_path: Path) -> None:
    long = "aquarium_fish_of_the_northern_hemisphere_and_more"
    for name, first in (("long", long), ("short", "aquarium_fish")):
        (tmp_path / f"{name}.html").write_text(html(evaluation(first=first), "m", "d"), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        for width in (360, 420, 600, 1400):
            browser.resize(width)
            browser.open((tmp_path / "long.html").as_uri())
            over, broken = browser.run(CUT)
            assert over <= 0 and set(broken) <= {long}, (width, over, broken)
            if width >= 420:
                browser.open((tmp_path / "short.html").as_uri())
                assert browser.run(CUT) == [0, []], width
