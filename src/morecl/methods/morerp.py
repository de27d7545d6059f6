"""MORE-RP (ours): MORE's networks and *ood* heads, and a ridge classifier over all classes.

What MORE's heads cannot do is compare classes of different tasks: no head has seen all of them. A ridge classifier in
closed form can (RanPAC, McDonnell et al., NeurIPS 2023). It is fed with the features of a network that never changes,
so it is what all images at once would give, however many tasks follow. The score of class c of task k is

    log p(c | x, k) s^k(x)  +  ridge_weight * log softmax(t S(x))_c

with MORE's score (Eq. 7) on the left and the ridge classifier's outputs S on the right. Their sharpness t is chosen by
leaving out one image at a time, in closed form. How well an image is known is

    max over classes of MORE's log score  +  known_weight * max over classes of S(x):

away from all images that were learned the kernel's outputs fall to zero. (With sums of projections they do not, and
MORE's part stands alone.)

- What is kept: RanPAC sums over images in a space of m random projections (:mod:`morecl.ridge`). The more of them the
  better, and none of the sizes that can be stored is enough. So the default is the limit of infinitely many, a Gaussian
  kernel, on the features of every image in half precision (:mod:`morecl.kernel_ridge`): 768 bytes per image with a
  ViT-Ti, 38 MB for CIFAR. ``projection=5000`` keeps sums instead (100 MB) and nothing of a single image.
- Features: those of the class token and the mean of the patches before the last block, (2 D). The mean costs no
  further pass and helps weak backbones.
- Network: the first task's. A first task of few classes adapts little; so while a task brings at least
  ``MOVE_FACTOR`` times as many classes as all before it together, the classifier moves to that task's network, and the
  images in memory stand in for the older classes, weighted so that each class counts as often as it had images.
- Prediction asks few networks: one pass gives the ridge classifier's outputs, which rank the tasks; MORE's networks of
  the ``asked`` highest tasks are asked, images that want the same network together. Their classes alone can be the
  answer. A network that was not asked is taken to be as sure as the least sure of those that were: for the confidence,
  which must not be infinitely wrong where the true class was not asked.
- Kernel, width, ``ridge_weight`` and ``asked`` were chosen on held-out training images (strong and weak backbone; tasks
  of 1 to 40 classes); docs/methods/morerp.md has the figures, and what did not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from morecl.config import SCORING, SgdConfig
from morecl.kernel_ridge import KernelRidge
from morecl.methods import sharing
from morecl.methods.few import FewImages, FewRanked
from morecl.methods.more import More, MoreConfig, MoreRule, MoreTask
from morecl.methods.more_rule import Heads
from morecl.nn.tokens import Tokens
from morecl.random import generator
from morecl.ridge import Ridge
from morecl.scoring import Features, LearnedTask, Output
from morecl.task import TaskData

MOVE_FACTOR = 2
NOT_ASKED = -1e4  # log score of MORE for a class whose network was not asked: below any other
BEHIND = 1e-3  # such a class stays so much behind the best of those that were asked
PATCHES = "patches "  # name of a network, class token and patches: "patches 0"


class MorerpConfig(MoreConfig):
    projection: int | None = Field(
        None,
        ge=1,
        le=20000,
        description="random features whose sums are kept; null: a kernel, and the features of every image",
        json_schema_extra=SCORING,
    )
    kept_features: int = Field(
        60000,
        ge=1,
        description="images whose features are kept, all classes together",
        json_schema_extra=SCORING,
    )
    ridge_weight: float = Field(
        1.0, ge=0, description="exponent of the ridge classifier's probabilities", json_schema_extra=SCORING
    )
    known_weight: float = Field(
        1.0, ge=0, description="weight of the kernel's largest output in the OOD score", json_schema_extra=SCORING
    )
    asked: int | None = Field(
        3, ge=1, description="task networks asked about an image; null: all of them", json_schema_extra=SCORING
    )

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        off = super().switched_off(further=further)
        if self.projection is not None:
            off |= dict.fromkeys(("kept_features", "known_weight"), f"projection={self.projection}")
        return off


class MorerpRule(MoreRule):
    """MORE's rule times the ridge classifier's.

    A class that was forgotten has no part in the classifier's probabilities and in the ranking of tasks.

    State, besides the classifier's:

    - ``source``: the task whose network feeds the classifier;
    - ``counts`` (C,): images learned;
    - ``counted`` (C,): weight in the sums of one stored image, above 1 if it stands in for images that are gone;
    - ``mixed`` (C,): classes whose stored images do not all have one known weight.
    """

    derived = frozenset({"ridge.weight", "ridge.dual"})
    source: Tensor
    counts: Tensor
    counted: Tensor
    mixed: Tensor

    def __init__(
        self,
        tasks: Callable[[], Sequence[MoreTask]],
        temperature: float,
        c: float | None,
        *,
        heads: Callable[[], Iterable[tuple[list[int], Heads]]],
        ridge: Ridge | KernelRidge,
        weight: float,
        known_weight: float,
        asked: int | None,
    ):
        super().__init__(tasks, temperature, c)
        self._heads = heads  # of tasks of similar size, and which tasks these are
        self.ridge = ridge
        self.weight, self.known_weight = weight, known_weight
        self.asked = asked
        self.register_buffer("source", torch.zeros((), dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(0))
        self.register_buffer("counted", torch.zeros(0))
        self.register_buffer("mixed", torch.zeros(0, dtype=torch.bool))

    def grow(self, classes: int) -> None:
        super().grow(classes)
        self.ridge.grow(classes)
        self.counts = F.pad(self.counts, (0, classes))
        self.counted = F.pad(self.counted, (0, classes), value=1.0)
        self.mixed = F.pad(self.mixed, (0, classes))

    # ---- after a task -----------------------------------------------------------------------------------------

    def fit(self, learned: LearnedTask) -> None:
        task = learned.task
        columns = task.columns.to(self.counts.device)
        self.counts += torch.bincount(columns, minlength=len(self.counts))
        stored = torch.from_numpy(learned.memory.columns).to(columns.device)
        if task.index and task.classes >= MOVE_FACTOR * task.first_column and self._all_stored(stored, task):
            self._move(learned, stored)
        self.ridge.add(learned.features(self.network), columns)
        self._solve(learned, stored, columns)

    def add(self, learned: LearnedTask) -> None:
        """Further images count once each, also those of classes for which images in memory stand in."""
        columns = learned.task.columns.to(self.counts.device)
        self.counts += torch.bincount(columns, minlength=len(self.counts))
        touched = torch.zeros_like(self.mixed)
        touched[columns] = True
        self.mixed |= touched & self._standing_in()
        self.ridge.add(learned.features(self.network), columns)
        self._solve(learned, torch.from_numpy(learned.memory.columns).to(columns.device), columns)

    def forget(self, column: int) -> None:
        super().forget(column)
        self.ridge.drop(column)
        self.counts[column] = 0
        self.mixed[column] = False

    def _solve(self, learned: LearnedTask, stored: Tensor, columns: Tensor) -> None:
        """Sums are judged on the memory, or on the images just added, ``columns``, if the weights of none are known."""
        if isinstance(self.ridge, KernelRidge):
            self.ridge.solve(self.forgotten)
            return
        known = ~self.mixed[stored]  # of the others nobody knows which of the images in memory stand in for how many
        if known.any():
            features = learned.memory_features(self.network)[known]
            self.ridge.solve(features, stored[known], self.counted[stored[known]], self.forgotten)
        else:
            self.ridge.solve(learned.features(self.network), columns, without=self.forgotten)

    def _all_stored(self, stored: Tensor, task: TaskData) -> bool:
        """Whether each older class that was not forgotten has images in memory, which is to stand in for it."""
        missing = ~self.forgotten[: task.first_column]
        missing[stored[stored < task.first_column]] = False
        return not bool(missing.any())

    def _move(self, learned: LearnedTask, stored: Tensor) -> None:
        """Start again on the newest network, with the older classes' images in memory."""
        self.source.fill_(learned.task.index)
        self.ridge.clear()
        self.mixed.zero_()
        held = torch.bincount(stored, minlength=len(self.counts)).clamp(min=1)
        self.counted = torch.where(self._standing_in(), self.counts / held, 1.0)
        older = stored < learned.task.first_column
        self.ridge.add(learned.memory_features(self.network)[older], stored[older], self.counted[stored[older]])

    def _standing_in(self) -> Tensor:
        """(C,): the classes that are older than the network, for which images in memory stand in."""
        return torch.arange(len(self.counts), device=self.counts.device) < sum(self.sizes[: int(self.source)])

    # ---- answers ----------------------------------------------------------------------------------------------

    @property
    def network(self) -> str:
        """The network that feeds the ridge classifier."""
        return f"{PATCHES}{int(self.source)}"

    def compare(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The ridge classifier's outputs and the logarithms of its probabilities: (N, 2 D) -> (N, C) each, float64.

        Both are -inf for classes that were forgotten.
        """
        outputs = self.ridge(features).masked_fill(self.forgotten, -torch.inf)
        return outputs, (self.ridge.sharpness * outputs).log_softmax(1)

    def answer(self, features: Features) -> Output:
        outputs, ridge = self.compare(features(self.network))
        return self.combined(outputs, ridge, self._more_scores(features, self._ranking(ridge)))

    def combined(self, outputs: Tensor, ridge: Tensor, scores: Tensor) -> Output:
        """From what :meth:`compare` gives and the logarithms of MORE's scores, (N, C) each."""
        scores = self._without_forgotten(scores)
        joined = combine(scores, ridge, self.weight, self._by_task(scores))
        combined = self._without_forgotten(joined)
        known = scores.amax(1)
        if self.known_weight:
            known = known + self.known_weight * outputs.amax(1)
        return Output(combined, combined.softmax(1), known)

    def _ranking(self, ridge: Tensor) -> Tensor:
        """(N, tasks): whether the network of a task is asked about an image."""
        tasks, remaining = len(self.sizes), self.remaining()
        if self.asked is None or self.asked >= tasks:
            return remaining.expand(len(ridge), tasks)
        largest = self._by_task(ridge)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)  # all classes of the task were forgotten
        sums = torch.zeros_like(largest).index_add_(1, self.task_of, (ridge - largest[:, self.task_of]).exp())
        chosen = (largest + sums.log()).topk(self.asked, dim=1).indices
        return torch.zeros_like(largest, dtype=torch.bool).scatter_(1, chosen, True) & remaining

    def _by_task(self, values: Tensor) -> Tensor:
        """The largest of each task: (N, C) -> (N, tasks)."""
        none = values.new_full((len(values), len(self.sizes)), -torch.inf)
        return none.scatter_reduce(1, self.task_of.expand_as(values), values, "amax")

    def _more_scores(self, features: Features, asked: Tensor) -> Tensor:
        """Logarithms of MORE's scores (N, C), ``NOT_ASKED`` where the network of the task is not asked."""
        room = len(features), sum(self.sizes) + 1  # the last column is for what smaller tasks are filled up with
        scores = torch.full(room, NOT_ASKED, dtype=torch.float64, device=features.device)
        networks, rows = asked.mT.nonzero(as_tuple=True)
        if not len(rows):
            return scores[:, :-1]
        z, counts = features.under(networks, rows), asked.sum(0).tolist()
        for among, heads in self._heads():
            place = torch.full((len(counts),), -1)  # of each task among these
            place[among] = torch.arange(len(among))
            columns = heads.columns.view(len(among), -1)
            for shared in sharing.for_heads(counts, (place >= 0).tolist(), heads.rows_at_once()):
                mine, images, true = (part.to(z.device) for part in (place[shared.networks], *shared[1:]))
                found = self.log_scores(heads.take(mine), z[images]).flatten(0, 1)[true]  # (images, M)
                of_rows = columns[mine].repeat_interleave(images.shape[1], 0)[true]
                scores[rows[images.flatten()[true]][:, None], of_rows] = found
        return scores[:, :-1]

    # ---- answers for few images, see :mod:`morecl.methods.few` ------------------------------------------------

    def best(self, heads: Heads, ridge: Tensor, asked: int) -> Tensor:
        """(N, ``asked``): the tasks among those of ``heads`` that :meth:`_ranking` asks, the best first."""
        return heads.by_task(ridge).logsumexp(2).topk(asked, dim=1).indices

    def log_scores(self, heads: Heads, features: Tensor) -> Tensor:
        """Logarithms of MORE's scores of the classes of G tasks: (G, N, D) -> (G, N, M)."""
        return _log(self._of_tasks(heads, features)[1])

    def in_columns(self, heads: Heads, scores: Tensor, chosen: Tensor) -> Tensor:
        """From scores (N, asked, M) of the ``chosen`` tasks (N, asked) to columns (N, C), others ``NOT_ASKED``."""
        room = scores.new_full((len(scores), len(heads.precision), scores.shape[2]), NOT_ASKED)
        return heads.in_columns(room.scatter(1, chosen[..., None].expand_as(scores), scores), NOT_ASKED)


