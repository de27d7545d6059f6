"""SLDA: Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis (Hayes, Kanan; CVPR Workshops 2020).

Nothing is trained: every class is a Gaussian on the features of the frozen backbone, with its own mean mu_c and one
covariance S for all. With the precision L = ((1 - shrinkage) S + shrinkage I)^-1 the score of a class is linear:

    w_c . z + b_c,   w_c = L mu_c,   b_c = -1/2 mu_c . L mu_c.

Means and scatter are sums over images, so earlier classes need no image to be kept, nothing is forgotten, and the order
of the images does not matter. The OOD score is the maximum softmax probability, as its log-odds.

Deviations:

- S is the scatter around the final class means divided by the number of images. The paper updates it with every image,
  around the mean so far, which depends on the order and tends to the same.
- No base initialisation: the first task is learned like the others.
- :mod:`morecl.methods.prototypes` says how a backbone that is not frozen is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import SCORING, SgdConfig
from morecl.methods.prototypes import PrototypeLearner
from morecl.scoring import LearnedTask, Output, Rule


class SldaConfig(SgdConfig):
    shrinkage: float = Field(
        1e-4, gt=0, le=1, description="weight of the identity in the covariance", json_schema_extra=SCORING
    )


class Discriminant(Rule):
    """Linear discriminant analysis with the class ``means`` (C, D) and one covariance."""

    derived = frozenset({"precision"})
    scatter: Tensor
    samples: Tensor
    precision: Tensor

    def __init__(self, means: Callable[[], Tensor], dim: int, shrinkage: float):
        super().__init__()
        self._means, self.shrinkage = means, shrinkage
        self.register_buffer("scatter", torch.zeros(dim, dim, dtype=torch.float64))  # sum (z - mu_y)(z - mu_y)^T
        self.register_buffer("samples", torch.zeros((), dtype=torch.float64))
        self.register_buffer("precision", torch.eye(dim, dtype=torch.float64))

    def fit(self, learned: LearnedTask) -> None:
        features = learned.features(learned.networks[0]).double()
        centred = features - self._means()[learned.task.columns.to(features.device)]
        self.scatter += centred.mT @ centred
        self.samples += len(features)
        identity = torch.eye(len(self.scatter), dtype=self.scatter.dtype, device=self.scatter.device)
        covariance = self.scatter / self.samples
        self.precision.copy_(torch.linalg.inv((1 - self.shrinkage) * covariance + self.shrinkage * identity))

    def score(self, features: Sequence[Tensor]) -> Output:
        means = self._means()
        weight = means @ self.precision  # (C, D)
        scores = F.linear(features[0].double(), weight, -0.5 * (weight * means).sum(1))
        return Output(scores, scores.softmax(1), _log_odds(scores))


def _log_odds(scores: Tensor) -> Tensor:
    """log p / (1 - p) of the largest softmax probability p, from scores (N, C): (N,).

    It ranks images as p does. But with few images a class, p of most is so near 1 that it rounds to exactly 1, and they
    could not be ranked. With one class p is 1 for every image; then all get 0.
    """
    if scores.shape[1] == 1:
        return torch.zeros_like(scores[:, 0])
    best = scores.argmax(1, keepdim=True)
    others = scores.scatter(1, best, -torch.inf).logsumexp(1)
    return scores.gather(1, best)[:, 0] - others


class Slda(PrototypeLearner):
    name: ClassVar[str] = "slda"
    Config = SldaConfig
    config: SldaConfig

    def _new_rule(self) -> Rule:
        return Discriminant(self._means, self.network.dim, self.config.shrinkage)
