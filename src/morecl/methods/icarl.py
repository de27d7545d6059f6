"""iCaRL: Incremental Classifier and Representation Learning (Rebuffi, Kolesnikov, Sperl, Lampert; CVPR 2017).

The network is trained as a multi-label classifier, g_y(x) = sigmoid(w_y . phi(x) + b_y), on the new data together with
the stored exemplars. Before that, the old network's outputs q_y = g_y(x) are computed for every image. With the new
classes s..t and the old ones 1..s-1 the loss is (Algorithm 3)

    l = - sum_i [ sum_{y=s..t} [y = y_i] log g_y(x_i) + [y != y_i] log(1 - g_y(x_i))
                + sum_{y<s}    q_y_i log g_y(x_i) + (1 - q_y_i) log(1 - g_y(x_i)) ].

Then ``memory_size // t`` exemplars of each new class are picked by herding (Algorithm 4), and those of older classes
are cut from the end (Algorithm 5). The head only serves to train the features: an image goes to the class with the
nearest mean of exemplars (Algorithm 1), with features and means normalised to length one,

    y* = argmin_y || phi(x) - mu_y ||,    mu_y = mean of phi over the exemplars of y.

Deviations:

- Frozen pre-trained backbone with trained adapters and norms instead of a ResNet from scratch; no augmentation.
  ``freeze_backbone=False`` trains the backbone in every task.
- The loss is summed over classes and averaged over the images of a batch (the published code averages over both and
  compensates with a learning rate of 2).
- No weight decay and no learning-rate steps: rate and epochs are those of the benchmark, as for every method here.
- OOD score: maximum softmax of the negative distances, as for NCM; the paper has none. ``ood_score`` also offers the
  smallest distance, and the softmax of the head, which is trained with sigmoids and does not answer. Confidences are
  the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import SCORING, TrainingConfig
from morecl.errors import InputError
from morecl.memory import herding_order
from morecl.methods.base import TaskData
from morecl.methods.prototypes import Prototypes
from morecl.methods.single_head import SingleHeadLearner
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.scoring import HeadsOf, Output, Rule

Known = Literal["softmax", "distance", "head"]


class IcarlConfig(TrainingConfig):
    older: ClassVar[Mapping[str, Any]] = {"ood_score": "head"}

    memory_size: int = Field(200, ge=1, description="exemplars, all classes together (K)")
    ood_score: Known = Field(
        "softmax",
        description="images are known by: the softmax of negative distances; the smallest distance; the head's softmax",
        json_schema_extra=SCORING,
    )

    def refuse_classes(self, count: int) -> None:
        if self.memory_size < count:
            raise InputError(
                f"memory_size={self.memory_size} cannot hold an exemplar of each of {count} classes, and icarl "
                "recognises classes by their exemplars; set memory_size to the number of classes or more"
            )


class NearestExemplarMean(Rule):
    """Algorithm 1 decides, and the distances tell how well an image is known; the head gives probabilities."""

    def __init__(self, means: Callable[[], Tensor], heads: HeadsOf, known_by: Known):
        super().__init__()
        self._means, self._heads, self.known_by = means, heads, known_by

    def score(self, features: Sequence[Tensor]) -> Output:
        (z,), (head,) = features, self._heads()
        distance = torch.cdist(F.normalize(z.double(), dim=1), self._means())
        p = head(z).double().softmax(1)
        known = {"distance": -distance, "softmax": (-distance).softmax(1), "head": p}[self.known_by]
        return Output(-distance, p, known.amax(1))


class Icarl(SingleHeadLearner):
    name: ClassVar[str] = "icarl"
    Config = IcarlConfig
    config: IcarlConfig

    def _reset(self) -> None:
        super()._reset()
        self.model["prototypes"] = Prototypes(self.network.dim).to(self.device)

    def _grow(self, classes: int) -> None:
        super()._grow(classes)
        self.prototypes.grow(classes)

    @property
    def prototypes(self) -> Prototypes:
        """Means of the exemplars' normalised features, of length one again: mu_y."""
        return cast(Prototypes, self.model["prototypes"])

    def _learn(self, task: TaskData, listener: Listener) -> None:
        self.config.refuse_classes(len(self.classes))
        columns = task.columns.numpy()
        draw = generator(self.config.seed, "memory", task.index)
        with self._clock("train"):
            self._train(task, listener)  # Algorithm 3
            features = self._normalised(self.prepare(task.images))
            order = herding_order(features, columns, self.memory.quota(len(self.classes)))  # Algorithm 4
            self.memory.update_ranked(task.images, columns, order, draw)  # Algorithm 5
            self._set_means()

    def _train(self, task: TaskData, listener: Listener) -> None:
        """Minimise l over the task's images and the exemplars."""
        tokens = self.prepare(self.memory.followed_by(task.images))
        columns = torch.cat([torch.from_numpy(self.memory.columns), task.columns])
        wanted = F.one_hot(columns, len(self.classes)).float().to(self.device)
        if task.index:
            wanted[:, : task.first_column] = self._logits(tokens)[:, : task.first_column].sigmoid()  # q

        def loss(x: Tensor, wanted: Tensor) -> Tensor:
            logits = self.head(self._features(x))
            return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(1).mean()

        self._fit_rows(loss, tokens, [wanted], task=task, listener=listener)

    def _set_means(self) -> None:
        exemplars = self._normalised(self.prepare(self.memory.images))
        for c in range(len(self.classes)):
            own = torch.from_numpy(np.flatnonzero(self.memory.columns == c)).to(self.device)
            self.prototypes.means[c] = F.normalize(exemplars[own].mean(0), dim=0)

    def _normalised(self, tokens: Tokens) -> Tensor:
        """Features of length one, (N, D) float64."""
        return F.normalize(self._embed(tokens).double(), dim=1)

    def _new_rule(self) -> Rule:
        return NearestExemplarMean(self._means, self._heads, self.config.ood_score)

    def _means(self) -> Tensor:
        return self.prototypes.means

    def entries(self) -> dict[str, int]:
        return super().entries() | {"statistics": self.prototypes.means.numel()}
