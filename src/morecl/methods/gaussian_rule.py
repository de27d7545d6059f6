"""What scoring rules share that know the classes of each task as Gaussians under the task's network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from morecl import gaussian
from morecl.gaussian import MIN_DISTANCE
from morecl.scoring import Rule


class GaussianRule(Rule):
    """State, for T tasks and C classes: ``means`` (C, D) of classes, ``precisions`` (T, D, D), one of each task.

    :meth:`fit` of a subclass fills in those of the newest task.
    """

    means: Tensor
    precisions: Tensor

    def __init__(self, dim: int):
        super().__init__()
        self.sizes: list[int] = []  # classes of each task
        self.register_buffer("means", torch.zeros(0, dim, dtype=torch.float64))
        self.register_buffer("precisions", torch.zeros(0, dim, dim, dtype=torch.float64))

    def grow(self, classes: int) -> None:
        self.sizes.append(classes)
        self.means = F.pad(self.means, (0, 0, 0, classes))
        self.precisions = F.pad(self.precisions, (0, 0, 0, 0, 0, 1))

    def nearest(self, k: int, z: Tensor) -> Tensor:
        """Mahalanobis distance of features ``z`` (N, D) to the nearest class of task ``k``, never 0: (N,)."""
        first = sum(self.sizes[:k])
        distance = gaussian.mahalanobis(z, self.means[first : first + self.sizes[k]], self.precisions[k])
        return distance.amin(1).clamp(min=MIN_DISTANCE)
