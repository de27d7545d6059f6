"""OWM: Continual Learning of Context-Dependent Processing in Neural Networks (Zeng, Chen, Cui, Yu; Nature Machine
Intelligence 2019), orthogonal weights modification.

Only one thing is stored: for each linear layer, a projector P onto the directions that inputs of earlier tasks have
left free. A layer's gradient G (out, in) is replaced by G P. As P x = 0 for a stored input x, the layer's output for it
stays the same. After a task, P is updated by recursive least squares with the layer's mean inputs x of each batch:

    k = P x / (alpha + x^T P x),   P <- P - k x^T P,   alpha = alpha_0 * alpha_decay^(b / B)  at batch b of B

Starting from P = I this is P = (I + sum_b x_b x_b^T / alpha_b)^-1; alpha controls how exactly outputs are preserved.

It is applied to all trained linear layers: fc1 and fc2 of each adapter and the growing head. A layer's bias is treated
as one more column of its weight, with the constant input 1.

Deviations:

- The norms, which the original does not have, are trained in the first task only: their updates cannot be projected,
  and changing them would change the inputs of every later layer. The same holds for the backbone if
  ``freeze_backbone=False``.
- In a layer with L tokens per image, the mean at each position is a separate input, as the original treats the
  positions of a convolution; after the last attention that is the class token alone. All rank-one steps of a task are
  taken at once, which gives the same P.
- P is updated at the end of a task, as in the paper's text; the published code updates it in every batch.
- Momentum, as for all methods here: P does not change within a task and momentum starts from zero in each, so the
  accumulated steps stay within the free directions.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import shuffled_batches


class OwmConfig(TrainingConfig):
    alpha: float = Field(1.0, gt=0, description="alpha_0, regulariser of the projector at the first batch of a task")
    alpha_decay: float = Field(0.1, gt=0, le=1, description="alpha decays to this fraction by the last batch of a task")


class Projector(nn.Module):
    """P (A, D + 1, D + 1), float64, of A layers with D inputs; the last coordinate is the constant 1 of the bias."""

    P: Tensor

    def __init__(self, layers: int, inputs: int):
        super().__init__()
        self.register_buffer("P", torch.eye(inputs + 1, dtype=torch.float64).repeat(layers, 1, 1))

    @torch.no_grad()
    def store(self, information: Tensor) -> None:
        """All steps of recursive least squares at once, P <- (P^-1 + I)^-1; see :func:`information`."""
        identity = torch.eye(self.P.shape[-1], dtype=self.P.dtype, device=self.P.device)
        # matrix by matrix: on some CPUs torch solves a batch with several threads wrongly
        pairs = zip(self.P, information.expand_as(self.P), strict=True)
        P = torch.stack([torch.linalg.solve(identity + p @ i, p) for p, i in pairs])
        self.P.copy_((P + P.mT) / 2)

    @torch.no_grad()
    def project(self, weight: Tensor, bias: Tensor) -> None:
        """G <- G P for the gradients of A layers, in place: weight (A, out, D), bias (A, out)."""
        G = torch.cat([weight, bias[..., None]], -1) @ self.P.to(weight.dtype)
        weight.copy_(G[..., :-1])
        bias.copy_(G[..., -1])


def information(inputs: Tensor, alpha: Tensor) -> Tensor:
    """sum_bn x_bn x_bn^T / alpha_b over a layer's ``inputs`` (B, n, D) of B batches, each with a 1 for the bias: the
    directions in use. ``alpha`` (B,) -> (D + 1, D + 1), float64."""
    X = F.pad(inputs.double(), (0, 1), value=1.0)
    X = (X / alpha.to(X).sqrt()[:, None, None]).flatten(0, 1)
    return X.mT @ X


class Owm(SingleHeadLearner):
    name: ClassVar[str] = "owm"
    Config = OwmConfig
    config: OwmConfig

    def _reset(self) -> None:
        super()._reset()
        count, bottleneck, dim = self.adapters.w1.shape
        parts = {"fc1": Projector(count, dim), "fc2": Projector(count, bottleneck), "head": Projector(1, dim)}
        self.model["projectors"] = nn.ModuleDict(parts).to(self.device)

    def _grow(self, classes: int) -> None:
        super()._grow(classes)
        self._keep_body()

    @property
    def projectors(self) -> dict[str, Projector]:
        """``fc1`` and ``fc2`` of all adapters and ``head`` (an ``nn.ModuleDict``)."""
        return cast("dict[str, Projector]", self.model["projectors"])

    def _trained(self) -> list[Tensor]:
        trained: list[Tensor] = [*self.adapters.parameters(), *self.head.parameters()]
        if len(self.task_sizes) == 1:
            trained += [*self.norms.parameters(), *self._body_parameters()]
        return trained

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens = self.prepare(task.images)

        with self._clock("train"):
            project = self._project if task.index else None
            self._fit_rows(
                self._cross_entropy, tokens, [task.columns], task=task, listener=listener, after_backward=project
            )
            self._store(task, tokens)

    def _project(self, *batch: Tensor) -> None:
        """Project the gradients of all trained layers."""
        a, head = self.adapters, self.head
        self.projectors["fc1"].project(cast(Tensor, a.w1.grad), cast(Tensor, a.b1.grad))
        self.projectors["fc2"].project(cast(Tensor, a.w2.grad), cast(Tensor, a.b2.grad))
        self.projectors["head"].project(cast(Tensor, head.weight.grad)[None], cast(Tensor, head.bias.grad)[None])

    @torch.no_grad()
    def _store(self, task: TaskData, tokens: Tokens) -> None:
        """Update every projector with the layer's mean inputs over each batch of the task."""
        config, draw = self.config, generator(self.config.seed, "owm", task.index)
        batches = shuffled_batches(len(tokens), config.batch_size, draw)
        alpha = config.alpha * config.alpha_decay ** (torch.arange(len(batches), dtype=torch.float64) / len(batches))
        sums = {name: torch.zeros_like(projector.P) for name, projector in self.projectors.items()}
        at_once = max(1, self.eval_batch_size // config.batch_size)
        for first in range(0, len(batches), at_once):
            some = slice(first, first + at_once)
            for name, layers in self._mean_inputs(tokens[torch.cat(batches[some]).to(self.device)]).items():
                sums[name] += torch.stack([information(means, alpha[some]) for means in layers])
        for name, projector in self.projectors.items():
            projector.store(sums[name])

    @torch.no_grad()
    def _mean_inputs(self, x: Tensor) -> dict[str, list[Tensor]]:
        """Each layer's input, averaged over each of the B batches in ``x``: ``fc1`` A times (B, L, D), ``fc2`` A times
        (B, L, K), ``head`` (B, 1, D). Where only the class token goes through the last block, L is 1 there."""
        first: list[Tensor] = []
        second: list[Tensor] = []

        def means(h: Tensor) -> Tensor:
            return torch.stack([batch.mean(0) for batch in h.split(self.config.batch_size)])

        def keep(place: int, h: Tensor) -> None:
            hidden = F.relu(F.linear(h.float(), self.adapters.w1[place], self.adapters.b1[place]))
            first.append(means(h.float()))
            second.append(means(hidden))

        with self.network.observe_adapters(keep):
            features = self.network.trunk(x, self.norms, self.adapters.weights(), self.body)
        return {"fc1": first, "fc2": second, "head": [means(features)[:, None]]}

    def entries(self) -> dict[str, int]:
        return super().entries() | {"statistics": sum(projector.P.numel() for projector in self.projectors.values())}
