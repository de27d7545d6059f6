"""How answers are made from features: the part of a method that trains nothing.

A learner has networks, which are trained, and a :class:`Rule`, which turns their features into scores. The two can be
combined: a method that only answers differently names the method whose networks it uses in ``trained_as`` and brings
its own rule, and :meth:`morecl.methods.base.Learner.adopt` builds it from networks that were trained before.

Directions, here and everywhere: the largest score wins; ``known`` is higher for images that look like what was
learned, and its negative is the OOD score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from morecl.memory import ReplayMemory
from morecl.nn.tokens import Tokens
from morecl.task import TaskData

if TYPE_CHECKING:
    from morecl.methods.base import Learner

# The heads of a learner, one per network: features (N, D) -> logits (N, C_k)
HeadsOf = Callable[[], Sequence[Callable[[Tensor], Tensor]]]


@dataclass(frozen=True)
class Output:
    """Scores of N images; columns in the order of ``learner.classes``."""

    scores: Tensor  # (N, C) the largest wins
    probabilities: Tensor  # (N, C) in [0, 1]: confidence in each class
    known: Tensor  # (N,) higher = better known; its negative is the OOD score

    def packed(self) -> Tensor:
        """As one tensor, (N, 2 C + 1), float64."""
        return torch.cat([self.scores.double(), self.probabilities.double(), self.known.double()[:, None]], 1)

    @classmethod
    def unpacked(cls, numbers: Tensor) -> Output:
        """The output that was :meth:`packed`."""
        classes = numbers.shape[1] // 2
        return cls(numbers[:, :classes], numbers[:, classes:-1], numbers[:, -1])


class LearnedTask:
    """What a rule may use when a task has been learned: its data, the memory, and features of both.

    The memory is as the task left it. Features are computed when they are asked for.
    """

    def __init__(self, learner: Learner, task: TaskData):
        self.task = task
        self.memory: ReplayMemory = learner.memory
        self.networks = learner.networks()  # names; in a method with one network per task the last is the new one
        self._learner = learner

    def features(self, network: str) -> Tensor:
        """Of the task's images under ``network``: (N, D) on the device, in the order of ``task.targets``."""
        return self._learner.embed(self._own, network)

    def memory_features(self, network: str) -> Tensor:
        """Of the memory's images under ``network``: (M, D) on the device, in the order of ``memory.columns``."""
        return self._learner.embed(self._stored, network)

    @cached_property
    def _own(self) -> Tokens:
        return self._learner.prepare(self.task.images)

    @cached_property
    def _stored(self) -> Tokens:
        return self._learner.prepare(self.memory.images)


class Features:
    """Features of N images under the networks of a learner, computed when a rule asks for them."""

    def __init__(self, learner: Learner, tokens: Tokens, *, one_pass: bool = True):
        """``one_pass``: a few images may go through all networks in one pass. False for later chunks of a long list,
        so that its short last chunk is computed like the rest."""
        self.device = learner.device
        self.learner, self._tokens, self._one_pass = learner, tokens, one_pass

    def __len__(self) -> int:
        return len(self._tokens)

    def __call__(self, network: str, rows: Tensor | None = None) -> Tensor:
        """Of all images, (N, D), or of the images ``rows`` (B,) alone, (B, D)."""
        tokens = self._tokens if rows is None else self._tokens.take(rows)
        return self.learner.embed(tokens, network)

    def under(self, networks: Tensor, rows: Tensor) -> Tensor:
        """Of the images ``rows`` (B,), the i-th under the network of task ``networks[i]``: (B, D).

        ``networks`` (B,) ascend, so that images that want the same network lie together.
        """
        return self.learner.embed_rows(self._tokens, rows, networks)

    def all(self) -> list[Tensor]:
        """Under each of ``learner.networks()``."""
        if self._one_pass:
            return self.learner.embed_all(self._tokens)
        return [self(network) for network in self.learner.networks()]


class CachedFeatures(Features):
    """Features that are computed once per image and network, as long as the network keeps its name."""

    def __init__(self, learner: Learner, tokens: Tokens):
        super().__init__(learner, tokens, one_pass=False)
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # network -> features (N, D), which rows are computed (N,)
        self._asked: set[str] = set()

    def __call__(self, network: str, rows: Tensor | None = None) -> Tensor:
        self._asked.add(network)
        wanted = torch.arange(len(self), device=self.device) if rows is None else rows
        if network not in self._kept:
            first = super().__call__(network, rows)
            empty = first.new_zeros(len(self), first.shape[1])
            self._kept[network] = empty, torch.zeros(len(self), dtype=torch.bool, device=self.device)
            self._keep(network, wanted, first)
        features, done = self._kept[network]
        missing = wanted[~done[wanted]]
        if len(missing):
            self._keep(network, missing, super().__call__(network, missing))
        return features[wanted]

    def under(self, networks: Tensor, rows: Tensor) -> Tensor:
        wanted = zip(self.learner.networks(), by_network(networks, rows), strict=False)
        return torch.cat([self(network, mine) for network, mine in wanted if len(mine)])

    def forget_unasked(self) -> None:
        """Drop the features of networks that were not asked for since the last call."""
        self._kept = {network: kept for network, kept in self._kept.items() if network in self._asked}
        self._asked.clear()

    def _keep(self, network: str, rows: Tensor, features: Tensor) -> None:
        kept, done = self._kept[network]
        kept[rows] = features
        done[rows] = True


def by_network(networks: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """The ``rows`` (B,) of each network from 0 to the last; ``networks`` (B,) ascend."""
    return rows.split(torch.bincount(networks).tolist())


class Rule(nn.Module, ABC):
    """From features to scores. Trains no network.

    Who calls what: the learner calls :meth:`grow` before it learns a task and :meth:`fit` once the task's networks and
    heads are final, then :meth:`score` for every prediction. What a rule computes in :meth:`fit` and needs later
    belongs into buffers (``register_buffer``): they are saved with the learner, put back when a task fails, and move
    to the learner's device. When a saved learner is rebuilt, :meth:`grow` is called for each of its tasks, which must
    give the buffers their shapes again.

    A rule that reads the networks' heads gets them as a bound method of the learner, to be called when they are needed:
    the modules themselves would be saved twice, and some are replaced while the learner lives.
    """

    derived: ClassVar[frozenset[str]] = frozenset()  # what is saved, but computed from the rest: not counted as kept

    def grow(self, classes: int) -> None:
        """Make room for a task of ``classes`` classes."""

    def fit(self, learned: LearnedTask) -> None:
        """Take in what was learned. Called once per task, without gradients."""

    def add(self, learned: LearnedTask) -> None:
        """Take in further images of known classes. ``learned.task`` holds them as a task of all classes."""

    def is_fitted(self) -> bool:
        """Whether what :meth:`fit` computes is kept, so that the rule must see one task after the other."""
        return bool(self.state_dict())

    @abstractmethod
    def score(self, features: Sequence[Tensor]) -> Output:
        """Scores from the features (N, D) under each of ``learner.networks()``. Called without gradients."""

    def answer(self, features: Features) -> Output:
        """Scores of N images. A rule that need not ask every network about every image overrides this."""
        return self.score(features.all())


class MaximumSoftmax(Rule):
    """The softmax outputs of every head side by side; how well an image is known is their maximum."""

    def __init__(self, heads: HeadsOf):
        super().__init__()
        self._heads = heads

    def score(self, features: Sequence[Tensor]) -> Output:
        heads = zip(self._heads(), features, strict=True)
        p = torch.cat([head(z).double().softmax(1) for head, z in heads], 1)
        return Output(p, p, p.amax(1))
