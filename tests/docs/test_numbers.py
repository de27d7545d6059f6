"""Numbers in the overview of the methods and in the results' summary are means of the committed records."""

from __future__ import annotations

import re
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


def test_the_summary_of_the_results_has_the_means_of_the_records(records: dict[str, list[Record]]) -> None:
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w+-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert {TITLES[title] for title, *_ in rows} == {name for name in METHODS if records[name]} - {"single"}
    for title, *cells in rows:
        expected = averages(records[TITLES[title]], "aca", "aia", "iauc")
        assert [float(cell) for cell in cells] == pytest.approx(expected, abs=0.0051)