def combine(scores: Tensor, ridge: Tensor, weight: float, of_tasks: Tensor) -> Tensor:
    """Scores of all classes, (N, C), see the top of this file.

    Args:
        scores: MORE's, logarithms, (N, C); at most ``NOT_ASKED`` where the network was not asked.
        ridge: logarithms of the ridge classifier's probabilities, (N, C).
        of_tasks: the largest of ``scores`` within each task, (N, T).
    """
    left_out = scores <= NOT_ASKED
    least_sure = of_tasks.masked_fill(of_tasks <= NOT_ASKED, torch.inf).amin(1, keepdim=True)
    joined = torch.where(left_out, least_sure, scores) + weight * ridge
    best = joined.masked_fill(left_out, -torch.inf).amax(1, keepdim=True)
    return torch.where(left_out, torch.minimum(joined, best - BEHIND), joined)


def _log(scores: Tensor) -> Tensor:
    return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()


class Morerp(More):
    name: ClassVar[str] = "morerp"
    trained_as: ClassVar[str] = "more"
    Config: ClassVar[type[SgdConfig]] = MorerpConfig
    few_images: ClassVar[type[FewImages]] = FewRanked
    config: MorerpConfig
    rule: MorerpRule

    def _new_rule(self) -> MorerpRule:
        config = self.config
        dim = 2 * self.network.dim
        ridge: Ridge | KernelRidge = KernelRidge(dim, config.kept_features, config.seed)
        if config.projection is not None:
            ridge = Ridge(dim, config.projection, generator(config.seed, "ridge"), forgets=True)
        return MorerpRule(
            self._all_tasks,
            config.temperature,
            config.c if config.coefficient else None,
            heads=self._similar_heads,
            ridge=ridge,
            weight=config.ridge_weight,
            known_weight=0.0 if config.projection else config.known_weight,
            asked=config.asked,
        )

    @torch.no_grad()
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        """Features (N, D) under a task's network, or with those of the patches, (N, 2 D): ``patches 0``."""
        if not network.startswith(PATCHES):
            return super().embed(tokens, network)
        net = self.tasks[int(network.removeprefix(PATCHES))]
        adapters = self._adapters_of(net)

        def run(x: Tensor) -> Tensor:
            return self.network.trunk(x, net.norms, adapters, self.body, patches=True)

        return self._in_batches(tokens, run, width=2 * self.network.dim)
