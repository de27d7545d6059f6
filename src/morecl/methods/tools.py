"""What method authors use to train: the network, the one training loop, a trainable backbone, a clock.

Compiled blocks, captured steps and batches of equal shape are chosen here and nowhere else: a method calls ``_fit`` (or
``_fit_rows``) with its loss and ``_trunk`` for its features. ``_trunk`` and ``_in_batches`` also divide the work where
several processes train together; all of them must call these alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from morecl.config import SgdConfig, TrainingConfig
from morecl.memory import ReplayMemory
from morecl.nn.adapter import AdapterWeights
from morecl.nn.families import ViT
from morecl.nn.network import AdaptedViT, Norms
from morecl.nn.tokens import Tokens
from morecl.parallel import Group, divided
from morecl.progress import Listener
from morecl.random import generator
from morecl.task import TaskData
from morecl.training import Batch, Capturing, ProtectedSGD, WholeEpoch, equal_batches, fit, row_batches

NormWeights = Norms | tuple[Tensor, Tensor]


class TrainingTools:
    """The part of a learner that its methods train with. The attributes are set by :class:`Learner`."""

    config: SgdConfig
    device: torch.device
    network: AdaptedViT
    model: nn.ModuleDict  # everything that is learned, except for the memory and the rule's state
    task_sizes: list[int]
    memory: ReplayMemory
    eval_batch_size: int
    compiled: bool  # blocks through torch.compile or our own kernels
    captured: bool  # training steps as CUDA graphs
    seconds: dict[str, float]
    group: Group | None = None  # the processes that train together, see :mod:`morecl.parallel`
    _is_part = False  # what goes through the network now is this rank's alone

    def join(self, group: Group | None) -> None:
        """Train together with the other ranks of ``group``, which hold the same learner and make the same calls."""
        self.group = group
        if group is not None:
            group.place(self.device)
            self.captured = False  # what travels between ranks is not part of a CUDA graph

    # ---- training ---------------------------------------------------------------------------------------------

    def _compile_ahead(self) -> None:
        """Begin to compile what training will need, if there is anything."""
        config = self.config
        if isinstance(config, TrainingConfig) and config.freeze_backbone:
            self.network.compile_ahead(config.batch_size, config.bottleneck)

    def _trunk(
        self,
        prefix: Tensor,
        norms: NormWeights | None = None,
        adapters: AdapterWeights | None = None,
        body: ViT | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Features (B, D) of a batch of tokens, see :meth:`AdaptedViT.trunk`; with gradients if they are enabled.

        Training compiles whole batches. Smaller ones are not worth it, and compiling takes longer than an evaluation.
        In a group every rank computes a part of the batch, unless the batch itself is one rank's part or its rows
        belong to several tasks.
        """
        whole = torch.is_grad_enabled() and len(prefix) >= self.config.batch_size
        several = isinstance(norms, tuple) and norms[0].dim() > 2
        if self.group is not None and not (self._is_part or several):
            if masks is not None and adapters is not None:
                adapters = adapters.under(masks)
            return self._divided_trunk(self.group, prefix, norms, adapters, body, compiled=self.compiled and whole)
        return self.network.trunk(prefix, norms, adapters, body, masks=masks, compiled=self.compiled and whole)

    def _divided_trunk(
        self,
        group: Group,
        prefix: Tensor,
        norms: NormWeights | None,
        adapters: AdapterWeights | None,
        body: ViT | None,
        *,
        compiled: bool,
    ) -> Tensor:
        """:meth:`AdaptedViT.trunk` with the rows divided among the ranks."""
        own = [] if norms is None else list(norms) if isinstance(norms, tuple) else [norms.weight, norms.bias]
        both = [*own, *(adapters or ())]
        whole = _Trunk(self.network, body, compiled)
        trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}  # of the body

        def run(rows: Tensor, weights: list[Tensor]) -> Tensor:
            norms = (weights[0], weights[1]) if own else None
            adapters = AdapterWeights(*weights[len(own) : len(both)]) if len(both) > len(own) else None
            state = dict(zip(trained, weights[len(both) :], strict=True))
            return cast(Tensor, functional_call(whole, state, (rows, norms, adapters)))

        return divided(group, run, prefix, [*both, *trained.values()])

    def _trained(self) -> list[Tensor]:
        """What the newest task trains."""
        return list(self.model.parameters())

    def _optimizer(self, trained: Sequence[Tensor] | None = None, rate: float = 1.0) -> ProtectedSGD:
        """For ``trained``, or all of :meth:`_trained`; ``rate`` is relative to ``config.lr``."""
        parameters = self._trained() if trained is None else trained
        return ProtectedSGD(parameters, rate * self.config.lr, self.config.momentum)

    def _fit(
        self,
        loss: Callable[..., Tensor],
        batches: Callable[[int], Iterable[Batch]],
        *,
        task: TaskData,
        listener: Listener,
        images: int | None = None,
        optimizer: ProtectedSGD | None = None,
        epochs: int | None = None,
        stage: str = "",
        speed: bool = True,
        after_backward: Callable[..., None] | None = None,
        after_step: Callable[[], None] | None = None,
        whole: WholeEpoch | None = None,
    ) -> None:
        """Minimise ``loss(*batch)`` over the batches of ``batches(epoch)``. See :func:`morecl.training.fit`.

        Args:
            images: per epoch; those of the task if not given.
            optimizer, epochs: :meth:`_optimizer` and ``config.epochs`` if not given.
            speed: report images per second; meaningless where features and not images are trained on.
            stage: a name for anything but the main training of the task, see :class:`morecl.progress.EpochDone`.
            whole: a kernel that takes all steps of an epoch, used where code is compiled and captured.
        """
        optimizer = optimizer or self._optimizer()
        if self.compiled:
            optimizer.use_kernel()
        fit(
            loss,
            batches,
            optimizer,
            epochs=epochs or self.config.epochs,
            task=task.index,
            images=(images or len(task.images)) if speed else None,
            listener=listener,
            stage=stage,
            after_backward=after_backward,
            after_step=after_step,
            capture=self.captured,
            whole=whole if self.captured and self.compiled else None,
        )

    def _fit_rows(
        self,
        loss: Callable[..., Tensor],
        inputs: Tokens | Tensor,
        rows: Sequence[Tensor],
        *,
        task: TaskData,
        listener: Listener,
        stage: str = "",
        **options: Any,
    ) -> None:
        """Minimise ``loss(inputs, *rows)`` over batches of N images, in a new random order in each epoch.

        Args:
            inputs: tokens of the images, or their features (N, D).
            rows: tensors (N, ...) with one row per image: columns, a teacher's outputs, weights.
            options: see :meth:`_fit`.
        """
        rows = [row.to(self.device) for row in rows]

        def batches(epoch: int) -> Iterator[Batch]:
            draw = generator(self.config.seed, stage or "epoch", task.index, epoch)
            shown = self._shown(inputs, task, epoch, stage) if isinstance(inputs, Tokens) else inputs
            return row_batches(shown, rows, self.config.batch_size, draw)

        self._fit(loss, batches, task=task, listener=listener, images=len(inputs), stage=stage, **options)

    def _shown(self, tokens: Tokens, task: TaskData, epoch: int, part: str = "") -> Tokens:
        """``tokens`` as an epoch of training sees them: with ``augment``, random crops of the images.

        ``part`` tells the images of one epoch apart that come from different ``tokens`` or stages.
        """
        if not self.config.augment:
            return tokens
        return tokens.augmented(generator(self.config.seed, "augment", part, task.index, epoch))

    def _weighted_batches(self, count: int, size: int, draw: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """A random order of 0..count-1 in batches: [(index (B,), weight (B,)), ...] on the device.

        The last batch may be filled up with images of weight 0, so a loss must be a weighted mean.
        """
        return equal_batches(count, size, draw, self.device, fill=self.captured)

    def _repeated(self, step: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """``step``, as fast as possible for many calls in a row. It must change nothing but return its result."""
        return Capturing(step, []) if self.captured else step

    # ---- a backbone that is trained ---------------------------------------------------------------------------

    @property
    def body(self) -> ViT | None:
        """The trained copy of the backbone that all tasks share, without its norms; ``None`` where there is none."""
        return cast(ViT, self.model["backbone"]) if "backbone" in self.model else None

    def _new_body(self) -> dict[str, nn.Module]:
        """What :meth:`_reset` puts into ``self.model`` for :attr:`body`: nothing if the backbone is frozen."""
        return {} if self.network.frozen else {"backbone": self.network.new_body()}

    def _keep_body(self) -> None:
        """Called in :meth:`_grow` by methods of which only the first task may train the backbone."""
        if self.body is not None:
            self.body.requires_grad_(len(self.task_sizes) == 1)

    def _body_parameters(self) -> list[nn.Parameter]:
        """What the newest task trains of :attr:`body`."""
        return [] if self.body is None else [p for p in self.body.parameters() if p.requires_grad]

    # ---- features and time ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _in_batches(self, tokens: Tokens, run: Callable[[Tensor], Tensor], width: int | None = None) -> Tensor:
        """``run(tokens[...])`` over all images, ``eval_batch_size`` at a time: (N, D), or (N, ``width``).

        In a group every rank computes some of the batches, of the same shapes as without one: the same bits.
        """
        count, size = len(tokens), self.eval_batch_size
        starts, group = range(0, count, size), self.group
        parts = [torch.empty(0, width or self.network.dim, device=self.device)]
        self._is_part = True
        try:
            for start in starts if group is None else starts[group.part(len(starts))]:
                parts.append(run(tokens.range(start, start + size)))
        finally:
            self._is_part = False
        found = torch.cat(parts)
        if group is None or len(starts) == 0:
            return found
        of_ranks = [starts[group.part(len(starts), rank)] for rank in range(group.size)]
        return group.gather(found, [min(mine.stop, count) - min(mine.start, count) for mine in of_ranks])

    def _remember(self, task: TaskData) -> None:
        """Have the balanced memory take in a random part of a learned task, see :meth:`ReplayMemory.update`."""
        self.memory.update(task.images, task.columns.numpy(), generator(self.config.seed, "memory", task.index))

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to ``self.seconds[stage]``."""
        started = time.perf_counter()
        try:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


class _Trunk(nn.Module):
    """The network with a ``body`` that :func:`torch.func.functional_call` can give other weights."""

    def __init__(self, network: AdaptedViT, body: ViT | None, compiled: bool):
        super().__init__()
        self.network, self.body, self.compiled = network, body, compiled

    def forward(self, prefix: Tensor, norms: NormWeights | None, adapters: AdapterWeights | None) -> Tensor:
        return self.network.trunk(prefix, norms, adapters, self.body, compiled=self.compiled)


def count(*modules: nn.Module) -> int:
    """Parameters of all ``modules`` together."""
    return sum(p.numel() for module in modules for p in module.parameters())
