"""The paper's numbers, as packaged."""

from __future__ import annotations

import pytest

from morecl.records import Record
from morecl.report.paper import paper, paper_number
from synthetic import make_record


@pytest.mark.parametrize(
    ("record", "metric", "expected"),
    [
        (make_record("more", "cifar10-5t"), "aca", (89.16, 0.96)),
        (make_record("gd", "cifar10-5t"), "aca", (89.16, 0.53)),
        (make_record("more", "cifar10-5t", config={"memory_size": 100}), "aca", (88.13, 1.16)),
        (make_record("more", "cifar10-5t", config={"memory_size": 77}), "aca", None),
        (make_record("more", "cifar10-5t", config={"coefficient": False}), "aia", (93.36, 0.79)),
        (make_record("more", "cifar10-5t", config={"back_update": False}), "aia", (93.86, 1.12)),
        (make_record("more", "cifar10-5t", config={"back_update": True}), "iauc", (88.06, 1.84)),
        (make_record("ncm", "cifar10-5t", tasks=1), "aca", (85.8, None)),
        (make_record("ncm", "cifar10-5t"), "aca", None),
        (make_record("more", "cifar10-5t-1k"), "aca", None),
        (make_record("pass", "svhn-5t"), "aca", (76.09, None)),
    ],
)
def test_numbers_of_the_paper(record: Record, metric: str, expected: tuple[float, float | None] | None) -> None:
    assert paper_number(record, metric) == expected


@pytest.mark.parametrize(
    ("condition", "averages"),
    [
        ("main", {"aca": 71.59, "aia": 80.77, "auc": 74.99, "iauc": 82.23}),
        ("half_memory", {"aca": 71.44, "aia": 79.61}),
    ],
)
def test_the_packaged_numbers_give_the_averages_that_the_paper_prints(
    condition: str, averages: dict[str, float]
) -> None:
    five = [name for name in paper()["settings"] if name != "svhn-5t"]
    for metric, printed in averages.items():
        values = [paper()["numbers"][condition][metric][name]["more"][0] for name in five]
        assert sum(values) / 5 == pytest.approx(printed, abs=0.006)
