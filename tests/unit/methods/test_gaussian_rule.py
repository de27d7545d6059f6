from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from morecl.gaussian import MIN_DISTANCE
from morecl.methods.gaussian_rule import GaussianRule
from morecl.scoring import Output


class Nearest(GaussianRule):
    def score(self, features: Sequence[Tensor]) -> Output:
        raise NotImplementedError


def test_room_for_each_task_and_what_is_there_stays() -> None:
    rule = Nearest(3)
    rule.grow(2)
    rule.means[:], rule.precisions[0] = 5, 7
    rule.grow(1)
    assert rule.sizes == [2, 1]
    assert rule.means[:, 0].tolist() == [5, 5, 0] and rule.precisions[:, 0, 0].tolist() == [7, 0]
    assert {name: (value.shape, value.dtype) for name, value in rule.state_dict().items()} == {
        "means": ((3, 3), torch.float64),
        "precisions": ((2, 3, 3), torch.float64),
    }


def test_distance_to_the_nearest_class_of_the_task() -> None:
    rule = Nearest(2)
    rule.grow(1)
    rule.grow(2)
    rule.means[:] = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    rule.precisions[0], rule.precisions[1] = torch.eye(2), 4 * torch.eye(2)
    z = torch.tensor([[0.0, 0.0], [0.0, 4.0]])
    assert rule.nearest(0, z).tolist() == [MIN_DISTANCE, 4]
    assert rule.nearest(1, z).tolist() == [6, 2]
