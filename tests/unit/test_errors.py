"""What messages are made from."""

from __future__ import annotations

from typing import Self

import pytest
from pydantic import BaseModel, ValidationError, field_validator, model_validator

from morecl.errors import few, first_line, first_problem, shortened


class Sizes(BaseModel):
    sizes: list[int]
    total: int = 0

    @field_validator("total")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value

    @model_validator(mode="after")
    def adds_up(self) -> Self:
        if self.total != sum(self.sizes):
            raise ValueError("total is not the sum of sizes")
        return self


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"sizes": [1, None], "total": None}, "sizes.1: Input should be a valid integer"),
        ({"sizes": [1], "total": 1}, "total: 1 is odd"),
        ({"sizes": [1], "total": 2}, "total is not the sum of sizes"),
    ],
)
def test_the_first_problem_and_its_place(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sizes.model_validate(values)
    assert first_problem(caught.value) == problem


@pytest.mark.parametrize(
    ("count", "separator", "found"),
    [
        (0, ", ", ""),
        (1, ", ", "0"),
        (3, ", ", "0, 1, 2"),
        (4, ", ", "0, 1, 2 and 1 more"),
        (3, "; ", "0; 1; 2"),
        (1237, "; ", "0; 1; 2; and 1,234 more"),
    ],
)
def test_the_first_few_and_how_many_more(count: int, separator: str, found: str) -> None:
    assert few([str(i) for i in range(count)], 3, separator) == found


def test_an_error_is_told_in_one_line_also_if_it_says_nothing() -> None:
    assert first_line(RuntimeError("\nno room\nat line 3")) == "no room"
    assert first_line(MemoryError()) == first_line(MemoryError(" ")) == "MemoryError"


def test_names_are_quoted() -> None:
    assert shortened(["a", 7, ("b", 1)]) == "'a', 7, ('b', 1)"
    assert shortened("abcdefg") == "'a', 'b', 'c', 'd', 'e' and 2 more"
