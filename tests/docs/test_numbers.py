"""Numbers in the overview of the methods and in the results' summaries are means of the committed records."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from morecl.catalogue import METHODS
from morecl.records import Record, read_record

ROOT = Path(__file__).resolve().parents[2]
TITLES = {method.title.partition(" ")[0]: name for name, method in METHODS.items()}


@pytest.fixture(scope="module")
def records() -> dict[str, list[Record]]:
    found = [read_record(path) for path in sorted((ROOT / "results" / "all-methods").rglob("result.json"))]
    return {name: [record for record in found if record.method == name] for name in METHODS}


def averages(records: list[Record], *metrics: str) -> list[float]:
    assert len(records) == 2
    return [mean(getattr(record.metrics, metric) for record in records) for metric in metrics]


def test_the_overview_has_the_means_of_the_records(records: dict[str, list[Record]]) -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+?\]\(methods/(\w+)\.md\) \|.*\| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} == {name for name in METHODS if records[name]} - {"single"}
    assert {*re.findall(r"\(methods/(\w+)\.md\)", text)} == METHODS.keys()
    for name, *cells in rows:
        assert [float(cell) for cell in cells] == pytest.approx(averages(records[name], "aca", "iauc"), abs=0.0051)


def test_the_summary_of_all_methods_has_the_means_of_the_records(records: dict[str, list[Record]]) -> None:
    text = (ROOT / "results" / "all-methods" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w+-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert {TITLES[title] for title, *_ in rows} == {name for name in METHODS if records[name]} - {"single"}
    for title, *cells in rows:
        expected = averages(records[TITLES[title]], "aca", "aia", "iauc")
        assert [float(cell) for cell in cells] == pytest.approx(expected, abs=0.0051)


BENCHMARKS = ("cifar10-5t", "cifar100-10t", "cifar100-20t", "svhn-5t")


def table(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose head is ``head``, or comes right below it."""
    lines = [line for line in text.partition(head)[2].splitlines() if not line.startswith("<!--")][2:]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    assert rows
    return rows


def records_of(folder: str, title: str, benchmark: str) -> list[Record]:
    name = {"joint training": "joint", "MORE (paper)": "more-paper"}.get(title) or TITLES[title]
    return [read_record(path) for path in (ROOT / "results" / folder / benchmark / name).glob("*/result.json")]


@pytest.mark.parametrize(
    ("file", "head", "folder", "metrics", "close"),
    [
        ("README.md", "<!-- table: means frontier 1 aca iauc -->\n", "frontier", ("aca", "iauc"), 0.051),
        ("README.md", "<!-- table: means shipped 1 aca iauc -->\n", "shipped", ("aca", "iauc"), 0.051),
        (
            "frontier/README.md",
            "<!-- table: means frontier 2 aca aia iauc -->\n",
            "frontier",
            ("aca", "aia", "iauc"),
            0.0051,
        ),
        (
            "shipped/README.md",
            "<!-- table: means shipped 2 aca aia iauc -->\n",
            "shipped",
            ("aca", "aia", "iauc"),
            0.0051,
        ),
    ],
)
def test_the_tables_of_benchmarks_have_the_means_of_the_records(
    file: str, head: str, folder: str, metrics: tuple[str, ...], close: float
) -> None:
    found = set()
    for title, *cells in table((ROOT / "results" / file).read_text(encoding="utf-8"), head):
        shown = {"frontier": BENCHMARKS[:3], "shipped": BENCHMARKS}[folder]
        for benchmark, cell in zip(shown, cells, strict=True):
            own = records_of(folder, title, benchmark)
            assert bool(own) == (cell != "-"), (title, benchmark)
            assert len({record.class_order_name for record in own}) in (0, 3, 5), (title, benchmark)
            if own:
                expected = [mean(getattr(record.metrics, metric) for record in own) for metric in metrics]
                numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
                assert numbers == pytest.approx(expected, abs=close), (title, benchmark)
                found.add(("more-paper" if title == "MORE (paper)" else own[0].method, benchmark))
    shown_folders = METHODS.keys() - {"single"} | {"more-paper"}
    folders = [path for path in (ROOT / "results" / folder).glob("*/*/") if path.name in shown_folders]
    assert found == {(path.name, path.parent.name) for path in folders}


def test_the_main_page_has_the_means_of_the_records() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if line.startswith("| | MORE-RP | joint training"))
    titles = [cell.strip() for cell in head.strip("|").split("|")[1:]]
    sources = {
        "CIFAR100-10T": ("frontier", "cifar100-10t"),
        "CIFAR10-5T": ("frontier", "cifar10-5t"),
        "CIFAR100-10T, [included backbone](results/shipped/README.md)": ("shipped", "cifar100-10t"),
        "SVHN-5T, included backbone": ("shipped", "svhn-5t"),
    }
    source, shown = ("", ""), set()
    for label, *cells in table(text, head):
        metric = "iauc" if label.startswith("unknown classes") else "aca"
        source = sources[label] if metric == "aca" else source
        shown.add(source)
        for title, cell in zip(titles, cells, strict=True):
            expected = mean(getattr(record.metrics, metric) for record in records_of(source[0], title, source[1]))
            assert float(cell) == pytest.approx(expected, abs=0.051), (label, title)
    assert shown == {*sources.values()}


def test_the_tables_of_rates_have_the_numbers_of_the_records() -> None:
    for folder in ("frontier-rates", "shipped-rates"):
        text = (ROOT / "results" / folder / "README.md").read_text(encoding="utf-8")
        for benchmark in BENCHMARKS:
            _, there, part = text.partition(f"\n## {benchmark.upper()}\n")
            paths = sorted((ROOT / "results" / folder / benchmark).glob("*/lr-*/order-*/result.json"))
            assert bool(there) == bool(paths), (folder, benchmark)
            if not there:
                continue
            head = next(line for line in part.splitlines() if line.startswith("| rate |"))
            rates = [float(cell) for cell in head.strip("|").split("|")[1:]]
            rows = {name: cells for name, *cells in table(part, head)}
            for path in paths:
                record = read_record(path)
                title = {"joint": "joint training"}.get(record.method, METHODS[record.method].title)
                cell = rows[title][rates.index(record.config["lr"])]
                found = [float(number) for number in re.findall(r"[\d.]+", cell)]
                assert found == pytest.approx([record.metrics.aca, record.metrics.aia], abs=0.0051), (folder, path)
            assert sum(cell != "" for cells in rows.values() for cell in cells) == len(paths)


def test_the_tables_are_up_to_date() -> None:
    command = [sys.executable, "docs/result_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"run docs/result_tables.py; out of date: {done.stdout}{done.stderr}"


def test_the_row_of_digits_has_the_numbers_of_the_records() -> None:
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if line.startswith("| | MORE-RP | SLDA"))
    names = [cell.strip() for cell in head.strip("|").split("|")[1:]]
    (row,) = table(text, head)
    for titles, cell in zip(names, row[1:], strict=True):
        for title in titles.split(", "):
            path = ROOT / "results" / "smoke-digits" / TITLES.get(title, title)
            (record,) = [read_record(file) for file in path.rglob("result.json")]
            assert float(cell) == pytest.approx(record.metrics.aca, abs=0.051), title
