"""The only training loop, and an optimiser that leaves protected weights unchanged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from morecl.errors import DivergedError
from morecl.nn.capture import Batch as Batch
from morecl.nn.capture import CapturedStep
from morecl.nn.fused import AVAILABLE, supports_device
from morecl.nn.tokens import Tokens
from morecl.progress import EpochDone, Listener

if AVAILABLE:
    from morecl.nn.kernels import sgd

EXPLODED = 1000.0  # times the loss before the first step, and at least this: what no rate that trains reaches

WholeEpoch = Callable[[Iterable[Batch]], tuple[Tensor, int]]  # see :func:`fit`


class ProtectedSGD:
    """SGD with momentum in which a parameter may have a gate in [0, 1] that multiplies its *update* (MORE, Eq. 11).

    v <- momentum v + g;  p <- p - lr * gate * v.  A gate of exactly 0 leaves the parameter bit-identical whatever the
    momentum is; masking the gradient alone would not. As in ``torch.optim.SGD``, ``weight_decay`` adds its multiple of
    p to g, and ``nesterov`` uses g + momentum v instead of v. The gate multiplies these, too.

    Offers only the part of ``torch.optim.Optimizer``'s interface that is used here: creating a real one would import
    torch's compiler.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: float,
        momentum: float,
        gates: Sequence[Tensor] | None = None,
        *,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ):
        """``gates``: for the first ``len(gates)`` parameters, each broadcastable to its parameter."""
        self._parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": self._parameters, "lr": lr, "momentum": momentum}]
        self._weight_decay, self._nesterov = weight_decay, nesterov
        self._velocity = [torch.zeros_like(p) for p in self._parameters]
        self._gates = [gate.expand_as(p).contiguous() for p, gate in zip(self._parameters, gates or [], strict=False)]
        self._sizes: Tensor | None = None

    def use_kernel(self) -> None:
        """Take steps in our own kernel from now on, if they suit it: few float32 tensors on one NVIDIA GPU.

        It needs a C compiler. A network of many tensors is better off with torch's own kernels.
        """
        tensors = [*self._parameters, *self._gates]
        if AVAILABLE and 0 < len(self._parameters) <= sgd.MOST and all(_suits_kernel(t, tensors[0]) for t in tensors):
            self._sizes = sgd.sizes_of(self._parameters)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        lr, momentum = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) != len(self._parameters):
            raise RuntimeError("a parameter of this optimiser got no gradient")
        if self._sizes is not None:
            sgd.step(
                self._parameters, [g.contiguous() for g in gradients], self._velocity, self._gates, self._sizes,
                lr=lr, momentum=momentum, weight_decay=self._weight_decay, nesterov=self._nesterov,
            )  # fmt: skip
            torch.autograd.graph.increment_version([*self._parameters, *self._velocity])  # torch did not see it
            return
        if self._weight_decay:
            gradients = list(torch._foreach_add(gradients, self._parameters, alpha=self._weight_decay))
        torch._foreach_mul_(self._velocity, momentum)
        torch._foreach_add_(self._velocity, gradients)
        step = self._velocity
        if self._nesterov:
            step = list(torch._foreach_add(gradients, self._velocity, alpha=momentum))
        guarded = len(self._gates)
        if guarded:
            update = torch._foreach_mul(step[:guarded], self._gates)
            torch._foreach_add_(self._parameters[:guarded], update, alpha=-lr)
        if guarded < len(self._parameters):
            torch._foreach_add_(self._parameters[guarded:], step[guarded:], alpha=-lr)

    def tensors(self) -> list[Tensor]:
        """All tensors that a step changes."""
        return [*(p.data for p in self._parameters), *self._velocity]


def _suits_kernel(tensor: Tensor, first: Tensor) -> bool:
    is_plain = tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() <= sgd.LARGEST
    return is_plain and tensor.device == first.device and supports_device(tensor.device)


