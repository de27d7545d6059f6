"""The Cholesky factor of a large symmetric matrix, kept as one triangle of blocks.

``torch.linalg.cholesky`` holds the whole matrix and the whole factor, 2 N^2 numbers. Here the matrix is asked for a few
rows at a time and only the lower triangle of the factor is kept, N^2 / 2 numbers: 5 GB instead of 20 for 50,000 images
in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 8192  # rows that are computed together; a matrix up to this size is one block


class Triangle:
    """L with L L^T = A, lower triangular: of each block of rows, the part up to and including the diagonal."""

    def __init__(self, rows: Callable[[int, int], Tensor], size: int, block: int = BLOCK):
        """``rows(start, stop)``: rows start..stop-1 of A (N, N), columns 0..stop-1, which may be changed in place.

        Raises:
            torch.linalg.LinAlgError: A is not positive definite.
        """
        self._starts = range(0, size, block)
        self._rows: list[Tensor] = []  # (stop - start, stop) for each start
        for start in self._starts:
            own = rows(start, min(start + block, size))
            for before, done in zip(self._starts, self._rows, strict=False):
                here = slice(before, done.shape[1])
                left = own[:, here] - own[:, :before] @ done[:, :before].mT
                own[:, here] = torch.linalg.solve_triangular(done[:, here], left.mT, upper=False).mT
            own[:, start:] -= own[:, :start] @ own[:, :start].mT
            own[:, start:] = torch.linalg.cholesky(own[:, start:])
            self._rows.append(own)

    def forward(self, right: Tensor) -> Tensor:
        """L^-1 ``right``: (N, C) -> (N, C)."""
        solved = right.clone()
        for start, own in zip(self._starts, self._rows, strict=True):
            here = slice(start, own.shape[1])
            left = solved[here] - own[:, :start] @ solved[:start]
            solved[here] = torch.linalg.solve_triangular(own[:, here], left, upper=False)
        return solved

    def solve(self, right: Tensor) -> Tensor:
        """A^-1 ``right``: (N, C) -> (N, C)."""
        solved = self.forward(right)
        for start, own in reversed(list(zip(self._starts, self._rows, strict=True))):
            here = slice(start, own.shape[1])
            solved[here] = torch.linalg.solve_triangular(own[:, here].mT, solved[here], upper=True)
            solved[:start] -= own[:, :start].mT @ solved[here]
        return solved
