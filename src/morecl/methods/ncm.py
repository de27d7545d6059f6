"""NCM: nearest class mean on the frozen backbone (paper, Section 4.5, "Performance of Pre-Trained Feature Extractor").

Nothing is trained: a class is represented by the mean of its features, and an image goes to the nearest mean
(Euclidean). Adding a class does not touch the others, so nothing is forgotten, and the accuracy shows how good the
pre-trained features are. The OOD score is the maximum of softmax(-distance).

Deviations: none on a frozen backbone. :mod:`morecl.methods.prototypes` tells how a trainable one is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from morecl.methods.prototypes import PrototypeLearner
from morecl.scoring import Output, Rule


class NearestMean(Rule):
    """The nearest of the class ``means`` (C, D) wins."""

    def __init__(self, means: Callable[[], Tensor]):
        super().__init__()
        self._means = means

    def score(self, features: Sequence[Tensor]) -> Output:
        distance = torch.cdist(features[0].double(), self._means())  # (N, C)
        p = (-distance).softmax(1)
        return Output(-distance, p, p.amax(1))


class Ncm(PrototypeLearner):
    name: ClassVar[str] = "ncm"

    def _new_rule(self) -> Rule:
        return NearestMean(self._means)
