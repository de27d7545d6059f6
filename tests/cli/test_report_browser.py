"""The HTML report in a real browser: no console message, every visible figure has a size, nothing is cut."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from morecl.report.page import html
from synthetic import make_record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")

MEASURE = """
<pre id="measured"></pre><script>
const drawings = [...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
  const around = svg.parentElement;
  return {label: around.getAttribute("aria-label"), hidden: !svg.checkVisibility(), kind: around.className,
          width: box.width, height: box.height, ink: drawn.width * drawn.height, right: box.right};
});
const links = [...document.querySelectorAll("nav a")].map(link => link.getBoundingClientRect().right);
document.getElementById("measured").textContent = JSON.stringify(
  {drawings, links, overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth});
</script>"""


def open_page(page: Path, width: int, profile: Path) -> tuple[str, str]:
    """The DOM after loading and the browser's log."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    command = [
        CHROMIUM,
        *flags,
        f"--user-data-dir={profile}",
        f"--window-size={width},900",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize(("width", "shown", "hidden"), [(1400, "wide", "narrow"), (500, "narrow", "wide")])
def test_report_opens_without_a_console_message(tmp_path: Path, width: int, shown: str, hidden: str) -> None:
    benchmarks = ("digits-5t", "mnist-5t")  # two: wider than a narrow window
    records = [make_record(m, b, seed, tasks=3) for m in ("icarl", "more") for b in benchmarks for seed in (0, 1)]
    page = tmp_path / "report.html"
    page.write_text(html(records).replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    dom, log = open_page(page, width, tmp_path / "profile")
    assert "CONSOLE" not in log, log
    text = re.search(r'<pre id="measured">(.*?)</pre>', dom)
    assert text is not None
    measured = json.loads(text[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    kinds = [drawing["kind"].strip() for drawing in measured["drawings"]]
    assert kinds.count("drawing wide") == kinds.count("drawing narrow") == 2 * 6
    assert kinds.count("drawing any") == 2 * 2  # the accuracy matrices
    for drawing in measured["drawings"]:
        if hidden in drawing["kind"]:
            assert drawing["hidden"], drawing
        else:
            assert drawing["width"] > 150 and drawing["height"] > 100 and drawing["ink"] > 0, drawing
            assert drawing["right"] <= width, drawing
    assert len(measured["links"]) == 6 and max(measured["links"]) <= width  # none is cut
    assert measured["overflow"] <= 0  # the page itself never scrolls sideways


def test_the_table_of_costs_fits_a_wide_window(tmp_path: Path) -> None:
    benchmarks = ("cifar10-5t", "cifar100-10t", "cifar100-20t", "svhn-5t", "tinyimagenet-5t")
    records = [
        make_record(method, benchmark, seed, seconds={"train": 1400.0 + 20 * seed})
        for method in ("icarl", "more", "joint")
        for benchmark in benchmarks
        for seed in (0, 1)
    ]
    measure = """<pre id="measured"></pre><script>
document.getElementById("measured").textContent = [...document.querySelectorAll(".scroll")]
  .filter(box => box.scrollWidth > box.clientWidth).map(box => box.ariaLabel + " " + box.scrollWidth).join();
</script>"""
    page = tmp_path / "report.html"
    page.write_text(html(records).replace("</body>", measure + "</body>"), encoding="utf-8")
    dom, _ = open_page(page, 1400, tmp_path / "profile")
    assert '<pre id="measured"></pre>' in dom, re.findall(r'<pre id="measured">.*?</pre>', dom)


def test_a_broken_page_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("<!doctype html><link rel=icon href=data:,><script>nothing()</script>", encoding="utf-8")
    assert "CONSOLE" in open_page(page, 800, tmp_path / "profile")[1]
