"""MORE: A Multi-Head Model for Continual Learning via Out-of-Distribution Replay (Kim, Ke, Liu; CoLLAs 2022).

A frozen pre-trained ViT with adapters. Each task trains the adapters under its own hard-attention masks, its own copy
of the norms, and its own head with |Y| + 1 outputs, the last of which means *ood* and is trained on the replay memory.
Later tasks cannot change what an earlier one uses. A test image goes through every task's network. The largest output
over all heads is the prediction, and its size tells how well the image is known.

Equation numbers are the paper's (Section 3); Algorithm 1 is :meth:`More._learn`, Algorithm 2 is :class:`MoreRule`.
Hard attention (Eq. 8-12) is in :mod:`morecl.methods.masked`, which HAT shares.

Deviations from the paper's text, where it leaves a choice or where we measured that it fails:

- Masks are rounded to exactly {0, 1} when a task ends. The paper keeps sigmoid(500 e), almost 0 or 1, so protection
  leaks a little. With rounded masks the features of a finished task stay bit-identical.
- Batches for Eq. 1 have ``batch_size`` + ``memory_batch_size`` images (Algorithm 1's sample(M)), one mean over both.
- The softmax has temperature 2 in prediction, as in the authors' code; the paper gives none.
- Back-updating continues from each head as the previous task left it (Algorithm 1), without momentum. The effect of a
  step of a linear head grows with the square of its features, so the rate is relative to their mean square (1 for the
  shipped backbone, 3 for DeiT-Ti, 12 for ViT-Ti). And a head's own samples get more weight (``back_update_own_share``).
  Eq. 3 weights all samples equally; with |M| samples of the new task, the fifth task of CIFAR10-5T has 50 own samples
  against 350 others, and earlier heads learn to reject their own classes: two thirds or more of the errors then go to
  later tasks. docs/methods/more.md has the measurements. ``preset="paper"`` is the paper's back-update, ``"authors"``
  that of their published code (:mod:`morecl.presets`).
- Features after a LayerNorm have no covariance of full rank: the pseudo-inverse is used, and with fewer samples than
  dimensions the covariance is shrunk. See :func:`morecl.gaussian.precision`.
- ``freeze_backbone=False`` trains the ViT in the first task only: nothing protects it, and features of finished tasks
  must not change. Norms of later tasks start from those of the first, which were trained with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from morecl import presets
from morecl.config import LASTING, SCORING, SgdConfig
from morecl.gaussian import Gaussians
from morecl.methods.base import TaskData
from morecl.methods.few import FewImages
from morecl.methods.masked import FOLDED_BYTES, ReplayConfig, ReplayLearner
from morecl.methods.more_rule import Heads, MoreRule, MoreTask
from morecl.methods.sharing import power_of_two
from morecl.methods.stacked_heads import StackedHeads
from morecl.nn.head_steps import in_kernel
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.scoring import LearnedTask, Output
from morecl.training import Batch, ProtectedSGD, require_finite

__all__ = ["More", "MoreConfig", "MoreRule", "MoreTask"]

# Training of heads when further images of known classes arrive.
REFIT_EPOCHS = 3  # times those of the back-update
REFIT_RATE = 3.0  # times the back-update's
OF_REFIT = {f"back_update_{name}" for name in ("epochs", "lr", "rate", "batch_size", "momentum", "own_share")}
REFIT_IMAGES = 200  # new images of a class at most; with many more, the weights of classes with few become too large


class MoreConfig(ReplayConfig):
    presets = presets.MORE

    preset: Literal["paper", "authors"] | None = Field(
        None, description="back-update of the paper or of its authors' code; null: ours. Other settings given win"
    )
    temperature: float = Field(2.0, gt=0, description="of the softmax in prediction", json_schema_extra=SCORING)
    c: float = Field(
        20.0, gt=0, description="scale of the Mahalanobis coefficient: c / distance (Eq. 4)", json_schema_extra=SCORING
    )
    s_max: float = Field(500.0, gt=1, description="largest steepness of the attention (Eq. 8)")
    coefficient: bool = Field(
        True,
        description="multiply by the Mahalanobis coefficient (Eq. 7 instead of Eq. 2)",
        json_schema_extra=SCORING,
    )
    shrink_below: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="shrink the covariance with fewer samples per dimension than this (Eq. 6)",
        json_schema_extra=LASTING,
    )
    back_update: bool = Field(True, description="train earlier heads to reject later classes (Eq. 3)")
    back_update_epochs: int = Field(10, ge=1)
    back_update_lr: float = Field(0.001, gt=0, le=1e30, description="in units of back_update_rate")
    back_update_rate: Literal["relative", "absolute"] = Field(
        "relative", description="relative: back_update_lr is divided by the mean square of a head's features"
    )
    back_update_batch_size: int = Field(16, ge=1)
    back_update_momentum: float = Field(0.0, ge=0, lt=1)
    back_update_own_share: float | None = Field(
        0.65,
        gt=0,
        lt=1,
        description="total weight of a head's own samples in Eq. 3; null: all samples have the same weight",
    )
    back_update_draw: Literal["random", "balanced"] = Field(
        "random",
        description="samples of the new task: as many as the memory holds, or of each class as many as it holds of one",
    )
    back_update_start: Literal["last", "trained"] = Field(
        "last", description="heads as the previous back-update left them, or as they were trained with their task"
    )
    back_update_features: Literal["own", "first"] = Field(
        "own", description="features of a head's own network, or of the first task's for all heads (authors' code)"
    )

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        off = super().switched_off(further=further)
        idle = sorted(presets.MORE_DEFAULT.keys() - (OF_REFIT if further else set()))
        if not self.memory_size:
            off |= dict.fromkeys(("back_update", *idle), "memory_size=0")
        if not self.back_update:
            off |= dict.fromkeys(idle, "back_update=false")
        return off if self.coefficient else off | {"c": "coefficient=false"}


class More(ReplayLearner):
    name: ClassVar[str] = "more"
    Config: ClassVar[type[SgdConfig]] = MoreConfig
    config: MoreConfig

    def _new_task(self, norms: Norms, shape: tuple[int, int], classes: int, init: torch.Generator) -> MoreTask:
        return MoreTask(norms, shape, self.network.dim, classes, init, self.config.shrink_below)

    @property
    def tasks(self) -> Sequence[MoreTask]:
        return cast("Sequence[MoreTask]", self.model["tasks"])

    # ---- Algorithm 1 ------------------------------------------------------------------------------------------

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(task.images)
        with self._clock("train"):
            self._train_against_memory(task, tokens, listener)
            self._keep_heads([task.index])
        if self.config.back_update and len(self.memory):
            with self._clock("back_update"):
                self._back_update(task, listener)
        with self._clock("train"):
            features = self.embed(tokens, str(task.index))
            require_finite(task.index, [features])
            self.tasks[-1].describe(features, task.targets.to(self.device))
        self._remember(task)

    def _train_against_memory(self, task: TaskData, tokens: Tokens, listener: Listener) -> None:
        """Eq. 1: the classes of the task against each other, and all that is replayed as *ood*."""
        ood = torch.full((len(self.memory),), task.classes)
        self._train_with_memory(task, tokens, task.targets, ood, listener)

    def _back_update(self, task: TaskData, listener: Listener) -> None:
        """Eq. 3: earlier heads learn to reject the classes of this task (and of each other), with frozen features.

        The data are the memory from before this task and random samples of the task (``back_update_draw``).
        """
        draw = generator(self.config.seed, "back-update", task.index)
        if self.config.back_update_draw == "balanced":
            drawn = self._balanced_sample(task, draw)
        else:
            drawn = torch.randperm(len(task.images), generator=draw)[: len(self.memory)]
        for net in self.tasks[: task.index]:
            net.restart_head()
        self._fit_heads(
            range(task.index),
            [self.prepare(self.memory.images), self.prepare(task.images[drawn.numpy()])],
            torch.cat([torch.from_numpy(self.memory.columns), task.columns[drawn]]),
            emphasis=_emphasis,
            draw=draw,
            task=task,
            listener=listener,
            stage="back-update",
            network=0 if self.config.back_update_features == "first" else None,
        )

    def _keep_heads(self, tasks: Sequence[int]) -> None:
        if self.config.back_update_start == "trained":
            for k in tasks:
                self.tasks[k].keep_head()

    def _fit_heads(
        self,
        tasks: Sequence[int],
        parts: Sequence[Tokens],
        columns: Tensor,
        *,
        emphasis: Callable[[Tensor, Tensor, float | None], Tensor],
        draw: torch.Generator,
        task: TaskData,
        listener: Listener,
        stage: str,
        network: int | None = None,
        more_epochs: int = 1,
        rate: float = 1.0,
    ) -> None:
        """Train the heads of ``tasks`` further, on images with frozen features: own classes by label, others as *ood*.

        The features of head j are those of network j, computed once.

        Args:
            parts: the images, n in all; columns: their classes (n,).
            emphasis: makes the weights of the samples (J, n), of mean 1, from their targets (J, n), the *ood* output of
                each head (J, 1) and ``back_update_own_share``.
            network: the one whose features all heads get, instead of each its own.
            more_epochs, rate: factors of the back-update's epochs and rate.
        """
        config = self.config
        heads = StackedHeads([net.head for net in self.tasks], tasks)
        networks = [str(j if network is None else network) for j in tasks]
        X = torch.stack([torch.cat([self.embed(part, name) for part in parts]) for name in networks])  # (J, n, D)
        y = heads.targets(columns)  # (J, n)
        share = emphasis(y, heads.ood, config.back_update_own_share)  # (J, n), mean 1
        if config.back_update_rate == "relative":
            share /= X.square().mean((1, 2))[:, None]  # scaling a head's loss scales its rate

        def batches(epoch: int) -> Iterator[Batch]:
            yield from self._weighted_batches(X.shape[1], config.back_update_batch_size, draw)

        def loss(index: Tensor, w: Tensor) -> Tensor:
            errors = heads.errors(X[:, index], y[:, index]) * share[:, index]
            return (errors * w).sum() / w.sum()  # the sum over heads of each head's mean

        lr, momentum = rate * config.back_update_lr, config.back_update_momentum
        optimizer = ProtectedSGD([heads.weight, heads.bias], lr, momentum)
        size = config.back_update_batch_size
        self._fit(
            loss,
            batches,
            task=task,
            listener=listener,
            optimizer=optimizer,
            whole=in_kernel(X, y, share, optimizer.tensors(), lr=lr, momentum=momentum, batch_size=size),
            epochs=more_epochs * config.back_update_epochs,
            stage=stage,
            speed=False,
        )
        heads.write_back()

    # ---- between tasks ----------------------------------------------------------------------------------------

    def _add_examples(self, examples: TaskData, listener: Listener) -> None:
        """Statistics become what all images at once would give; heads are trained further on memory and new images."""
        owner = torch.from_numpy(self.task_of_column())[examples.columns]  # (N,)
        touched: list[int] = owner.unique().tolist()
        seen = torch.cat([net.counts for net in self.tasks]).cpu().numpy()
        draw = generator(self.config.seed, "examples", sum(int(net.samples) for net in self.tasks))
        tokens = self.prepare(examples.images)
        with self._clock("back_update"):
            self._refit(examples, touched, draw, listener)
        with self._clock("train"), torch.no_grad():
            first = np.cumsum([0, *self.task_sizes])
            for k in touched:
                features = self.embed(tokens, str(k))
                require_finite(k, [features])
                own = owner == k
                targets = examples.columns[own] - int(first[k])
                self.tasks[k].extend(features[own.to(self.device)], targets.to(self.device))
            self.memory.add(examples.images, examples.columns.numpy(), seen, draw)
            self.rule.add(LearnedTask(self, examples))

    def _refit(self, examples: TaskData, touched: Sequence[int], draw: torch.Generator, listener: Listener) -> None:
        """Heads of ``touched`` tasks learn from the memory and the new images; the others reject some of these, as many
        as the memory holds. A head that has a class without any image at hand would unlearn it: it stays as it is."""
        stored = torch.from_numpy(self.memory.columns)
        order = torch.randperm(len(examples.images), generator=draw)
        shuffled = examples.columns[order]
        at_most = torch.cat([(shuffled == c).nonzero()[:REFIT_IMAGES, 0] for c in shuffled.unique()])
        others = [k for k in range(len(self.tasks)) if k not in touched] if self.config.back_update else []
        for tasks, drawn in ((touched, order[at_most]), (others, order[: len(self.memory)])):
            columns = torch.cat([stored, examples.columns[drawn]])
            if tasks := self._fully_shown(tasks, columns):
                parts = [self.memory.images, examples.images[drawn.numpy()]]
                self._fit_heads(
                    tasks,
                    [self.prepare(part) for part in parts if len(part)],
                    columns,
                    emphasis=_balanced,
                    draw=draw,
                    task=examples,
                    listener=listener,
                    stage="refit",
                    more_epochs=REFIT_EPOCHS,
                    rate=REFIT_RATE,
                )
                self._keep_heads(tasks)

    def _fully_shown(self, tasks: Sequence[int], columns: Tensor) -> list[int]:
        """Those of ``tasks`` of which each class that was not forgotten is among ``columns``."""
        missing = ~self.rule.forgotten.cpu()
        missing[columns] = False
        parts = missing.split(self.task_sizes)
        return [k for k in tasks if not parts[k].any() and self.rule.remaining()[k]]

    def _forget(self, column: int) -> None:
        task = int(self.task_of_column()[column])
        self.tasks[task].forget(column - sum(self.task_sizes[:task]))
        self.rule.forget(column)

    # ---- Algorithm 2 ------------------------------------------------------------------------------------------

    rule: MoreRule

    def _new_rule(self) -> MoreRule:
        config = self.config
        return MoreRule(self._all_tasks, config.temperature, config.c if config.coefficient else None)

    def _all_tasks(self) -> Sequence[MoreTask]:
        return self.tasks

    def _similar_heads(self) -> Iterator[tuple[list[int], Heads]]:
        """The heads of tasks with about as many classes, and which tasks these are: so that little is filled up. If not
        all of them can be kept, of one task at a time."""
        sizes: dict[int, list[int]] = {}
        for k, classes in enumerate(self.task_sizes):
            sizes.setdefault(power_of_two(classes), []).append(k)
        size = sum(8 * Heads.size([self.tasks[k] for k in among]) for among in sizes.values())
        if size <= FOLDED_BYTES:
            yield from self._kept("heads", lambda: [(m, Heads.of(self.tasks, m)) for m in sizes.values()], fits=True)
        else:
            yield from (([k], Heads.of(self.tasks, [k])) for k in range(len(self.tasks)))

    few_images: ClassVar[type[FewImages]] = FewImages

    @torch.no_grad()
    def _for_few(self, count: int) -> Callable[[Tensor], Output] | None:
        if self.few_images.bytes_for(self) > FOLDED_BYTES:
            return None
        few = self._kept("few", lambda: self.few_images(self), fits=True)
        if count * few.networks > self.eval_batch_size:
            return None
        return lambda images: few(self, images)

    # ---- inspection -------------------------------------------------------------------------------------------

    def statistics(self, task: int) -> Gaussians:
        """Class means (C, D), shared covariance (D, D) and number of samples of the task, float64 on the CPU."""
        net = cast(MoreTask, self._task(task))
        return Gaussians(net.means.cpu(), net.covariance.cpu(), int(net.samples))

    def entries(self) -> dict[str, int]:
        """The precision matrices are not counted: they are computed from the covariances. What only further images of
        known classes need, and which classes were forgotten, is not part of the method and not counted either."""
        parts = super().entries()
        parts["statistics"] -= sum(buffer.numel() for buffer in self.rule.buffers() if buffer.dtype == torch.bool)
        parts["statistics"] += sum(net.means.numel() + net.covariance.numel() for net in self.tasks)
        parts["heads"] += sum(net.trained_head.numel() for net in self.tasks)
        return parts


def _emphasis(targets: Tensor, ood: Tensor, share: float | None) -> Tensor:
    """Weights (J, n) of mean 1 that give the own samples of each head the given share of the total weight.

    A head that has no own samples, or none but these, weights all alike.
    """
    own = targets != ood
    if share is None:
        return torch.ones(own.shape, device=own.device)
    count = own.sum(1, keepdim=True).float()
    total = own.shape[1]
    weights = torch.where(own, share * total / count, (1 - share) * total / (total - count))
    return torch.where((count == 0) | (count == total), 1.0, weights)


def _balanced(targets: Tensor, ood: Tensor, share: float | None) -> Tensor:
    """As :func:`_emphasis`, and each class of a head has the same part of its share; ``None``: the share it has."""
    own = targets != ood
    total = own.shape[1]
    counts = torch.zeros(len(targets), int(ood.max()) + 1, device=targets.device)
    counts.scatter_add_(1, targets, torch.ones(targets.shape, device=targets.device))  # (J, outputs)
    rejected = counts.gather(1, ood)  # (J, 1)
    classes = (counts > 0).sum(1, keepdim=True) - (rejected > 0).long()
    part = 1 - rejected / total if share is None else torch.full_like(rejected, share)
    part = part.where(rejected > 0, 1.0).where(classes > 0, 0.0)
    of_own = part / classes.clamp(min=1) / counts.gather(1, targets)
    return total * torch.where(own, of_own, (1 - part) / rejected.clamp(min=1))
