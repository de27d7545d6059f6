"""TPL: Class Incremental Learning via Likelihood Ratio Based Task Prediction (Lin, Shao, Qian, Pan, Guo, Liu; ICLR
2024). Equation numbers are the paper's.

The networks are trained as MORE's are, under hard attention and with replay, but the head of a task has a column for
every class seen so far and replayed images keep their labels. An answer is p(class | x, task) p(task | x) (Eq. 1): the
softmax over the task's own columns times a softmax over tasks. A task's score compares two densities of the features
under its network: that of the task, from the Mahalanobis distance to its classes, and that of all other tasks, from the
distance to their images in memory. The largest logit joins as a second opinion.

Where the paper's text and the authors' code differ, we follow the code, which gave the published numbers:

- Replayed images keep their labels; the text has one class "others" for all of them.
- The two scores are joined by a soft minimum, -log(exp(-e1) + exp(-e2)); Eq. 9 has a soft maximum
  (``composition="maximum"``).
- Each task's score gets a scale and a shift, fitted on the memory; the text does not mention them.
- MD in Eq. 7 is the inverse of the *squared* Mahalanobis distance; kNN is a squared distance, too.

Deviations:

- Masks are rounded when a task ends, see :mod:`morecl.methods.masked`; batches hold the memory's images as in MORE.
- Weight decay has no effect on what finished tasks use: the update is masked, not the gradient.
- With fewer than ``neighbours`` images of other tasks in memory the farthest of them counts; without any, kNN is 0.
  Without a memory there is no calibration.
- A head that has learned nothing may have a mean of its largest logits near 0: it counts as ``MIN_SCALE``.
- By default the mean of MD is one over training images that are left out, each in turn, of the Gaussians (in closed
  form), to their own class; ``md_mean="plain"`` is the paper's. With 5,000 images and 384 features, as in the paper,
  the held-out mean is about 8 % less than the plain one, for all tasks alike. With 216 images and 192 features, the
  squared distance of an image that helped to estimate the covariance is an eighth of that of a new one: the plain mean
  then makes MD count for next to nothing beside the logits (``digits-5t``, held-out images, ACA: 63.3 % instead of
  77.5 %).
- The covariance is shrunk with few images, see :func:`morecl.gaussian.precision`.
- The paper does not say how unknown images are found. ``known`` is the largest score of a task before calibration
  (``digits-5t``, held-out images: IAUC 78.5; calibrated 76.7; largest probability 65.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl import gaussian
from morecl.config import SCORING
from morecl.gaussian import MIN_DISTANCE, Gaussians
from morecl.methods.base import TaskData
from morecl.methods.gaussian_rule import GaussianRule
from morecl.methods.masked import MaskedTask, ReplayConfig, ReplayLearner
from morecl.nn.network import Norms
from morecl.progress import Listener
from morecl.scoring import HeadsOf, LearnedTask, Output
from morecl.training import ProtectedSGD

MIN_SCALE = 0.01  # of the mean of largest logits
MIN_INVERSE = 1e-12  # of the mean of inverse squared distances
SIMILARITIES_AT_ONCE = 2**26  # float64: 512 MiB
CALIBRATION_STEPS = 100
CALIBRATION_LR = 0.01
CALIBRATION_MOMENTUM = 0.8

Composition = Literal["minimum", "maximum"]
MdMean = Literal["held-out", "plain"]


class TplConfig(ReplayConfig):
    weight_decay: float = Field(5e-4, ge=0, le=1, description="of all that a task trains and others do not use")
    task_temperature: float = Field(
        0.05, gt=0, description="of the softmax over tasks (Eq. 11)", json_schema_extra=SCORING
    )
    neighbours: int = Field(
        5, ge=1, description="which nearest replayed image of other tasks counts", json_schema_extra=SCORING
    )
    composition: Composition = Field(
        "minimum",
        description="soft minimum (authors' code) or soft maximum (Eq. 9) of the two scores",
        json_schema_extra=SCORING,
    )
    md_mean: MdMean = Field(
        "held-out",
        description="mean of MD over training images: each left out of the Gaussians, or the paper's plain mean",
        json_schema_extra=SCORING,
    )
    calibrate: bool = Field(
        True, description="fit a scale and a shift per task on the memory", json_schema_extra=SCORING
    )

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        off = super().switched_off(further=further)
        return off if self.memory_size else off | dict.fromkeys(("neighbours", "calibrate"), "memory_size=0")


class TplRule(GaussianRule):
    """Eq. 3 and 11. State beside the Gaussians, for T tasks and M images in memory:

    - ``scales`` (T, 2): means of MD and of the largest logit over the task's training images (1 / beta, Eq. 10);
    - ``replayed`` (T, M, D): features of the memory under each network, of length 1; ``owner`` (M,): their tasks;
    - ``calibration`` (T, 2): scale and shift of each task's score.
    """

    scales: Tensor
    replayed: Tensor
    owner: Tensor
    calibration: Tensor

    def __init__(
        self,
        heads: HeadsOf,
        dim: int,
        *,
        temperature: float,
        neighbours: int,
        composition: Composition,
        md_mean: MdMean,
        calibrate: bool,
    ):
        super().__init__(dim)
        self._heads = heads
        self.temperature = temperature
        self.neighbours = neighbours
        self.sign = -1 if composition == "minimum" else 1
        self.md_mean = md_mean
        self.calibrate = calibrate
        self.register_buffer("scales", torch.ones(0, 2, dtype=torch.float64))
        self.register_buffer("replayed", torch.zeros(0, 0, dim))
        self.register_buffer("owner", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("calibration", torch.zeros(0, 2, dtype=torch.float64))

    def grow(self, classes: int) -> None:
        super().grow(classes)
        self.scales = F.pad(self.scales, (0, 0, 0, 1), value=1.0)
        identity = self.calibration.new_tensor([[1.0, 0.0]])
        self.calibration = torch.cat([self.calibration, identity])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The memory's size is not known before: take the shapes of what depends on it from what was saved."""
        for name in ("replayed", "owner"):
            if (saved := state_dict.get(prefix + name)) is not None:
                setattr(self, name, getattr(self, name).new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ---- after a task -----------------------------------------------------------------------------------------

    def fit(self, learned: LearnedTask) -> None:
        self._describe(learned.features(learned.networks[-1]), learned.task)
        stored = [learned.memory_features(network) for network in learned.networks]
        self.replayed = torch.stack([F.normalize(z, dim=1) for z in stored])
        task_of_column = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        self.owner = task_of_column[torch.from_numpy(learned.memory.columns)].to(self.owner.device)
        self.calibration = self.calibration.new_tensor([[1.0, 0.0]]).repeat(len(self.sizes), 1)
        if self.calibrate and len(self.owner):
            self.calibration = _calibration(self._raw_scores(stored, self._own_logits(stored)), self.owner)

    def _describe(self, z: Tensor, task: TaskData) -> None:
        """Take in the newest task, whose training images have features ``z`` (N, D)."""
        k = task.index
        gaussians = gaussian.estimate(z, task.targets.to(z.device), task.classes)
        self.means[task.first_column :] = gaussians.means
        self.precisions[k] = gaussian.precision(gaussians)
        logits = self._heads()[k](z).double()[:, task.first_column :]
        if self.md_mean == "plain":
            self.scales[k, 0] = self._inverse_distance(k, z).mean().clamp(min=MIN_INVERSE)
        else:
            self.scales[k, 0] = held_out_mean(z, task.targets.to(z.device), gaussians, self.precisions[k])
        self.scales[k, 1] = logits.amax(1).mean().clamp(min=MIN_SCALE)

    # ---- answers ----------------------------------------------------------------------------------------------

    def score(self, features: Sequence[Tensor]) -> Output:
        own = self._own_logits(features)
        raw = self._raw_scores(features, own)  # (N, T)
        tasks = self._calibrated(raw)
        log_p = torch.cat([logits.log_softmax(1) for logits in own], 1)  # (N, C) within each task
        log_p_task = (tasks / self.temperature).log_softmax(1)  # Eq. 11
        sizes = torch.tensor(self.sizes, device=tasks.device)
        scores = log_p + log_p_task.repeat_interleave(sizes, 1)  # Eq. 3
        return Output(scores, scores.exp(), raw.amax(1))

    def _calibrated(self, raw: Tensor) -> Tensor:
        return raw * self.calibration[:, 0] + self.calibration[:, 1]

    def _raw_scores(self, features: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
        """Eq. 9 for every task, (N, T), from the features (N, D) and own logits (N, C_k) of each."""
        scores = []
        for k, (z, logits) in enumerate(zip(features, own, strict=True)):
            ratio = self._inverse_distance(k, z) / self.scales[k, 0] + self._neighbour_distance(k, z)  # Eq. 7
            both = torch.stack([ratio, logits.amax(1) / self.scales[k, 1]])
            scores.append(self.sign * (self.sign * both).logsumexp(0))
        return torch.stack(scores, 1)

    def _own_logits(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Of each task's head the columns of the task: (N, C_k) each."""
        heads = zip(self._heads(), features, self.sizes, strict=True)
        return [head(z).double()[:, -size:] for head, z, size in heads]

    def _inverse_distance(self, k: int, z: Tensor) -> Tensor:
        """1 / squared Mahalanobis distance to the nearest class of task ``k``, (N,)."""
        return self.nearest(k, z) ** -2

    def _neighbour_distance(self, k: int, z: Tensor) -> Tensor:
        """Squared distance, on the unit sphere, to the n-th nearest replayed image of another task: (N,)."""
        others = self.replayed[k][self.owner != k].double()
        if not len(others):
            return torch.zeros(len(z), dtype=torch.float64, device=z.device)
        count = min(self.neighbours, len(others))
        parts = F.normalize(z.double(), dim=1).split(max(1, SIMILARITIES_AT_ONCE // len(others)))
        return torch.cat([2 - 2 * (part @ others.T).topk(count, dim=1).values[:, -1] for part in parts])


class Tpl(ReplayLearner):
    name: ClassVar[str] = "tpl"
    Config = TplConfig
    config: TplConfig

    def _new_task(self, norms: Norms, shape: tuple[int, int], classes: int, init: torch.Generator) -> MaskedTask:
        """Its head has a column for every class seen so far."""
        return MaskedTask(norms, shape, self.network.dim, sum(self.task_sizes), init)

    def _guarded_optimizer(self, parameters: Sequence[Tensor], gates: Sequence[Tensor]) -> ProtectedSGD:
        config = self.config
        return ProtectedSGD(
            parameters, config.lr, config.momentum, gates, weight_decay=config.weight_decay, nesterov=True
        )

    def _learn(self, task: TaskData, listener: Listener) -> None:
        """Eq. 2, then the memory takes in the task."""
        replayed = torch.from_numpy(self.memory.columns)
        with self._clock("train"):
            self._train_with_memory(task, self.prepare(task.images), task.columns, replayed, listener)
        self._remember(task)

    def _new_rule(self) -> TplRule:
        config = self.config
        return TplRule(
            self._heads,
            self.network.dim,
            temperature=config.task_temperature,
            neighbours=config.neighbours,
            composition=config.composition,
            md_mean=config.md_mean,
            calibrate=config.calibrate,
        )


def held_out_mean(z: Tensor, targets: Tensor, gaussians: Gaussians, precision: Tensor) -> Tensor:
    """Mean of 1 / squared distance of training images to their class, each left out of its class's mean and of the
    covariance, in which the sum over its class is still divided by n, not by n - 1.

    Of a class of n images, among C classes, an image with squared distance d2 has, left out,

        1 / d2' = (1 / d2 - (1 - r) / (C (n - 1))) ((n - 1) / n)^2

    (Sherman and Morrison), r being how far the covariance is shrunk. Images that are alone in their class do not count,
    unless all are.
    """
    of_class = targets.bincount(minlength=len(gaussians.means))
    n = of_class[targets].double()
    difference = z.double() - gaussians.means[targets]
    squares = ((difference @ precision) * difference).sum(1).clamp(min=MIN_DISTANCE**2)
    if not (n > 1).any():
        return squares.reciprocal().mean()
    squares, n = squares[n > 1], n[n > 1]
    leverage = (1 - gaussian.shrinkage(gaussians)) / (len(gaussians.means) * (n - 1))
    return ((squares.reciprocal() - leverage).clamp(min=0) * ((n - 1) / n) ** 2).mean().clamp(min=MIN_INVERSE)


def _calibration(scores: Tensor, tasks: Tensor) -> Tensor:
    """Scale and shift of each task's score, (T, 2), that bring out the ``tasks`` (M,) in ``scores`` (M, T).

    A fixed number of steps of gradient descent on the cross-entropy, from scale 1 and shift 0.
    """
    scale, shift = torch.ones_like(scores[0]), torch.zeros_like(scores[0])
    with torch.enable_grad():
        parameters = [scale.requires_grad_(), shift.requires_grad_()]
        optimizer = torch.optim.SGD(parameters, CALIBRATION_LR, CALIBRATION_MOMENTUM)
        for _ in range(CALIBRATION_STEPS):
            optimizer.zero_grad()
            F.cross_entropy(scores * scale + shift, tasks).backward()
            optimizer.step()
    return torch.stack([scale, shift], 1).detach()
