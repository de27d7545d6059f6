"""MORE: A Multi-Head Model for Continual Learning via Out-of-Distribution Replay (Kim, Ke, Liu; CoLLAs 2022).

A frozen pre-trained ViT with adapters. Each task trains the adapters under its own hard-attention masks, its own copy
of the norms and its own head with |Y| + 1 outputs, the last of which means *ood* and is trained on the replay memory.
Later tasks cannot change what an earlier one uses. A test image goes through every task's network; the largest
output over all heads is the prediction, and how large it is says how well the image is known.

Equation numbers are the paper's (Section 3); Algorithm 1 is :meth:`More._learn`, Algorithm 2 is :meth:`More.score`.

Deviations from the paper's text, all of them where it leaves a choice:

- Masks are rounded to exactly {0, 1} when a task ends. The paper keeps sigmoid(500 e), almost 0 or 1, so protection
  leaks a little; rounded, the features of a finished task stay bit-identical for ever.
- Eq. 1 is drawn as batches of ``batch_size`` + ``memory_batch_size`` (Algorithm 1's sample(M)), one mean over both.
- Softmax has temperature 2 in prediction, as in the authors' code; the paper names none.
- Back-updating goes on from each head as the previous task left it (Algorithm 1) and uses ``back_update_momentum``.
- A covariance that cannot be inverted is shrunk: see :func:`morecl.gaussian.precision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from morecl import gaussian
from morecl.config import TrainingConfig
from morecl.gaussian import Gaussians
from morecl.methods.base import Learner, Output, TaskData
from morecl.nn.folded import FoldedTrunk
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
from morecl.progress import Listener, silent
from morecl.random import generator
from morecl.training import Batch, ProtectedSGD, equal_batches, fit, repeated_shuffles, shuffled_batches


class MoreConfig(TrainingConfig):
    memory_size: int = Field(200, ge=0, description="images in the replay memory, all classes together")
    memory_batch_size: int = Field(64, ge=1, description="replayed images that join each batch")
    temperature: float = Field(2.0, gt=0, description="of the softmax in prediction")
    c: float = Field(20.0, gt=0, description="numerator of the coefficient (Eq. 4)")
    s_max: float = Field(500.0, gt=1, description="how hard the attention gets (Eq. 8)")
    lamb: float = Field(0.75, ge=0, description="weight of the regulariser (Eq. 12)")
    coefficient: bool = Field(True, description="multiply by the Mahalanobis coefficient (Eq. 7 instead of Eq. 2)")
    back_update: bool = Field(True, description="show earlier heads what came later (Eq. 3)")
    back_update_epochs: int = Field(10, ge=1)
    back_update_lr: float = Field(0.01, gt=0)
    back_update_batch_size: int = Field(16, ge=1)
    back_update_momentum: float = Field(0.9, ge=0, lt=1)


class TaskNet(nn.Module):
    """What one task owns: norms, attention embedding e (W,), head (D -> |Y| + 1), class means and covariance."""

    means: Tensor
    covariance: Tensor
    samples: Tensor

    def __init__(self, norms: Norms, width: int, dim: int, classes: int, init: torch.Generator):
        super().__init__()
        self.norms = norms
        self.embedding = nn.Parameter(torch.randn(width, generator=init))
        self.head = nn.Linear(dim, classes + 1)
        nn.init.trunc_normal_(self.head.weight, std=0.02, generator=init)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("means", torch.zeros(classes, dim, dtype=torch.float64))
        self.register_buffer("covariance", torch.zeros(dim, dim, dtype=torch.float64))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))


class More(Learner):
    name: ClassVar[str] = "more"
    Config = MoreConfig
    config: MoreConfig

    # ---- structure --------------------------------------------------------------------------------------------

    def _build_network(self) -> AdaptedViT:
        return AdaptedViT(self.backbone.vit, self.config.bottleneck)

    def _reset(self) -> None:
        self.network.initialise(generator(self.config.seed, "adapters"))
        self.model = nn.ModuleDict({"adapters": self.network.adapters, "tasks": nn.ModuleList()}).to(self.device)
        self._precision: dict[int, Tensor] = {}
        self._together: FoldedTrunk | None = None

    def _grow(self, classes: int) -> None:
        init = generator(self.config.seed, "task", len(self.tasks))
        width = (self.config.bottleneck + self.network.dim) * len(self.network.adapters)
        net = TaskNet(self.network.new_norms(), width, self.network.dim, classes, init)
        self.tasks.append(net.to(self.device))

    @property
    def tasks(self) -> list[TaskNet]:
        """One :class:`TaskNet` a task (an ``nn.ModuleList``)."""
        return cast("list[TaskNet]", self.model["tasks"])

    # ---- Algorithm 1 ------------------------------------------------------------------------------------------

    def _learn(self, task: TaskData, listener: Listener) -> None:
        net = self.tasks[-1]
        tokens = self.prepare(task.images)
        with self._clock("train"):
            self._train(task, net, tokens, listener)
        if self.config.back_update and len(self.memory):
            with self._clock("back_update"):
                self._back_update(task, tokens)
        with self._clock("train"):
            statistics = gaussian.estimate(
                self.embed(tokens, str(task.index)), task.targets.to(self.device), task.classes
            )
            net.means.copy_(statistics.means)
            net.covariance.copy_(statistics.covariance)
            net.samples.fill_(statistics.samples)
        columns = task.first_column + task.targets.numpy()
        self.memory.update(task.images, columns, generator(self.config.seed, "memory", task.index))

    def _train(self, task: TaskData, net: TaskNet, tokens: Tokens, listener: Listener) -> None:
        """Minimise Eq. 13 = Eq. 1 + Eq. 12 over adapters, norms, embedding and head of the task."""
        config, network = self.config, self.network
        before = accumulated([rounded(t.embedding.detach()) for t in self.tasks[:-1]], net.embedding.numel())
        before = before.to(self.device)
        optimizer = self._optimizer(net, before)
        replay = self.prepare(self.memory.images) if len(self.memory) else None
        targets = task.targets.to(self.device)
        ood = torch.full((config.memory_batch_size,), task.classes, device=self.device)
        steps = -(-len(tokens) // config.batch_size)

        def batches(epoch: int) -> Iterator[Batch]:
            draw = generator(config.seed, "epoch", task.index, epoch)
            own = equal_batches(len(tokens), config.batch_size, draw, self.device, fill=self.captured)
            anneal = [annealed_s(epoch * steps + b, steps, config.epochs, config.s_max) for b in range(steps)]
            s = torch.tensor(anneal, device=self.device)
            if replay:
                drawn = repeated_shuffles(len(replay), steps * config.memory_batch_size, draw).to(self.device)
            for b, (index, weight) in enumerate(own):
                x, y = tokens[index], targets[index]
                if replay:
                    start = b * config.memory_batch_size
                    other = drawn[start : start + config.memory_batch_size]
                    x, y = torch.cat([x, replay[other]]), torch.cat([y, ood])
                    # the last batch of an epoch may be smaller; its replayed part counts for as much less
                    share = min(1.0, (len(tokens) - b * config.batch_size) / config.batch_size)
                    weight = torch.cat([weight, torch.full_like(ood, share, dtype=weight.dtype)])
                yield x, y, weight, s[b]

        def loss(x: Tensor, y: Tensor, weight: Tensor, s: Tensor) -> Tensor:
            a = attention(net.embedding, s, config.s_max)
            gates = split_gates(a, config.bottleneck, network.dim)
            with self._autocast():
                features = network.trunk(x, net.norms, gates, compiled=self.compiled)
            errors = F.cross_entropy(net.head(features), y, reduction="none")
            return (errors * weight).sum() / weight.sum() + regulariser(a, before, config.lamb)  # Eq. 13

        def bound() -> None:
            with torch.no_grad():
                net.embedding.clamp_(-EMBEDDING_BOUND, EMBEDDING_BOUND)

        fit(
            loss,
            batches,
            optimizer,
            epochs=config.epochs,
            task=task.index,
            images=len(tokens),
            listener=listener,
            after_step=bound,
            capture=self.captured,
        )

    def _optimizer(self, net: TaskNet, before: Tensor) -> ProtectedSGD:
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

    def _back_update(self, task: TaskData, tokens: Tokens) -> None:
        """Eq. 3: earlier heads learn to reject the classes of this task (and of each other), features frozen.

        The data are the memory as it was before this task and as many random samples of the task. The features of
        head j are those of network j, computed once. The heads do not depend on each other, so all are trained in
        one batched pass: head j is row j of the stacked weights, padded to the widest head.
        """
        config = self.config
        draw = generator(config.seed, "back-update", task.index)
        drawn = torch.randperm(len(tokens), generator=draw)[: len(self.memory)]
        replay, sample = self.prepare(self.memory.images), self.prepare(task.images[drawn.numpy()])
        owner = torch.from_numpy(self.task_of_column()[self.memory.columns])
        first = np.cumsum([0, *self.task_sizes])

        heads = [net.head for net in self.tasks[:-1]]
        widest = max(head.out_features for head in heads)
        weight = torch.zeros(len(heads), widest, self.network.dim, device=self.device)
        bias = torch.full((len(heads), widest), -torch.inf, device=self.device)
        features, targets = [], []
        for j, head in enumerate(heads):
            weight[j, : head.out_features], bias[j, : head.out_features] = head.weight.data, head.bias.data
            features.append(torch.cat([self.embed(replay, str(j)), self.embed(sample, str(j))]))
            ood = head.out_features - 1
            own = torch.from_numpy(self.memory.columns) - int(first[j])
            targets.append(torch.cat([own.where(owner == j, ood), torch.full((len(sample),), ood)]))
        X = torch.stack(features)  # (J, n, D)
        y = torch.stack(targets).to(self.device)  # (J, n)
        weight.requires_grad_(), bias.requires_grad_()

        def batches(epoch: int) -> Iterator[Batch]:
            for index in shuffled_batches(X.shape[1], config.back_update_batch_size, draw):
                yield (index.to(self.device),)

        def loss(index: Tensor) -> Tensor:
            logits = torch.baddbmm(bias[:, None], X[:, index], weight.mT)  # (J, B, widest)
            each = F.cross_entropy(logits.flatten(0, 1), y[:, index].flatten(), reduction="none")
            return each.view(len(heads), -1).mean(1).sum()  # independent heads: the sum trains each on its own mean

        optimizer = ProtectedSGD([weight, bias], config.back_update_lr, config.back_update_momentum)
        fit(
            loss,
            batches,
            optimizer,
            epochs=config.back_update_epochs,
            task=task.index,
            images=X.shape[1],
            listener=silent,
        )
        for j, head in enumerate(heads):
            head.weight.data.copy_(weight.detach()[j, : head.out_features])
            head.bias.data.copy_(bias.detach()[j, : head.out_features])

    # ---- Algorithm 2 ------------------------------------------------------------------------------------------

    def networks(self) -> list[str]:
        return [str(k) for k in range(len(self.tasks))]

    @torch.no_grad()
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        """Features h(x, k) under the rounded masks and the norms of task k."""
        return self._embed_under(self._folded([self.tasks[int(network)]]), tokens)[0]

    @torch.no_grad()
    def embed_all(self, tokens: Tokens) -> list[Tensor]:
        """Few images go through all networks in one pass, many through one network after the other."""
        if len(tokens) * len(self.tasks) > self.eval_batch_size:
            return super().embed_all(tokens)
        if self._together is None or self._together.size != len(self.tasks):
            self._together = self._folded(self.tasks)
        return list(self._embed_under(self._together, tokens))

    def _folded(self, tasks: Sequence[TaskNet]) -> FoldedTrunk:
        gates = [split_gates(rounded(t.embedding), self.config.bottleneck, self.network.dim) for t in tasks]
        return FoldedTrunk(self.network, [(t.norms, gate) for t, gate in zip(tasks, gates, strict=True)])

    def _embed_under(self, trunk: FoldedTrunk, tokens: Tokens) -> Tensor:
        """(G, N, D); a full batch is worth compiled code, the remainder is not."""
        with self._autocast():
            parts = [
                trunk(x, compiled=self.compiled and len(x) == self.eval_batch_size) for x in self._in_batches(tokens)
            ]
        return torch.cat(parts, 1) if parts else torch.empty(trunk.size, 0, self.network.dim, device=self.device)

    @torch.no_grad()
    def score(self, features: Sequence[Tensor]) -> Output:
        """Eq. 7 (or Eq. 2 without the coefficient): p(Y^k | x, k) s^k(x) of every task, side by side."""
        scores, probabilities = [], []
        for k, (net, z) in enumerate(zip(self.tasks, features, strict=True)):
            logits = F.linear(z.double(), net.head.weight.double(), net.head.bias.double())
            p = (logits / self.config.temperature).softmax(1)[:, :-1]  # the ood output takes part, then is dropped
            probabilities.append(p)
            if self.config.coefficient:
                p = p * gaussian.coefficient(z, net.means, self._precision_of(k), self.config.c)[:, None]  # Eq. 4
            scores.append(p)
        joined = torch.cat(scores, 1)
        return Output(joined, torch.cat(probabilities, 1), joined.amax(1))

    def _precision_of(self, task: int) -> Tensor:
        if task not in self._precision:
            self._precision[task] = gaussian.precision(self._gaussians(task))
        return self._precision[task]

    def _gaussians(self, task: int) -> Gaussians:
        net = self.tasks[task]
        return Gaussians(net.means, net.covariance, int(net.samples))

    # ---- to look inside ---------------------------------------------------------------------------------------

    def masks(self, task: int) -> dict[str, NDArray[np.float32]]:
        """The task's rounded masks: ``blocks.0.attn.m1`` (K,), ``blocks.0.attn.m2`` (D,), ``blocks.0.mlp.m1``, ..."""
        gates = split_gates(rounded(self._task(task).embedding.detach()), self.config.bottleneck, self.network.dim)
        names = [
            f"blocks.{i}.{b}.{m}" for i in range(self.network.depth) for b in ("attn", "mlp") for m in ("m1", "m2")
        ]
        return {name: gate.cpu().numpy() for name, gate in zip(names, gates, strict=True)}

    def statistics(self, task: int) -> Gaussians:
        """Class means (C, D), shared covariance (D, D) and number of samples of the task, float64 on the CPU."""
        net = self._task(task)
        return Gaussians(net.means.cpu(), net.covariance.cpu(), int(net.samples))

    def capacity(self) -> float | None:
        masks = [rounded(net.embedding.detach()) for net in self.tasks]
        return float(100 * accumulated(masks, 1).mean()) if masks else 0.0

    def entries(self) -> dict[str, int]:
        def count(parameters: Iterator[nn.Parameter]) -> int:
            return sum(p.numel() for p in parameters)

        return {
            "backbone": sum(value.numel() for value in self.backbone.state.values()),
            "adapters": count(self.network.adapters.parameters()),
            "norms": sum(count(net.norms.parameters()) for net in self.tasks),
            "embeddings": sum(net.embedding.numel() for net in self.tasks),
            "heads": sum(count(net.head.parameters()) for net in self.tasks),
            "statistics": sum(net.means.numel() + net.covariance.numel() for net in self.tasks),
        }

    def _task(self, task: int) -> TaskNet:
        if not 0 <= task < len(self.tasks):
            raise ValueError(f"there is no task {task}; {len(self.tasks)} learned so far")
        return self.tasks[task]
