"""The only epoch loop, and the optimiser whose protected weights stay where they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from morecl.errors import DivergedError
from morecl.progress import EpochDone, Listener

Batch = tuple[Tensor, ...]


class ProtectedSGD(torch.optim.Optimizer):
    """SGD with momentum in which each parameter may carry a gate in [0, 1] that multiplies its *update* (Eq. 11).

    v <- momentum v + g;  p <- p - lr * gate * v.  A gate of exactly 0 leaves the parameter bit-identical whatever
    the momentum holds; masking the gradient alone would not.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: float,
        momentum: float,
        gates: Sequence[Tensor] | None = None,
    ):
        """``gates``: of the first ``len(gates)`` parameters, each broadcastable to its parameter."""
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self._parameters = list(parameters)
        self._velocity = [torch.zeros_like(p) for p in self._parameters]
        self._gates = [gate.expand_as(p).contiguous() for p, gate in zip(self._parameters, gates or [], strict=False)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        lr, momentum = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) != len(self._parameters):
            raise RuntimeError("a parameter of this optimiser got no gradient")
        torch._foreach_mul_(self._velocity, momentum)
        torch._foreach_add_(self._velocity, gradients)
        guarded = len(self._gates)
        if guarded:
            update = torch._foreach_mul(self._velocity[:guarded], self._gates)
            torch._foreach_add_(self._parameters[:guarded], update, alpha=-lr)
        torch._foreach_add_(self._parameters[guarded:], self._velocity[guarded:], alpha=-lr)


def fit(
    loss: Callable[..., Tensor],
    batches: Callable[[int], Iterable[Batch]],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    task: int,
    images: int,
    listener: Listener,
    after_backward: Callable[[], None] | None = None,
    after_step: Callable[[], None] | None = None,
) -> None:
    """Run ``epochs`` passes: for each batch of ``batches(epoch)`` minimise ``loss(*batch)``.

    Args:
        images: training images per epoch, for the speed that is reported.
        after_backward: called when gradients are there and the step is not yet made (A-GEM, OWM).
        after_step: called after each step (to bound what was updated).

    Raises:
        DivergedError: the mean loss of an epoch is not finite.
    """
    for epoch in range(epochs):
        started, total, steps = time.perf_counter(), None, 0
        for batch in batches(epoch):
            optimizer.zero_grad(set_to_none=True)
            value = loss(*batch)
            value.backward()
            if after_backward:
                after_backward()
            optimizer.step()
            if after_step:
                after_step()
            total, steps = value.detach() if total is None else total + value.detach(), steps + 1
        mean = math.nan if total is None else float(total) / steps  # the epoch's only wait for the device
        if not math.isfinite(mean):
            raise DivergedError(
                f"training diverged: the loss of task {task + 1} is {mean} in epoch {epoch + 1} of {epochs}; "
                "lower the learning rate (lr)"
            )
        speed = images / max(time.perf_counter() - started, 1e-9)
        listener(EpochDone(task, epoch + 1, epochs, mean, speed))


def shuffled_batches(count: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """A random order of 0..count-1 in pieces of ``batch_size``; the last piece may be smaller."""
    return list(torch.randperm(count, generator=generator).split(batch_size))


def repeated_shuffles(count: int, length: int, generator: torch.Generator) -> Tensor:
    """``length`` draws from 0..count-1: shuffled, used up, shuffled again. (length,)"""
    rounds = math.ceil(length / count)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])[:length]
