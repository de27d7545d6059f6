"""CSC: cosine similarity classifier on the frozen backbone (paper, Section 4.5, beside NCM).

Nothing is trained: a class is the mean of its features, an image goes to the class whose mean points most nearly in the
direction of its own features. It differs from NCM only in that lengths do not count: with features and means of unit
length ||z - m||^2 = 2 - 2 cos(z, m), and both choose the same class. The OOD score is the maximum of
softmax(similarity).

Deviations: none; the paper names no temperature, so the softmax has none. As similarities lie in [-1, 1] its
probabilities are nearly equal; the decision does not depend on that. :mod:`morecl.methods.prototypes` says how a
backbone that is not frozen is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from morecl.methods.prototypes import PrototypeLearner
from morecl.scoring import Output, Rule


class MostSimilarMean(Rule):
    """The one of the class ``means`` (C, D) with the largest cosine wins."""

    def __init__(self, means: Callable[[], Tensor]):
        super().__init__()
        self._means = means

    def score(self, features: Sequence[Tensor]) -> Output:
        similarity = F.normalize(features[0].double(), dim=1) @ F.normalize(self._means(), dim=1).mT  # (N, C)
        p = similarity.softmax(1)
        return Output(similarity, p, p.amax(1))


class Csc(PrototypeLearner):
    name: ClassVar[str] = "csc"

    def _new_rule(self) -> Rule:
        return MostSimilarMean(self._means)
