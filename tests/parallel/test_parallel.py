"""Two ranks (gloo, on the CPU) learn what one process learns, with every method, and agree bit for bit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import parallel_work as work
from morecl.parallel import Group

FINISHED = ("more", "morerp", "hat", "row", "tpl", "single", "ranpac", "slda", "ncm", "csc", "more, trained backbone")


def of_ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    return [dict(np.load(folder / f"{name}-{rank}.npz")) for rank in range(2)]


@cache
def alone(variant: str) -> dict[str, Any]:
    return work.learned(None, variant)


HALF_PRECISION = "state rule.ridge."  # MORE-RP keeps features in half precision


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Relative to the largest number of each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if np.issubdtype(value.dtype, np.floating):
            scale = max(float(np.abs(value).max(initial=0)), 1e-3) * (50 if name.startswith(HALF_PRECISION) else 1)
            np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * scale, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("size", work.SIZES)
def test_the_gradient_of_more_is_that_of_the_whole_batch(two_ranks: Path, size: int) -> None:
    expected = work.gradients_of_more(None, size)
    assert {"tasks.1.embedding", "adapters.w1", "tasks.1.norms.weight", "tasks.1.head.weight"} <= expected.keys()
    for found in of_ranks(two_ranks, f"gradients-{size}"):
        assert_close(found, expected, 1e-13)


@pytest.mark.parametrize("size", work.SIZES)
def test_the_gradient_of_inputs_is_that_of_the_whole_batch(two_ranks: Path, size: int) -> None:
    expected = work.gradient_of_inputs(None, size)
    for found in of_ranks(two_ranks, f"inputs-{size}"):
        assert_close(found, expected, 1e-13)


@pytest.mark.parametrize("variant", work.VARIANTS)
def test_two_ranks_learn_what_one_process_learns(two_ranks: Path, variant: str) -> None:
    one, other = of_ranks(two_ranks, variant)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name
    expected = alone(variant)
    assert (one["scores"].argmax(1) == expected["scores"].argmax(1)).all()
    assert_close(one, expected, 2e-5)


@pytest.mark.parametrize("variant", FINISHED)
def test_features_of_a_finished_task_do_not_change(two_ranks: Path, variant: str) -> None:
    for found in of_ranks(two_ranks, variant):
        assert torch.equal(torch.from_numpy(found["before"]), torch.from_numpy(found["after"]))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", work.ON_A_CARD)
def test_two_ranks_on_one_card_learn_what_one_process_learns(two_ranks_on_a_card: Path, variant: str) -> None:
    one, other = of_ranks(two_ranks_on_a_card, variant)
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name
    expected = work.learned(None, variant, "cuda")
    assert (one["scores"].argmax(1) == expected["scores"].argmax(1)).all()
    assert_close(one, expected, 1e-3)
    if variant in FINISHED:
        assert torch.equal(torch.from_numpy(one["before"]), torch.from_numpy(one["after"]))


def test_ranks_that_differ_are_told_what_in(two_ranks: Path) -> None:
    for rank in range(2):
        told = json.loads((two_ranks / f"told-{rank}.json").read_text())
        assert "the 2 ranks of this run differ in their finished tasks (finished tasks: 0, 1)" in told["agree"]
        assert "after task 1 the 2 ranks of this run no longer have the same numbers" in told["require_same"]
        assert "1 of 2 tensors differ, such as weights" in told["require_same"]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_are_all_rows_once_and_nearly_equal(size: int) -> None:
    for count in range(20):
        parts = [range(count)[Group(rank, size).part(count)] for rank in range(size)]
        assert [row for part in parts for row in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
