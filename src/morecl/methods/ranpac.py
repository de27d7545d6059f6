"""RanPAC: Random Projections and Pre-trained Models for Continual Learning (McDonnell, Gong, Parvaneh, Abbasnejad,
van den Hengel; NeurIPS 2023).

The first task adapts the network (*first-session adaptation*): adapters and norms are trained with a linear head,
which is then thrown away. After that nothing is trained. Features are projected to m random features, and a ridge
classifier over all classes is solved from sums over images (:mod:`morecl.ridge`; the paper's Eq. 3 to 5):

    G += H^T H,   Q += H^T Y,   W = (G + r I)^-1 Q,   H = relu(F R).

The features never change after the first task, so the sums are exact and nothing is forgotten. r is chosen anew in each
task from 10^-8 to 10^8: the classifier of a random four fifths of the task's images with the least squared error on the
others. The OOD score is the largest output; the paper does not detect unknown classes.

Deviations:

- First-session adaptation trains our adapters and norms (the paper: AdaptFormer, SSF or VPT) with the rate and epochs
  of all methods here. ``freeze_backbone=False`` trains the backbone in the first task, too.
- Features are divided by their standard deviation before the projection, which only changes the unit of r.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import SCORING, TrainingConfig
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.progress import Listener
from morecl.random import generator
from morecl.ridge import RANDOM_FEATURES_AT_ONCE, Ridge, held_out_errors, held_out_errors_in_chunks
from morecl.scoring import LearnedTask, Output, Rule

ABSOLUTE_STRENGTHS = tuple(10.0**exponent for exponent in range(-8, 9))  # r as it is added to G's diagonal
TRAINING_SHARE = 0.8  # of a task's images, in the choice of r


class RanpacConfig(TrainingConfig):
    projection: int = Field(10000, ge=1, le=20000, description="random features (m)", json_schema_extra=SCORING)


class RidgeRule(Rule):
    """The largest output of a ridge classifier wins."""

    derived = frozenset({"ridge.weight"})

    def __init__(self, ridge: Ridge, seed: int):
        super().__init__()
        self.ridge = ridge
        self._seed = seed

    def grow(self, classes: int) -> None:
        self.ridge.grow(classes)

    def fit(self, learned: LearnedTask) -> None:
        task = learned.task
        features = learned.features(learned.networks[0])
        self.ridge.add(features, task.columns.to(features.device))
        self.ridge.solve_with(self._strength(features, task))

    def _strength(self, features: Tensor, task: TaskData) -> float:
        order = torch.randperm(len(features), generator=generator(self._seed, "ridge strength", task.index))
        order = order.to(features.device)
        cut = max(1, int(TRAINING_SHARE * len(order)))
        onehot = F.one_hot(task.targets.to(features.device)[order], task.classes).double()
        if len(features) * self.ridge.width > RANDOM_FEATURES_AT_ONCE:
            z, make = features[order], self.ridge.random_features
            errors = held_out_errors_in_chunks(make, z[:cut], onehot[:cut], z[cut:], onehot[cut:], ABSOLUTE_STRENGTHS)
        else:
            phi = self.ridge.random_features(features[order]).double()
            errors = held_out_errors(phi[:cut], onehot[:cut], phi[cut:], onehot[cut:], ABSOLUTE_STRENGTHS)
        return ABSOLUTE_STRENGTHS[min(range(len(ABSOLUTE_STRENGTHS)), key=errors.__getitem__)]

    def score(self, features: Sequence[Tensor]) -> Output:
        scores = self.ridge(features[0])
        return Output(scores, scores.softmax(1), scores.amax(1))


class Ranpac(SingleHeadLearner):
    name: ClassVar[str] = "ranpac"
    Config = RanpacConfig
    config: RanpacConfig

    def _learn(self, task: TaskData, listener: Listener) -> None:
        if task.index:
            return

        with self._clock("train"):
            self._fit_rows(self._cross_entropy, self.prepare(task.images), [task.columns], task=task, listener=listener)

    def _grow(self, classes: int) -> None:
        """The head serves the first task alone."""
        if len(self.task_sizes) == 1:
            super()._grow(classes)

    def networks(self) -> list[str]:
        return [f"after task {min(1, len(self.task_sizes))}"]

    def _new_rule(self) -> Rule:
        ridge = Ridge(self.network.dim, self.config.projection, generator(self.config.seed, "ridge"))
        return RidgeRule(ridge, self.config.seed)
