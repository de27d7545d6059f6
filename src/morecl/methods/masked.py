"""What multi-head methods with hard attention share: adapters that all tasks train under masks of their own.

The mechanism is HAT's (Serra et al., ICML 2018) on adapters, as MORE uses it; equation numbers are those of the MORE
paper, Section 3.3. Each task owns its masks, its copy of the norms and its head; later tasks cannot change what it
uses, because its masks, rounded to exactly {0, 1} when it ends, block their updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import LearnerConfig, TrainingConfig
from morecl.methods.base import Learner, TaskData
from morecl.nn.hard_attention import (
    EMBEDDING_BOUND,
    accumulated,
    annealed_s,
    attention,
    protection,
    regulariser,
    rounded,
    split_gates,
)
from morecl.nn.network import AdaptedViT, Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import Batch, ProtectedSGD, fit


class MaskedConfig(TrainingConfig):
    s_max: float = Field(400.0, gt=1, description="how hard the attention gets (Eq. 8)")
    lamb: float = Field(0.75, ge=0, description="weight of the regulariser (Eq. 12)")


class MaskedTask(nn.Module):
    """What one task owns: norms, attention embedding e (W,), head (D -> outputs)."""

    def __init__(self, norms: Norms, width: int, dim: int, outputs: int, init: torch.Generator):
        super().__init__()
        self.norms = norms
        self.embedding = nn.Parameter(torch.randn(width, generator=init))
        self.head = nn.Linear(dim, outputs)
        nn.init.trunc_normal_(self.head.weight, std=0.02, generator=init)
        nn.init.zeros_(self.head.bias)


class MaskedLearner(Learner):
    """A learner with one network a task. A subclass makes the task's part in ``_new_task``, says what batches it is
    trained on and how the heads' answers are joined."""

    Config: ClassVar[type[LearnerConfig]] = MaskedConfig
    config: MaskedConfig

    def _new_task(self, norms: Norms, width: int, classes: int, init: torch.Generator) -> MaskedTask:
        """The part that a task of ``classes`` classes owns."""
        return MaskedTask(norms, width, self.network.dim, classes, init)

    # ---- structure --------------------------------------------------------------------------------------------

    def _build_network(self) -> AdaptedViT:
        return AdaptedViT(self.backbone.vit, self.config.bottleneck)

    def _reset(self) -> None:
        self.network.initialise(generator(self.config.seed, "adapters"))
        self.model = nn.ModuleDict({"adapters": self.network.adapters, "tasks": nn.ModuleList()}).to(self.device)

    def _grow(self, classes: int) -> None:
        init = generator(self.config.seed, "task", len(self.tasks))
        width = (self.config.bottleneck + self.network.dim) * len(self.network.adapters)
        self.tasks.append(self._new_task(self.network.new_norms(), width, classes, init).to(self.device))

    @property
    def tasks(self) -> list[MaskedTask]:
        """One :class:`MaskedTask` a task (an ``nn.ModuleList``)."""
        return cast("list[MaskedTask]", self.model["tasks"])

    # ---- training ---------------------------------------------------------------------------------------------

    def _train(
        self,
        task: TaskData,
        batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]],
        batches_per_epoch: int,
        listener: Listener,
    ) -> None:
        """Minimise Eq. 13, cross-entropy over the ``batches(epoch)`` of tokens (B, L, D) and targets (B,) plus Eq. 12,
        over the newest task's norms, embedding and head and what earlier tasks left free of the adapters."""
        config, network, net = self.config, self.network, self.tasks[-1]
        before = accumulated([rounded(t.embedding.detach()) for t in self.tasks[:-1]], net.embedding.numel())
        before = before.to(self.device)

        def annealed(epoch: int) -> Iterator[Batch]:
            for b, (x, y) in enumerate(batches(epoch)):
                s = annealed_s(epoch * batches_per_epoch + b, batches_per_epoch, config.epochs, config.s_max)
                yield x, y, torch.tensor(s, device=self.device)

        def loss(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
            a = attention(net.embedding, s, config.s_max)
            with self._autocast():
                features = network.trunk(x, net.norms, split_gates(a, config.bottleneck, network.dim))
            return F.cross_entropy(net.head(features), y) + regulariser(a, before, config.lamb)

        def bound() -> None:
            with torch.no_grad():
                net.embedding.clamp_(-EMBEDDING_BOUND, EMBEDDING_BOUND)

        fit(
            loss,
            annealed,
            self._optimizer(net, before),
            epochs=config.epochs,
            task=task.index,
            images=len(task.images),
            listener=listener,
            after_step=bound,
        )

    def _optimizer(self, net: MaskedTask, before: Tensor) -> ProtectedSGD:
        """SGD in which the adapters' updates are multiplied by Eq. 11; what the task owns is free."""
        masks = split_gates(before, self.config.bottleneck, self.network.dim)
        shared, gates = [], []
        for i, adapter in enumerate(self.network.adapters):
            guard = protection(masks[2 * i], masks[2 * i + 1])
            for name, parameter in adapter.named_parameters():
                shared.append(parameter)
                gates.append(guard[name])
        owned = [*net.norms.parameters(), net.embedding, *net.head.parameters()]
        return ProtectedSGD([*shared, *owned], self.config.lr, self.config.momentum, gates)

    # ---- features ---------------------------------------------------------------------------------------------

    def networks(self) -> list[str]:
        return [str(k) for k in range(len(self.tasks))]

    @torch.no_grad()
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        """Features h(x, k) under the rounded masks and the norms of task k."""
        net = self.tasks[int(network)]
        gates = split_gates(rounded(net.embedding), self.config.bottleneck, self.network.dim)
        with self._autocast():
            parts = [self.network.trunk(x, net.norms, gates) for x in self._in_batches(tokens)]
        return torch.cat(parts) if parts else torch.empty(0, self.network.dim, device=self.device)

    # ---- to look inside ---------------------------------------------------------------------------------------

    def masks(self, task: int) -> dict[str, NDArray[np.float32]]:
        """The task's rounded masks: ``blocks.0.attn.m1`` (K,), ``blocks.0.attn.m2`` (D,), ``blocks.0.mlp.m1``, ..."""
        if not 0 <= task < len(self.tasks):
            raise ValueError(f"there is no task {task}; {len(self.tasks)} learned so far")
        gates = split_gates(rounded(self.tasks[task].embedding.detach()), self.config.bottleneck, self.network.dim)
        names = [
            f"blocks.{i}.{b}.{m}" for i in range(self.network.depth) for b in ("attn", "mlp") for m in ("m1", "m2")
        ]
        return {name: gate.cpu().numpy() for name, gate in zip(names, gates, strict=True)}

    def capacity(self) -> float | None:
        masks = [rounded(net.embedding.detach()) for net in self.tasks]
        return float(100 * accumulated(masks, 1).mean()) if masks else 0.0

    def entries(self) -> dict[str, int]:
        def count(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters())

        return {
            "backbone": sum(value.numel() for value in self.backbone.state.values()),
            "adapters": count(self.network.adapters),
            "norms": sum(count(net.norms) for net in self.tasks),
            "embeddings": sum(net.embedding.numel() for net in self.tasks),
            "heads": sum(count(net.head) for net in self.tasks),
            "statistics": 0,
        }
