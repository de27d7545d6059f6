"""CSC: cosine similarity classifier on the frozen backbone (paper, Section 4.5, beside NCM).

Nothing is trained: a class is represented by the mean of its features, and an image goes to the class whose mean has
the largest cosine with its features. The only difference to NCM is that lengths do not matter: for features and means
of unit length ||z - m||^2 = 2 - 2 cos(z, m), and both choose the same class. The OOD score is the maximum of
softmax(similarity).

Deviations: none. The paper gives no temperature, so the softmax has none. Similarities lie in [-1, 1], so its
probabilities are nearly equal; the decision does not depend on that. :mod:`morecl.methods.prototypes` tells how a
trainable backbone is trained.
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
