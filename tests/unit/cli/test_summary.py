"""The table of results in the terminal."""

from __future__ import annotations

import io
import statistics

import pytest
from rich.console import Console

from morecl.cli.summary import print_summary
from morecl.records import Record
from synthetic import make_record, with_aca


def shown(records: list[Record]) -> tuple[str, list[str]]:
    """The summary as text, and its green lines."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", record=True)
    print_summary(records, console)
    styled = console.export_text(styles=True, clear=False)
    lines = console.export_text().splitlines()
    return "\n".join(lines), [line for line, raw in zip(lines, styled.splitlines(), strict=True) if "32m" in raw]


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_a_narrow_terminal_folds_names_and_cuts_no_number(width: int) -> None:
    long = "folder:some/long/path_without_any_blank_in_it"
    many = [make_record("derpp", "cifar100-20t"), make_record("more", long, config={"coefficient": False})]
    many = [record.model_copy(update={"seconds": {"total": 123456.0}}) for record in many]
    console = Console(file=io.StringIO(), width=width, record=True)
    print_summary(many, console)
    lines = console.export_text().splitlines()
    text = "\n".join(lines)
    assert "…" not in text and all(len(line) <= width for line in lines)
    assert "DER++" in text and "MORE" in text
    for record in many:
        assert f"{record.metrics.aca:.2f}" in text
    if width >= 80:
        assert all(head in text for head in ("runs", "AIA", "TIL", "AUC", "IAUC"))
    start = lines[1].index("benchmark")
    assert long in "".join(line[start:].split("   ")[0].strip() for line in lines)


def test_the_legend_explains_what_is_shown_and_what_the_means_are_over() -> None:
    text = " ".join(shown([make_record()])[0].split())
    assert "ACA: accuracy on all classes" in text
    assert "TIL: accuracy with the task given, mean over tasks (ACA: over images)" in text
    console = Console(file=io.StringIO(), width=40, record=True)
    print_summary([make_record("derpp", "cifar100-20t")], console)
    assert "TIL" not in console.export_text()


def test_names_in_the_summary_are_shown_as_they_are() -> None:
    text, _ = shown([make_record("[b]mine[/b]", "folder:p[/q]")])
    assert "[b]mine[/b]" in text and "folder:p[/q]" in text


def test_the_best_of_each_benchmark_is_green_but_not_the_upper_bound() -> None:
    levels = {
        ("icarl", "digits-5t"): 50,
        ("more", "digits-5t"): 60,
        ("joint", "digits-5t"): 70,
        ("more", "mnist-5t"): 80,
    }
    _, green = shown([make_record(m, b, level=level) for (m, b), level in levels.items()])
    assert [line.split()[:2] for line in green] == [["MORE", "Digits-5T"]]


def test_scores_on_held_out_images_are_told_apart_and_not_ranked() -> None:
    trial = make_record(level=85.0)
    trial = trial.model_copy(update={"data": trial.data.model_copy(update={"scored_on": "validation"})})
    text, green = shown([make_record(level=60.0), make_record("icarl", level=50.0), trial])
    assert "MORE (held-out images)" in text and "not on the test set" in text
    assert [line.split()[0] for line in green] == ["MORE"] and "held-out" not in green[0]
    assert "Scored on held-out training images" in shown([trial])[0]


def test_seconds_of_a_run_that_shared_its_card_are_not_shown() -> None:
    seconds = {"train": 1234.0, "total": 1234.0}
    for shared, text in ((False, "1234"), (True, "-")):
        table, _ = shown([make_record("more", device="cuda", shared=shared, seconds=seconds)])
        assert table.splitlines()[3].split()[-1] == text


def test_the_spread_of_several_runs_is_shown() -> None:
    values = [70.0, 80.0, 84.0]
    text, green = shown(
        [with_aca(value, "more", seed=seed) for seed, value in enumerate(values)] + [with_aca(60.0, "icarl")]
    )
    assert f"78.00 ± {statistics.stdev(values):.2f}" in text and "±: sample standard deviation" in text
    assert "60.00 ±" not in text and [line.split()[0] for line in green] == ["MORE"]
    assert "±" not in shown([with_aca(60.0, "icarl")])[0]
