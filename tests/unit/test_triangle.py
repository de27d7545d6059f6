"""The factor in blocks against NumPy, and what it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from morecl.random import generator
from morecl.triangle import Triangle


def positive(size: int) -> Tensor:
    a = torch.randn(size, size + 5, generator=generator(0, "matrix", size), dtype=torch.float64)
    return a @ a.mT / size


@pytest.mark.parametrize(("size", "block"), [(1, 4), (4, 4), (7, 3), (60, 13), (60, 100)])
def test_solves_as_numpy_does(size: int, block: int) -> None:
    a = positive(size)
    right = torch.randn(size, 3, generator=generator(1, "right"), dtype=torch.float64)
    made = Triangle(lambda start, stop: a[start:stop, :stop].clone(), size, block)
    lower = np.linalg.cholesky(a.numpy())
    np.testing.assert_allclose(made.solve(right).numpy(), np.linalg.solve(a.numpy(), right.numpy()), rtol=1e-8)
    np.testing.assert_allclose(lower @ made.forward(right).numpy(), right.numpy(), atol=1e-12)


def test_keeps_half_of_the_matrix() -> None:
    a, asked = positive(64), []

    def rows(start: int, stop: int) -> Tensor:
        asked.append((stop - start) * stop)
        return a[start:stop, :stop].clone()

    made = Triangle(rows, 64, block=8)
    assert sum(part.numel() for part in made._rows) == sum(asked) == 8 * 8 * sum(range(1, 9))  # 36 of 64 blocks


def test_nothing_to_solve() -> None:
    made = Triangle(lambda start, stop: torch.zeros(0, 0), 0)
    assert made.solve(torch.zeros(0, 3)).shape == (0, 3)


def test_refuses_what_has_no_factor() -> None:
    a = -torch.eye(5, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError):
        Triangle(lambda start, stop: a[start:stop, :stop].clone(), 5, block=2)
