from __future__ import annotations

import torch

from morecl.symmetric import packed, unpacked


def test_packed_is_the_upper_triangle_row_after_row() -> None:
    matrix = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    assert packed(matrix).tolist() == [1, 2, 3, 4, 5, 6]


def test_unpacked_gives_every_bit_back() -> None:
    matrix = torch.randn(7, 7, dtype=torch.float64)
    matrix = matrix + matrix.mT
    matrix[1, 4] = matrix[4, 1] = -0.0
    assert torch.equal(unpacked(packed(matrix), 7).view(torch.int64), matrix.view(torch.int64))
