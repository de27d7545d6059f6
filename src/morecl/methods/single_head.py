"""What single-head methods share: adapters, norms (and the backbone, unless frozen) that all tasks train; one head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from morecl.config import LearnerConfig, TrainingConfig
from morecl.methods.base import Learner, Output, TaskData, count
from morecl.nn.adapter import Adapters
from morecl.nn.heads import GrowingHead
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import Batch, ProtectedSGD, fit, row_batches


class SingleHeadLearner(Learner):
    """A learner with one network. A subclass says in ``_learn`` what loss a task is trained with; the OOD score is the
    maximum softmax probability unless it says otherwise in ``score``."""

    Config: ClassVar[type[LearnerConfig]] = TrainingConfig
    config: TrainingConfig

    def _reset(self) -> None:
        adapters = self.network.new_adapters(self.config.bottleneck)
        adapters.initialise(generator(self.config.seed, "adapters"))
        parts = self._new_body() | {
            "adapters": adapters,
            "norms": self.network.new_norms(),
            "head": GrowingHead(self.network.dim),
        }
        self.model = nn.ModuleDict(parts).to(self.device)

    def _grow(self, classes: int) -> None:
        self.head.grow(classes, generator(self.config.seed, "head", len(self.task_sizes)))

    @property
    def adapters(self) -> Adapters:
        return cast(Adapters, self.model["adapters"])

    @property
    def norms(self) -> Norms:
        return cast(Norms, self.model["norms"])

    @property
    def head(self) -> GrowingHead:
        return cast(GrowingHead, self.model["head"])

    def _features(self, tokens: Tensor) -> Tensor:
        """(B, L, D) -> (B, D), with gradients. Whole batches are worth compiled code, remainders are not."""
        compiled = self.compiled and len(tokens) % self.config.batch_size == 0
        return self.network.trunk(tokens, self.norms, self.adapters.weights(), self.body, compiled=compiled)

    def _logits(self, tokens: Tokens) -> Tensor:
        """(N, classes): what the head says now; the outputs of a teacher before training goes on."""
        with torch.no_grad():
            return self.head(self.embed(tokens, self.networks()[-1]))

    def _trained(self) -> list[Tensor]:
        """What a task trains."""
        return list(self.model.parameters())

    def _optimizer(self, trained: nn.Module | None = None, rate: float = 1.0) -> ProtectedSGD:
        """Of all that a task trains, or of ``trained`` alone; ``rate`` is relative to ``config.lr``."""
        parameters = self._trained() if trained is None else list(trained.parameters())
        return ProtectedSGD(parameters, rate * self.config.lr, self.config.momentum)

    def _fit(
        self,
        task: TaskData,
        tokens: Tokens,
        loss: Callable[..., Tensor],
        listener: Listener,
        *,
        after_backward: Callable[..., None] | None = None,
    ) -> None:
        """Minimise ``loss(tokens (B, L, D), columns (B,))`` over the task's own images for ``config.epochs``."""
        columns = task.columns.to(self.device)
        with self._clock("train"):
            self._fit_rows(loss, tokens, [columns], task=task, listener=listener, after_backward=after_backward)

    def _fit_rows(
        self,
        loss: Callable[..., Tensor],
        inputs: Tokens | Tensor,
        rows: Sequence[Tensor],
        *,
        task: TaskData,
        listener: Listener,
        stage: str = "",
        epochs: int | None = None,
        optimizer: ProtectedSGD | None = None,
        after_backward: Callable[..., None] | None = None,
    ) -> None:
        """Minimise ``loss(inputs, *rows)`` over batches of N images, each epoch in a new order.

        Args:
            inputs: tokens of the images, or their features (N, D).
            rows: tensors (N, ...) on the device, one row per image: targets, a teacher's outputs, weights.
            stage: what is done besides the training of the task itself, see :class:`morecl.progress.EpochDone`.
            epochs, optimizer: ``config.epochs`` and all parameters with ``config.lr`` if not given.
        """

        def batches(epoch: int) -> Iterator[Batch]:
            draw = generator(self.config.seed, stage or "epoch", task.index, epoch)
            return row_batches(inputs, rows, self.config.batch_size, draw)

        fit(
            loss,
            batches,
            optimizer or self._optimizer(),
            epochs=epochs or self.config.epochs,
            task=task.index,
            images=len(inputs),
            listener=listener,
            stage=stage,
            after_backward=after_backward,
            capture=self.captured,
        )

    def networks(self) -> list[str]:
        return [f"after task {len(self.task_sizes)}"]

    @torch.no_grad()
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        adapters = self.adapters.weights()
        return self._in_batches(tokens, lambda x: self.network.trunk(x, self.norms, adapters, self.body))

    @torch.no_grad()
    def score(self, features: Sequence[Tensor]) -> Output:
        p = self.head(features[0]).double().softmax(1)
        return Output(p, p, p.amax(1))

    def entries(self) -> dict[str, int]:
        parts = {"adapters": count(self.adapters), "norms": count(self.norms), "heads": count(self.head)}
        return super().entries() | parts
