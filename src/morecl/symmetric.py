"""A symmetric matrix as one of its triangles, which takes half the memory. Row by row: indices would take more."""

from __future__ import annotations

import torch
from torch import Tensor


def packed(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric (n, n), row after row: (n (n + 1) / 2,)."""
    return torch.cat([row[i:] for i, row in enumerate(matrix.unbind())])


def unpacked(triangle: Tensor, side: int) -> Tensor:
    """The symmetric (``side``, ``side``) of :func:`packed`, bit for bit."""
    matrix = triangle.new_zeros(side, side)
    for i, row in enumerate(triangle.split(list(range(side, 0, -1)))):
        matrix[i, i:] = row
    is_upper = torch.ones(side, side, dtype=torch.bool, device=triangle.device).triu()
    return torch.where(is_upper, matrix, matrix.mT)
