"""What a task of MORE owns, and how answers are made from it (Algorithm 2). :mod:`morecl.methods.more` trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from morecl import gaussian
from morecl.gaussian import Gaussians
from morecl.methods.masked import MaskedTask
from morecl.nn.network import Norms
from morecl.scoring import Features, Output, Rule
from morecl.symmetric import packed, unpacked


class MoreTask(MaskedTask):
    """What one task owns, and its classes as Gaussians: means (C, D), one covariance (D, D), number of samples.

    ``precision`` is the inverse of the covariance, kept because it takes long to compute, and saved as a triangle.
    ``counts`` (C,) are the images of each class and ``spread`` (C, D (D + 1) / 2) their scatter around its mean, both
    needed to take in more images; they have no rows before the task is learned. ``trained_head`` (C + 1, D + 1) is the
    head as it was before any back-update, weights and bias; it has no rows unless back-updates start from there.
    """

    means: Tensor
    covariance: Tensor
    precision: Tensor
    samples: Tensor
    counts: Tensor
    spread: Tensor
    trained_head: Tensor

    def __init__(
        self,
        norms: Norms,
        shape: tuple[int, int],
        dim: int,
        classes: int,
        init: torch.Generator,
        shrink_below: float = 1.0,
    ):
        """``shrink_below``: see :func:`morecl.gaussian.precision`."""
        super().__init__(norms, shape, dim, classes + 1, init)
        self.shrink_below = shrink_below
        self.register_buffer("means", torch.zeros(classes, dim, dtype=torch.float64))
        self.register_buffer("covariance", torch.zeros(dim, dim, dtype=torch.float64))
        self.register_buffer("precision", torch.zeros(dim, dim, dtype=torch.float64))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("spread", torch.zeros(0, dim * (dim + 1) // 2, dtype=torch.float64))
        self.register_buffer("trained_head", torch.zeros(0, dim + 1))

    def keep_head(self) -> None:
        """Let later back-updates start from the head as it is now."""
        self.trained_head = torch.cat([self.head.weight.detach(), self.head.bias.detach()[:, None]], 1)

    def restart_head(self) -> None:
        """The head as it was kept; nothing if it was not."""
        if len(self.trained_head):
            self.head.weight.data.copy_(self.trained_head[:, :-1])
            self.head.bias.data.copy_(self.trained_head[:, -1])

    def describe(self, features: Tensor, targets: Tensor) -> None:
        """Eq. 5-6: estimate the Gaussians from ``features`` (N, D) with ``targets`` (N,)."""
        statistics = gaussian.estimate(features, targets, len(self.means))
        self.counts = targets.bincount(minlength=len(self.means))
        self.spread = gaussian.scatters(features, targets, statistics.means)
        self._take(statistics)

    def extend(self, features: Tensor, targets: Tensor) -> None:
        """As :meth:`describe`, for these images together with all that the task had before."""
        statistics, self.counts, self.spread = gaussian.extended(
            self.gaussians, self.counts, self.spread, features, targets
        )
        self._take(statistics)

    def forget(self, target: int) -> None:
        """Drop what is known of one class alone, except for its mean."""
        self.counts[target] = 0
        self.spread[target] = 0

    def _take(self, statistics: Gaussians) -> None:
        self.means.copy_(statistics.means)
        self.covariance.copy_(statistics.covariance)
        self.samples.fill_(statistics.samples)
        self.precision.copy_(gaussian.precision(self.gaussians, self.shrink_below))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}precision"] = packed(self.precision)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A task whose state there is has been learned."""
        state_dict[f"{prefix}precision"] = unpacked(state_dict[f"{prefix}precision"], len(self.precision))
        kept = len(self.head.bias) if len(state_dict[f"{prefix}trained_head"]) else 0
        for name, rows in (("counts", len(self.means)), ("spread", len(self.means)), ("trained_head", kept)):
            own: Tensor = getattr(self, name)
            setattr(self, name, own.new_zeros(rows, *own.shape[1:]))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def gaussians(self) -> Gaussians:
        return Gaussians(self.means, self.covariance, int(self.samples))


