"""Differences between methods on the same seeds, and their t-test, against SciPy's."""

from __future__ import annotations

import pytest
from scipy import stats

from morecl.records import Record
from morecl.report.formats import latex, markdown
from morecl.report.grid import Row, arrange
from morecl.report.paired import difference_table, paired_p
from synthetic import held_out, with_aca

OURS, THEIRS = [80.0, 83.0, 81.0], [78.5, 80.0, 80.4]


def runs(method: str, values: list[float], first: int = 0) -> list[Record]:
    return [with_aca(value, method, seed=first + number) for number, value in enumerate(values)]


def test_p_is_that_of_scipy() -> None:
    for a, b in ((OURS, THEIRS), ([1.0, 2.0, 3.5, 2.0], [1.5, 1.0, 3.0, 4.0])):
        expected = stats.ttest_rel(a, b).pvalue
        assert paired_p([x - y for x, y in zip(a, b, strict=True)]) == pytest.approx(expected, rel=1e-10)
    assert paired_p([0.0, 0.0, 0.0]) == 1.0
    assert paired_p([2.0, 2.0, 2.0]) == 0.0


def test_differences_of_the_best_row() -> None:
    table = difference_table(arrange([*runs("eeil", THEIRS), *runs("morerp", OURS)]))
    assert table is not None
    assert table.title == "MORE-RP against the others"
    [(row, cells)] = table.rows.items()
    assert row == Row("eeil")
    cell = cells[table.heads.index(("Digits-5T", "ACA"))]
    assert cell is not None
    assert cell.mean == pytest.approx((1.5 + 3.0 + 0.6) / 3)
    assert cell.text() == "+1.70 ± 1.21"
    assert cell.note == f"p = {stats.ttest_rel(OURS, THEIRS).pvalue:.1f}"


def test_only_runs_with_the_same_seed_are_compared() -> None:
    shifted = [*runs("eeil", [*THEIRS, 10.0], first=1), *runs("morerp", [*OURS, 90.0, 84.0])]
    table = difference_table(arrange(shifted))
    assert table is not None
    [[cell, *_]] = table.rows.values()
    assert cell is not None
    assert (cell.n, cell.mean) == (4, pytest.approx((83 + 81 + 90 + 84 - 78.5 - 80 - 80.4 - 10) / 4))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_fewer_than_three_pairs_prove_nothing(kept: int) -> None:
    assert difference_table(arrange([*runs("eeil", THEIRS[:kept]), *runs("morerp", OURS)])) is None


def test_a_bound_is_compared_but_is_never_the_best() -> None:
    table = difference_table(
        arrange([*runs("joint", [90.0, 91.0, 92.0]), *runs("morerp", OURS), *runs("eeil", THEIRS)])
    )
    assert table is not None
    assert table.title.startswith("MORE-RP")
    assert {row.method: cells[0].text()[0] for row, cells in table.rows.items() if cells[0]} == {
        "eeil": "+",
        "joint": "-",
    }


def test_the_best_is_that_of_the_highest_mean() -> None:
    """Not of the highest median, which is 82 to 80."""
    table = difference_table(arrange([*runs("morerp", [80.0, 80.0, 93.5]), *runs("eeil", [82.0, 82.0, 82.5])]))
    assert table is not None
    assert table.title == "MORE-RP against the others"


def test_the_best_was_run_on_the_most_benchmarks() -> None:
    """What does well where it was tried may not do so elsewhere; it is compared where both were run."""
    elsewhere = [
        with_aca(value, method, "cifar10-5t", seed=seed)
        for method, values in (("morerp", OURS), ("eeil", THEIRS))
        for seed, value in enumerate(values)
    ]
    table = difference_table(
        arrange([*runs("ncm", [93.0, 93.5, 93.2]), *runs("morerp", OURS), *runs("eeil", THEIRS), *elsewhere])
    )
    assert table is not None
    assert table.title == "MORE-RP against the others"
    found = {row.method: [cell is not None for cell in cells] for row, cells in table.rows.items()}
    there = [head == "Digits-5T" for head, _ in table.heads]
    assert found == {"eeil": [True] * len(there), "ncm": there}


def test_models_of_single_tasks_are_not_compared() -> None:
    table = difference_table(
        arrange([*runs("single", [93.0, 93.5, 93.2]), *runs("morerp", OURS), *runs("eeil", THEIRS)])
    )
    assert table is not None
    assert [row.method for row in table.rows] == ["eeil"]


def test_a_seed_that_was_run_thrice_counts_once_with_its_mean() -> None:
    thrice = [with_aca(value, "morerp", device=f"cuda:{k}") for k, value in enumerate((80.0, 80.0, 83.0))]
    table = difference_table(arrange([*thrice, *runs("morerp", OURS[1:], first=1), *runs("eeil", THEIRS)]))
    assert table is not None
    [[cell, *_]] = table.rows.values()
    assert cell is not None
    assert (cell.n, cell.mean) == (3, pytest.approx((81 + 83 + 81 - 78.5 - 80 - 80.4) / 3))


def test_the_number_of_pairs_is_said_once_if_it_is_the_same() -> None:
    same = difference_table(arrange([*runs("eeil", THEIRS), *runs("icarl", THEIRS), *runs("morerp", [*OURS, 82.0])]))
    assert same is not None
    assert same.same_n == 3
    other = difference_table(
        arrange([*runs("eeil", THEIRS), *runs("icarl", [*THEIRS, 80.0]), *runs("morerp", [*OURS, 82.0])])
    )
    assert other is not None
    assert other.same_n is None


@pytest.mark.parametrize(
    ("off", "note"), [((0.0, 0.01, 0.02), "p < 0.001"), ((0.0, 0.5, 1.0), "p = 0.003"), ((0.0, 5.0, 15.0), "p = 0.1")]
)
def test_how_p_is_told(off: tuple[float, ...], note: str) -> None:
    table = difference_table(arrange([*runs("eeil", [70.0 - each for each in off]), *runs("morerp", [75.0] * 3)]))
    assert table is not None
    [[cell, *_]] = table.rows.values()
    assert cell is not None
    p = stats.ttest_1samp([5 + each for each in off], 0).pvalue
    assert cell.note == note and (p < 0.001 if "<" in note else p == pytest.approx(float(note[4:]), abs=0.05))


def test_held_out_images_are_not_compared_with_test_images() -> None:
    assert difference_table(arrange([*map(held_out, runs("eeil", THEIRS)), *runs("morerp", OURS)])) is None


def test_reports_show_it() -> None:
    records = [*runs("eeil", [each - 20 for each in THEIRS]), *runs("morerp", OURS)]
    assert "+21.70 ± 1.21 p = 0.001" in markdown(records)
    assert "+21.70$\\pm$1.21" in latex(records)