def fit(
    loss: Callable[..., Tensor],
    batches: Callable[[int], Iterable[Batch]],
    optimizer: ProtectedSGD,
    *,
    epochs: int,
    task: int,
    images: int | None,
    listener: Listener,
    stage: str = "",
    after_backward: Callable[..., None] | None = None,
    after_step: Callable[[], None] | None = None,
    capture: bool = False,
    whole: WholeEpoch | None = None,
) -> None:
    """Run ``epochs`` passes: for each batch of ``batches(epoch)`` minimise ``loss(*batch)``.

    Args:
        images: images per epoch that pass through the network, for the reported speed; ``None`` reports none.
        stage: see :class:`EpochDone`.
        after_backward: called with the batch between the backward pass and the step (A-GEM, HAL, OWM).
        after_step: called after each step (to bound what was updated).
        capture: once two batches in a row have the same shapes, record the step as a CUDA graph and replay it; batches
            of other shapes run without one. Nothing in the step may depend on the host, and running it twice on the
            same batch must change nothing more, except for what the optimiser changes.
        whole: takes all steps of an epoch at once instead, from its batches: the same steps as those of ``loss`` and
            ``optimizer``. Returns the sum of the losses and the number of steps.

    Raises:
        DivergedError: the mean loss of an epoch, or a parameter at the end, is not finite, or the loss exploded.
    """

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()
        if after_backward:
            after_backward(*batch)
        optimizer.step()
        if after_step:
            after_step()
        return value.detach()

    run = Capturing(step, optimizer.tensors()) if capture else step

    way_out = f" of the stage {stage!r}; lower its learning rate" if stage else "; lower the learning rate (lr)"
    initial: Tensor | None = None  # the loss before the first step

    def one_by_one(batches: Iterable[Batch]) -> tuple[Tensor, int]:
        nonlocal initial
        total, steps = torch.zeros(()), 0
        for batch in batches:
            value = run(batch)
            total = value.clone() if steps == 0 else total + value
            initial = total if initial is None else initial
            steps += 1
        return total, steps

    for epoch in range(epochs):
        started = time.perf_counter()
        total, steps = (whole or one_by_one)(batches(epoch))
        mean = float(total) / steps  # the only wait for the device in an epoch
        if not math.isfinite(mean):
            raise DivergedError(
                f"training diverged: the loss of task {task + 1} is {mean} in epoch {epoch + 1} of {epochs}{way_out}"
            )
        if initial is not None and mean > EXPLODED and mean > EXPLODED * float(initial):  # else nothing waits for it
            raise DivergedError(
                f"training diverged: the loss of task {task + 1} grew from {float(initial):.3g} to {mean:.3g} in epoch "
                f"{epoch + 1} of {epochs}{way_out}"
            )
        speed = None if images is None else images / max(time.perf_counter() - started, 1e-9)
        listener(EpochDone(task, epoch + 1, epochs, mean, speed, stage))
    require_finite(task, optimizer.param_groups[0]["params"])
    optimizer.zero_grad()  # or the last gradients would live as long as the parameters


def require_finite(task: int, tensors: Iterable[Tensor]) -> None:
    """Raise :class:`DivergedError` if a number in ``tensors``, which training left, is not finite."""
    if not all(bool(tensor.detach().isfinite().all()) for tensor in tensors if tensor.is_floating_point()):
        raise DivergedError(
            f"training diverged: task {task + 1} left numbers that are not finite; lower the learning rate (lr)"
        )


class Capturing:
    """``step``, run as a CUDA graph for batches of repeated shapes."""

    def __init__(self, step: Callable[[Batch], Tensor], changed: Sequence[Tensor]):
        """``changed``: the tensors that a step changes."""
        self._step, self._changed = step, changed
        self._last: list[torch.Size] = []
        self._graph: CapturedStep[Tensor] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        shapes = [tensor.shape for tensor in batch]
        again, self._last = shapes == self._last, shapes
        if self._graph and self._graph.shapes == shapes:
            return self._graph(batch)
        if not again:
            return self._step(batch)
        self._graph = None  # frees its memory for the next one
        self._graph = CapturedStep(self._step, batch, self._changed)
        return self._graph(batch)


def row_batches(
    inputs: Tokens | Tensor, rows: Sequence[Tensor], batch_size: int, generator: torch.Generator
) -> Iterator[Batch]:
    """``inputs`` of N images and ``rows`` (N, ...) that go with them, in random order and in batches."""
    batches = torch.randperm(len(inputs), generator=generator).to(inputs.device).split(batch_size)
    if isinstance(inputs, Tokens):
        inputs.ahead(batches)
    for index in batches:
        yield inputs[index], *(row[index] for row in rows)


def shuffled_batches(count: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """A random order of 0..count-1 in batches of ``batch_size``; the last may be smaller."""
    return list(torch.randperm(count, generator=generator).split(batch_size))


def repeated_shuffles(count: int, length: int, generator: torch.Generator) -> Tensor:
    """``length`` draws from 0..count-1: a random order, and another once it is used up. (length,)"""
    rounds = math.ceil(length / count)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])[:length]


def paired_batches(
    count: int, size: int, replay_count: int, replay_size: int, generator: torch.Generator, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """A random order of 0..count-1 in batches (B,), each with ``replay_size`` draws from 0..replay_count-1 (see
    :func:`repeated_shuffles`), moved to the device at once. With nothing to replay the draws are empty."""
    own = torch.randperm(count, generator=generator).to(device).split(size)
    length = len(own) * replay_size if replay_count else 0
    drawn = repeated_shuffles(replay_count, length, generator) if length else torch.empty(0, dtype=torch.int64)
    drawn = drawn.to(device)
    return [(index, drawn[b * replay_size :][:replay_size]) for b, index in enumerate(own)]


def equal_batches(
    count: int, batch_size: int, generator: torch.Generator, device: torch.device, *, fill: bool
) -> list[tuple[Tensor, Tensor]]:
    """A random order of 0..count-1 in batches, moved to the device at once: [(index (B,), weight (B,)), ...].

    With ``fill`` the last batch is filled up to ``batch_size`` with images of weight 0 (a captured step needs equal
    shapes); without, all weights are 1.
    """
    order = torch.randperm(count, generator=generator)
    weight = torch.ones(count)
    missing = -count % batch_size if fill else 0
    if missing:
        order = torch.cat([order, order.repeat(math.ceil(missing / count))[:missing]])
        weight = torch.cat([weight, torch.zeros(missing)])
    order, weight = order.to(device), weight.to(device)
    return list(zip(order.split(batch_size), weight.split(batch_size), strict=True))