class Heads(NamedTuple):
    """Heads and Gaussians of G tasks of M classes for one computation, float64. Tasks of fewer classes are filled up:
    with outputs of probability 0, and with their first mean again. The *ood* output comes first."""

    weight: Tensor  # (G, D, 1 + M)
    bias: Tensor  # (G, 1, 1 + M)
    means: Tensor  # (G, 1, M, D)
    precision: Tensor  # (G, D, D)
    places: Tensor  # (C,) of each column among the G M classes; G M if its task is not one of the G
    columns: Tensor  # (G M,) of each class; C for filling

    @staticmethod
    def size(tasks: Sequence[MoreTask]) -> int:
        """Numbers in the heads of ``tasks``."""
        most, dim = max(net.means.shape[0] for net in tasks), tasks[0].means.shape[1]
        return len(tasks) * dim * (dim + 2 * most + 1)

    @classmethod
    def of(cls, tasks: Sequence[MoreTask], among: Sequence[int]) -> Heads:
        """Those of the tasks ``among``, numbers of some of ``tasks``."""
        sizes = [len(net.means) for net in tasks]
        first = np.cumsum([0, *sizes])
        most = max(sizes[k] for k in among)
        weights, biases, means = [], [], []
        places = np.full(first[-1], len(among) * most)
        columns = np.full((len(among), most), first[-1])
        for group, k in enumerate(among):
            net, size = tasks[k], sizes[k]
            own = np.arange(size)
            places[first[k] + own] = group * most + own
            columns[group, :size] = first[k] + own
            order = [size, *range(size)]
            weights.append(F.pad(net.head.weight.double()[order], (0, 0, 0, most - size)).mT)
            biases.append(F.pad(net.head.bias.double()[order], (0, most - size), value=-torch.inf)[None])
            means.append(net.means[[*range(size), *[0] * (most - size)]][None])
        device = means[0].device
        return cls(
            torch.stack(weights),
            torch.stack(biases),
            torch.stack(means),
            torch.stack([tasks[k].precision for k in among]),
            torch.from_numpy(places).to(device),
            torch.from_numpy(columns.flatten()).to(device),
        )

    def take(self, groups: Tensor) -> Heads:
        """Those of the tasks ``groups`` (B,), numbers on the device. The columns stay those of all."""
        weight, bias, means, precision = (part.index_select(0, groups) for part in self[:4])
        return self._replace(weight=weight, bias=bias, means=means, precision=precision)

    def rows_at_once(self) -> int:
        """Images for which :meth:`MoreRule._of_tasks` may be called, so that it does not take too much memory."""
        return max(1, gaussian.NUMBERS_AT_ONCE // max(1, self.means[0].numel()))

    def in_columns(self, values: Tensor, other: float) -> Tensor:
        """From classes (N, G, M) to columns (N, C); ``other`` for those of other tasks."""
        return F.pad(values.flatten(1), (0, 1), value=other).index_select(1, self.places)

    def by_task(self, values: Tensor) -> Tensor:
        """From columns (N, C) to classes (N, G, M), -inf for filling."""
        padded = F.pad(values, (0, 1), value=-torch.inf)
        return padded.index_select(1, self.columns).unflatten(1, (len(self.precision), -1))


class MoreRule(Rule):
    """Algorithm 2: p(Y^k | x, k) s^k(x) of every task, side by side (Eq. 7); without the coefficient s^k, Eq. 2.

    State: the columns that were ``forgotten`` (C,). Such a class has the lowest score there is and probability 0. All
    else is as if it were there: its output takes part in the softmax of its task, its mean in the coefficient. A task
    whose classes are all forgotten is not asked.
    """

    forgotten: Tensor
    task_of: Tensor

    def __init__(self, tasks: Callable[[], Sequence[MoreTask]], temperature: float, c: float | None):
        """``c``: numerator of the coefficient; ``None``: no coefficient."""
        super().__init__()
        self._tasks, self.temperature, self.c = tasks, temperature, c
        self.sizes: list[int] = []  # classes of each task
        self.register_buffer("forgotten", torch.zeros(0, dtype=torch.bool))
        self.register_buffer("task_of", torch.zeros(0, dtype=torch.int64), persistent=False)  # of each class

    def grow(self, classes: int) -> None:
        self.task_of = F.pad(self.task_of, (0, classes), value=len(self.sizes))
        self.sizes.append(classes)
        self.forgotten = F.pad(self.forgotten, (0, classes))

    def is_fitted(self) -> bool:
        return self.state_dict().keys() != {"forgotten"}

    def forget(self, column: int) -> None:
        self.forgotten[column] = True

    def remaining(self) -> Tensor:
        """(tasks,): whether a task has classes that were not forgotten."""
        left = torch.zeros(len(self.sizes), dtype=torch.int64, device=self.forgotten.device)
        return left.index_add_(0, self.task_of, (~self.forgotten).long()) > 0

    def score(self, features: Sequence[Tensor]) -> Output:
        of_tasks = [self._of_task(net, z) for net, z in zip(self._tasks(), features, strict=True)]
        return self._joined(of_tasks)

    def answer(self, features: Features) -> Output:
        remaining = self.remaining().tolist()
        if all(remaining):
            return super().answer(features)
        of_tasks = []
        for k, (net, size) in enumerate(zip(self._tasks(), self.sizes, strict=True)):
            nothing = torch.zeros(len(features), size, dtype=torch.float64, device=features.device)
            of_tasks.append(self._of_task(net, features(str(k))) if remaining[k] else (nothing, nothing))
        return self._joined(of_tasks)

    def _joined(self, of_tasks: Sequence[tuple[Tensor, Tensor]]) -> Output:
        probabilities, scores = (torch.cat(parts, 1) for parts in zip(*of_tasks, strict=True))
        return self._output(probabilities, scores)

    def together(self, heads: Heads, features: Tensor) -> Output:
        """As :meth:`answer`, from the features (G, N, D) under the networks of all tasks that have classes left.

        Waits for nothing on the device."""
        of_tasks = self._of_tasks(heads, features)
        probabilities, scores = (heads.in_columns(part.transpose(0, 1), 0.0) for part in of_tasks)
        return self._output(probabilities, scores)

    def _output(self, probabilities: Tensor, scores: Tensor) -> Output:
        scores = self._without_forgotten(scores)
        return Output(scores, probabilities.masked_fill(self.forgotten, 0), scores.amax(1))

    def _without_forgotten(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.forgotten, torch.finfo(scores.dtype).min)

    def _of_task(self, net: MoreTask, z: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and scores of a task's classes, (N, C_k) each, from the features (N, D) under its network."""
        logits = F.linear(z.double(), net.head.weight.double(), net.head.bias.double())
        p = (logits / self.temperature).softmax(1)[:, :-1]  # the ood output takes part, then is dropped
        if self.c is None:
            return p, p
        return p, p * gaussian.coefficient(z, net.means, net.precision, self.c)[:, None]  # Eq. 4

    def _of_tasks(self, heads: Heads, features: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`_of_task` of G tasks at once: features (G, N, D) -> (G, N, M) each."""
        z = features.double()
        p = (torch.baddbmm(heads.bias, z, heads.weight) / self.temperature).softmax(2)[..., 1:]
        if self.c is None:
            return p, p
        difference = (z[:, :, None] - heads.means).flatten(1, 2)  # (G, N M, D)
        squares = ((difference @ heads.precision) * difference).sum(2).view_as(p)
        distance = squares.clamp(min=0).sqrt().amin(2, keepdim=True)  # (G, N, 1)
        return p, p * (self.c / distance.clamp(min=gaussian.MIN_DISTANCE))
