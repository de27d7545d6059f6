"""The page on several cards has the numbers of its record, and the record's model is that of the script."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "howto" / "several-cards.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads((ROOT / "results" / "several-cards" / "cpu.json").read_text())


def test_the_table_is_that_of_the_record(record: Any) -> None:
    models = [record["model"][name]["ranks"] for name in ("DeiT-Ti, H200", "ViT-S, H200")]
    rows = re.findall(r"^\| (\d+)[^|]*\| ([\d.]+) x \| ([\d.]+) x \| ([\d.]+) x \| ([\d.]+) x \|$", PAGE, re.MULTILINE)
    assert [int(cards) for cards, *_ in rows] == [2, 4, 8, 64, 512]
    for cards, *cells in rows:
        found = [next(row for row in model if row["ranks"] == int(cards)) for model in models]
        expected = [row[f"{kind}_gain"] for kind in ("same_batch", "batch_per_rank") for row in found]
        assert cells == [f"{value:.1f}" for value in expected]


def test_the_measured_times_are_those_of_the_record(record: Any) -> None:
    one, two = (record[name]["steps"]["128"] for name in ("one_rank", "two_ranks"))
    text = " ".join(PAGE.split())
    assert (
        f"a rank needs {two['processor']:.2f} s of processor time per step, one rank alone {one['processor']:.2f} s"
        in text
    )
    assert f"The wall times were {two['wall']:.2f} s and {one['wall']:.2f} s" in text
    travels = record["two_ranks"]["sum_seconds"] + record["two_ranks"]["gather_seconds"]
    assert f"which takes {1e3 * travels:.1f} ms" in text


def test_the_model_is_that_of_the_script(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import several_cards

    cost = several_cards.cost_of(record["one_rank"], record["batch"])
    name = "vit_mini_patch4_32 at 32 px, CPU, 1 threads"
    tiny, small = several_cards.h200("deit-tiny", 192, 12), several_cards.h200("vit-small", 384, 12)
    for title, made in {name: cost, "DeiT-Ti, H200": tiny, "ViT-S, H200": small}.items():
        expected = json.loads(json.dumps({**asdict(made), "ranks": several_cards.modelled(made)}))
        assert record["model"][title] == expected


def test_the_times_of_a_card_are_those_of_its_record() -> None:
    found = json.loads((ROOT / "results" / "several-cards" / "h200.json").read_text())
    captured, plain = (found["one_rank"][kind] for kind in ("captured_steps", "steps"))
    text = " ".join(PAGE.split())
    times = (
        f"one rank: {1e3 * captured['128']['wall']:.1f} ms when captured, {1e3 * plain['128']['wall']:.1f} ms when not"
    )
    assert times in text
    assert [round(1e3 * f(plain[n]["wall"] for n in ("16", "32", "64"))) for f in (min, max)] == [14, 18]
    assert "(14 to 18 ms with 16 to 64 images)" in text
    assert f"take {1e3 * found['two_ranks']['steps']['128']['wall']:.1f} ms" in text
