"""How long a lesson is, and how many tasks fit."""

from __future__ import annotations

import math

import pytest

from morecl.classifier.capacity import tasks_left
from morecl.classifier.plan import Plan, plan, within


@pytest.mark.parametrize(
    "images, classes, expected",
    [
        (1, 1, Plan(40, 8, 200)),
        (80, 5, Plan(40, 10, 200)),
        (800, 20, Plan(10, 64, 400)),
        (50_000, 150, Plan(5, 64, 2000)),
    ],
)
def test_few_images_are_repeated_more(images: int, classes: int, expected: Plan) -> None:
    assert plan(images, classes) == expected


def test_a_budget_decides_the_epochs() -> None:
    wanted = Plan(10, 64, 200)
    assert within(wanted, 1000, minutes=1, images_per_second=100, overhead=10).epochs == 5
    assert within(wanted, 1000, minutes=0.01, images_per_second=100, overhead=10).epochs == 1
    assert within(wanted, 10, minutes=60, images_per_second=100, overhead=0).epochs == 40
    for endless in (math.inf, 1e308):
        assert within(wanted, 10, minutes=endless, images_per_second=100, overhead=0).epochs == 40


def test_tasks_that_fit() -> None:
    assert tasks_left({}, 3) is None
    assert tasks_left({"a": 0.0}, 1) is None
    assert tasks_left({"a": 50.0, "b": 10.0}, 1) == 3  # 50, 25, 12.5, 6.25 percent free
    assert tasks_left({"a": 97.0}, 4) == 0
