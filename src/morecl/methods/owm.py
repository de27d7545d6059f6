"""OWM: Continual Learning of Context-Dependent Processing in Neural Networks (Zeng, Chen, Cui, Yu; Nature Machine
Intelligence 2019), orthogonal weights modification.

Nothing is stored but, for each linear layer, a projector P onto the directions that inputs of earlier tasks have left
free. A layer's gradient G (out, in) is replaced by G P; as P x = 0 for a stored input x, the layer's answer to it stays
what it was. After a task P is updated by recursive least squares with the layer's mean inputs x of each batch:

    k = P x / (alpha + x^T P x),   P <- P - k x^T P,   alpha = alpha_0 * alpha_decay^(b / B)  at batch b of B

Started from P = I this is P = (I + sum_b x_b x_b^T / alpha_b)^-1; alpha says how exactly the stored inputs are kept.

It is applied to all trained linear layers: fc1 and fc2 of each adapter and the growing head. A layer's bias is one
more column of its weight that sees the constant input 1.

Deviations:

- The norms, which the original does not have, are trained in the first task only: there is no input they could be
  projected away from, and moving them would move what every layer behind them sees.
- In a layer that sees L tokens an image, each position's mean is an input of its own, as the original does with the
  positions of a convolution. The L rank-one steps are taken at once (Woodbury's identity).
- P is updated when a task is finished, as that paper's text has it; the published code updates it in every batch.
- Momentum, as for all methods here: P does not change within a task and momentum starts from zero in each, so the sum
  it keeps stays inside the free directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import TrainingConfig
from morecl.methods.base import TaskData
from morecl.methods.single_head import SingleHeadLearner
from morecl.nn.adapter import Adapter
from morecl.nn.heads import GrowingHead
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import ProtectedSGD, shuffled_batches

Layer = nn.Linear | GrowingHead


class OwmConfig(TrainingConfig):
    alpha: float = Field(1.0, gt=0, description="alpha_0, the regulariser of the projector at a task's first batch")
    alpha_decay: float = Field(0.1, gt=0, le=1, description="alpha falls to this share by the task's last batch")


class Projector(nn.Module):
    """P (D + 1, D + 1), float64, of a layer with D inputs; the last coordinate is the constant 1 of the bias."""

    P: Tensor

    def __init__(self, inputs: int):
        super().__init__()
        self.register_buffer("P", torch.eye(inputs + 1, dtype=torch.float64))

    @torch.no_grad()
    def store(self, inputs: Tensor, alpha: float) -> None:
        """Recursive least squares with ``inputs`` (n, D), all under the same ``alpha``."""
        X = F.pad(inputs.double(), (0, 1), value=1.0)  # (n, D + 1)
        PX = self.P @ X.mT  # (D + 1, n)
        inner = X @ PX + alpha * torch.eye(len(X), dtype=X.dtype, device=X.device)
        self.P -= PX @ torch.linalg.solve(inner, PX.mT)
        self.P.copy_((self.P + self.P.mT) / 2)

    @torch.no_grad()
    def project(self, layer: Layer) -> None:
        """G <- G P for the layer's gradient, in place."""
        weight, bias = cast(Tensor, layer.weight.grad), cast(Tensor, layer.bias.grad)
        G = torch.cat([weight, bias[:, None]], 1) @ self.P.to(weight.dtype)
        weight.copy_(G[:, :-1])
        bias.copy_(G[:, -1])


class Owm(SingleHeadLearner):
    name: ClassVar[str] = "owm"
    Config = OwmConfig
    config: OwmConfig

    def _reset(self) -> None:
        super()._reset()
        layers = [*self._adapter_layers(), nn.Linear(self.network.dim, 1)]
        self.model["projectors"] = nn.ModuleList(Projector(layer.in_features) for layer in layers).to(self.device)

    @property
    def projectors(self) -> list[Projector]:
        """One a layer: fc1, fc2 of each adapter in turn, then the head (an ``nn.ModuleList``)."""
        return cast("list[Projector]", self.model["projectors"])

    def _adapter_layers(self) -> list[nn.Linear]:
        adapters = cast("list[Adapter]", self.network.adapters)
        return [layer for adapter in adapters for layer in (adapter.fc1, adapter.fc2)]

    def _layers(self) -> list[tuple[Layer, Projector]]:
        return list(zip([*self._adapter_layers(), self.head], self.projectors, strict=True))

    def _optimizer(self) -> ProtectedSGD:
        trained = [p for layer, _ in self._layers() for p in layer.parameters()]
        if len(self.task_sizes) == 1:
            trained += self.norms.parameters()
        return ProtectedSGD(trained, self.config.lr, self.config.momentum)

    def _learn(self, task: TaskData, listener: Listener) -> None:
        tokens, layers = self.prepare(task.images), self._layers()

        def loss(x: Tensor, columns: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self._features(x)), columns)

        def project() -> None:
            for layer, projector in layers:
                projector.project(layer)

        self._fit(task, tokens, loss, listener, after_backward=project if task.index else None)
        with self._clock("train"):
            self._store(task, tokens)

    @torch.no_grad()
    def _store(self, task: TaskData, tokens: Tokens) -> None:
        """Update every projector with the layer's mean inputs over each batch of the task."""
        draw = generator(self.config.seed, "owm", task.index)
        batches = shuffled_batches(len(tokens), self.config.batch_size, draw)
        for b, index in enumerate(batches):
            alpha = self.config.alpha * self.config.alpha_decay ** (b / len(batches))
            with self._mean_inputs() as means, self._autocast():
                self.head(self.network.trunk(tokens[index.to(self.device)], self.norms))
            for (_, projector), mean in zip(self._layers(), means, strict=True):
                projector.store(mean, alpha)

    @contextmanager
    def _mean_inputs(self) -> Iterator[list[Tensor]]:
        """Inside, a forward pass leaves each layer's mean input over the batch here: (L, D), the head's (1, D)."""
        means: list[Tensor] = []

        def keep(layer: nn.Module, inputs: tuple[Tensor]) -> None:
            means.append(inputs[0].float().mean(0).reshape(-1, inputs[0].shape[-1]))

        handles = [layer.register_forward_pre_hook(keep) for layer, _ in self._layers()]
        try:
            yield means
        finally:
            for handle in handles:
                handle.remove()

    def entries(self) -> dict[str, int]:
        return super().entries() | {"statistics": sum(projector.P.numel() for projector in self.projectors)}
