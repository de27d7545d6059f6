"""Base class of multi-head methods with hard attention: tasks share adapters, each under its own masks.

The mechanism is HAT's (Serra et al., ICML 2018) applied to adapters, as in MORE; equation numbers are those of the MORE
paper, Section 3.4. Each task owns its masks, its copy of the norms and its head. When it ends, its masks are rounded to
exactly {0, 1} and block all later updates of what it uses.

With ``freeze_backbone=False`` the first task also trains the backbone. No mask protects it, so later tasks leave it as
it is; their norms start from those that were trained with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.config import SgdConfig, TrainingConfig
from morecl.methods import sharing
from morecl.methods.base import Learner, TaskData, count
from morecl.nn.adapter import Adapters, AdapterWeights
from morecl.nn.hard_attention import (
    EMBEDDING_BOUND,
    accumulated,
    annealed_s,
    attention,
    protection,
    regulariser,
    rounded,
    split,
)
from morecl.nn.heads import task_head
from morecl.nn.network import Norms
from morecl.nn.tokens import Tokens
from morecl.progress import Listener
from morecl.random import generator
from morecl.training import Batch, ProtectedSGD, repeated_shuffles

FOLDED_BYTES = 512 << 20  # kept between calls of adapters, of adapters side by side, and of heads: each at most this
SHARED_BYTES = 1 << 30  # of activations, in a pass that networks share on a GPU
OWN_PASS = {"cuda": 512}  # images from which on a network gets a pass of its own; elsewhere 32


class MaskedConfig(TrainingConfig):
    s_max: float = Field(400.0, gt=1, description="largest steepness of the attention (Eq. 8)")
    lamb: float = Field(0.75, ge=0, description="weight of the regulariser (Eq. 12)")


class ReplayConfig(MaskedConfig):
    memory_size: int = Field(200, ge=0, description="images in the replay memory, all classes together")
    memory_batch_size: int = Field(64, ge=1, description="replayed images that join each batch")

    def switched_off(self, *, further: bool = False) -> dict[str, str]:
        return {} if self.memory_size else {"memory_batch_size": "memory_size=0"}


class MaskedTask(nn.Module):
    """What one task owns: norms, attention embedding e (A, K + D) for A adapters, head (D -> outputs)."""

    def __init__(self, norms: Norms, shape: tuple[int, int], dim: int, outputs: int, init: torch.Generator):
        super().__init__()
        self.norms = norms
        self.embedding = nn.Parameter(torch.randn(shape, generator=init))
        self.head = task_head(dim, outputs, init)

    @property
    def mask(self) -> Tensor:
        """The finished task's mask a^k, exactly 0 or 1: (A, K + D)."""
        return rounded(self.embedding.detach())


class Together(NamedTuple):
    """Norms (2 n + 1, G, D) and adapters of G tasks, for one pass of G equal parts."""

    norms: tuple[Tensor, Tensor]
    adapters: AdapterWeights

    def take(self, groups: Tensor) -> Together:
        """Those of the tasks ``groups`` (B,), numbers on the device; a task may occur repeatedly."""
        weight, bias = (part.index_select(1, groups) for part in self.norms)
        w1, b1, w2, b2 = self.adapters
        w1, b1, w2, b2 = (part.index_select(1, groups) for part in (w1, b1, w2.mT, b2))  # w2 as it lies in memory
        return Together((weight, bias), AdapterWeights(w1, b1, w2.mT, b2))


class MaskedLearner(Learner):
    """A learner with one network per task. A subclass creates the task's part in ``_new_task``, chooses the batches
    that it is trained on, and brings the rule that joins the heads' outputs."""

    Config: ClassVar[type[SgdConfig]] = MaskedConfig
    config: MaskedConfig
    _in_training: MaskedTask | None = None  # its adapters still change

    def _new_task(self, norms: Norms, shape: tuple[int, int], classes: int, init: torch.Generator) -> MaskedTask:
        """The part that a task of ``classes`` classes owns."""
        return MaskedTask(norms, shape, self.network.dim, classes, init)

    # ---- structure --------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        adapters = self.network.new_adapters(self.config.bottleneck)
        adapters.initialise(generator(self.config.seed, "adapters"))
        parts = self._new_body() | {"adapters": adapters, "tasks": nn.ModuleList()}
        self.model = nn.ModuleDict(parts).to(self.device)

    def _grow(self, classes: int) -> None:
        init = generator(self.config.seed, "task", len(self.tasks))
        shape = (len(self.adapters.w1), self.config.bottleneck + self.network.dim)
        start = self.tasks[0].norms if self.body is not None and self.tasks else None
        net = self._new_task(self.network.new_norms(start), shape, classes, init).to(self.device)
        cast(nn.ModuleList, self.model["tasks"]).append(net)
        self._keep_body()

    @property
    def adapters(self) -> Adapters:
        return cast(Adapters, self.model["adapters"])

    @property
    def tasks(self) -> Sequence[MaskedTask]:
        """One :class:`MaskedTask` per task (an ``nn.ModuleList``)."""
        return cast("Sequence[MaskedTask]", self.model["tasks"])

    # ---- training ---------------------------------------------------------------------------------------------

    def _train(
        self,
        task: TaskData,
        batches: Callable[[int], Iterable[tuple[Tensor, Tensor, Tensor]]],
        steps: int,
        listener: Listener,
    ) -> None:
        """Minimise Eq. 13 (cross-entropy plus Eq. 12) over the newest task's norms, embedding and head, the part of the
        adapters that earlier tasks left free, and, in the first task, a backbone that is not frozen.

        Args:
            batches: ``batches(epoch)`` yields ``steps`` batches of tokens (B, L, D), targets (B,) and weights (B,) for
                the mean; see :meth:`_weighted_batches`.
        """
        config, net = self.config, self.tasks[-1]
        before = accumulated([t.mask for t in self.tasks[:-1]], net.embedding.detach())

        def annealed(epoch: int) -> Iterator[Batch]:
            values = [annealed_s(epoch * steps + b, steps, config.epochs, config.s_max) for b in range(steps)]
            for batch, s in zip(batches(epoch), torch.tensor(values, device=self.device).unbind(), strict=True):
                yield *batch, s

        def loss(x: Tensor, y: Tensor, weight: Tensor, s: Tensor) -> Tensor:
            a = attention(net.embedding, s, config.s_max)  # Eq. 8
            features = self._trunk(x, net.norms, self.adapters.weights(), self.body, masks=a)  # Eq. 9
            errors = F.cross_entropy(net.head(features), y, reduction="none")
            return (errors * weight).sum() / weight.sum() + regulariser(a, before, config.lamb)  # Eq. 13

        def bound() -> None:
            with torch.no_grad():
                net.embedding.clamp_(-EMBEDDING_BOUND, EMBEDDING_BOUND)

        guard = protection(*split(before, config.bottleneck))
        shared = [self.adapters.w1, self.adapters.b1, self.adapters.w2, self.adapters.b2]
        owned = [*net.norms.parameters(), net.embedding, *net.head.parameters(), *self._body_parameters()]
        optimizer = self._guarded_optimizer([*shared, *owned], guard)
        self._in_training = net
        try:
            self._fit(loss, annealed, task=task, listener=listener, optimizer=optimizer, after_step=bound)
        finally:
            self._in_training = None

    def _guarded_optimizer(self, parameters: Sequence[Tensor], gates: Sequence[Tensor]) -> ProtectedSGD:
        """For the main training of a task; ``gates`` of the first ``len(gates)`` parameters."""
        return ProtectedSGD(parameters, self.config.lr, self.config.momentum, gates=gates)

    # ---- features ---------------------------------------------------------------------------------------------

    def networks(self) -> list[str]:
        return [str(k) for k in range(len(self.tasks))]

    @torch.no_grad()
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        """Features h(x, k) under the rounded masks and the norms of task k."""
        net = self.tasks[int(network)]
        adapters = self._adapters_of(net)
        return self._in_batches(tokens, lambda x: self._trunk(x, net.norms, adapters, self.body))

    @torch.no_grad()
    def embed_all(self, tokens: Tokens) -> list[Tensor]:
        """A few images go through all networks in one pass, many images through one network after the other."""
        images, tasks = len(tokens), len(self.tasks)
        if images * tasks > self.eval_batch_size or tasks == 1 or images == 0:
            return super().embed_all(tokens)
        return list(self._in_one_pass(tokens.range(0, images), self._all_together()))

    def _all_together(self) -> Together:
        """What all tasks bring to one pass."""
        return self._kept("together", lambda: self._together(self.tasks), fits=self._together_bytes() <= FOLDED_BYTES)

    def _gathered(self, wanted: Tensor) -> Together:
        """What the tasks ``wanted`` (G,) bring to one pass of G groups; a task may occur repeatedly."""
        if self._together_bytes() <= FOLDED_BYTES:
            return self._all_together().take(wanted.to(self.device))
        present, places = wanted.unique(return_inverse=True)
        return self._together([self.tasks[k] for k in present.tolist()]).take(places.to(self.device))

    def _together_bytes(self) -> int:
        """Upper bound on the bytes of all tasks' adapters, stacked for one pass."""
        return len(self.tasks) * count(self.adapters) * self.network.dtype.itemsize

    def _together(self, tasks: Sequence[MaskedTask]) -> Together:
        """What G tasks bring to one pass, in the precision of the network."""
        norms = [torch.stack([getattr(t.norms, name) for t in tasks], 1) for name in ("weight", "bias")]
        weight, bias, *adapters = (part.to(self.network.dtype) for part in (*norms, *self._folded(tasks)))
        return Together((weight, bias), AdapterWeights(*adapters))

    def _in_one_pass(self, x: Tensor, together: Together, *, patches: bool = False) -> Tensor:
        """Features (G, N, D) of N images under G networks, from their :meth:`AdaptedViT.prefix` (N, ...); with
        ``patches`` (G, N, 2 D), see :meth:`AdaptedViT.trunk`."""
        groups = together.norms[0].shape[1]
        repeated = x.expand(groups, *x.shape).flatten(0, 1)
        return self.network.trunk(repeated, *together, self.body, patches=patches).unflatten(0, (groups, -1))

    @torch.no_grad()
    def embed_rows(self, tokens: Tokens, rows: Tensor, networks: Tensor) -> Tensor:
        """Features (B, D) of the images ``rows`` (B,), the i-th under the network of task ``networks[i]`` (B,).

        Networks that many images want get a pass of their own. The others share passes: the images of each are cut
        into groups of one size, the last one filled up, and every group brings its norms and adapters.
        """
        found = torch.empty(len(rows), self.network.dim, device=self.device)
        order = networks.argsort(stable=True)
        counts = torch.bincount(networks, minlength=len(self.tasks)).tolist()
        few = [n < OWN_PASS.get(self.device.type, 32) for n in counts]
        for k, places in enumerate(order.split(counts)):
            if not few[k]:
                found[places] = self.embed(tokens.take(rows[places]), str(k))
        for shared in sharing.for_passes(counts, few, self._shared_pass()):
            images, true = shared.images.to(self.device), shared.true.to(self.device)
            places = order[images.flatten()]
            features = self._trunk(tokens[rows[places]], *self._gathered(shared.networks), self.body)
            found[places[true]] = features[true]
        return found

    def _shared_pass(self) -> int:
        """Images in a pass that networks share. A GPU is done with ``eval_batch_size`` of a small network before the
        host has launched the next pass, so there are as many as memory allows, unless the user has set a limit."""
        if self.device.type != "cuda" or self.config.eval_batch_size is not None:
            return self.eval_batch_size
        activations = 12 * self.network.prefix_bytes  # of an image: what an MLP holds at the same time
        return max(self.eval_batch_size, SHARED_BYTES // activations)

    def _heads(self) -> list[Callable[[Tensor], Tensor]]:
        """The head of each task's network."""
        return [net.head for net in self.tasks]

    def _adapters_of(self, net: MaskedTask) -> AdapterWeights:
        """Folded, and kept until more is learned if there is room."""
        kept: dict[MaskedTask, AdapterWeights] = self._derived.setdefault("folded", {})
        if net in kept:
            return kept[net]
        folded = AdapterWeights(*(part[:, 0] for part in self._folded([net])))
        size = sum(part.nbytes for weights in (folded, *kept.values()) for part in weights)
        if net is not self._in_training and size <= FOLDED_BYTES:
            kept[net] = folded
        return folded

    def _folded(self, tasks: Sequence[MaskedTask]) -> AdapterWeights:
        return self.adapters.folded([split(t.mask, self.config.bottleneck) for t in tasks])

    # ---- inspection -------------------------------------------------------------------------------------------

    def masks(self, task: int) -> dict[str, NDArray[np.float32]]:
        """The task's rounded masks: ``blocks.0.attn.m1`` (K,), ``blocks.0.attn.m2`` (D,), ``blocks.0.mlp.m1``, ..."""
        m1, m2 = split(self._task(task).mask.cpu(), self.config.bottleneck)
        places = [f"blocks.{i}.{branch}" for i in range(self.network.depth) for branch in ("attn", "mlp")]
        both = {"m1": m1, "m2": m2}
        return {f"{place}.{name}": both[name][i].numpy() for i, place in enumerate(places) for name in both}

    def capacity(self) -> float | None:
        return float(100 * accumulated([t.mask for t in self.tasks], torch.zeros(1)).mean())

    def entries(self) -> dict[str, int]:
        return super().entries() | {
            "adapters": count(self.adapters),
            "norms": count(*(net.norms for net in self.tasks)),
            "embeddings": sum(net.embedding.numel() for net in self.tasks),
            "heads": count(*(net.head for net in self.tasks)),
        }

    def _task(self, task: int) -> MaskedTask:
        if not 0 <= task < len(self.tasks):
            raise ValueError(f"there is no task {task}; {len(self.tasks)} learned so far")
        return self.tasks[task]


class ReplayLearner(MaskedLearner):
    """A learner with one network per task, each trained on its task's images and on those in memory."""

    Config: ClassVar[type[SgdConfig]] = ReplayConfig
    config: ReplayConfig

    def _train_with_memory(
        self, task: TaskData, tokens: Tokens, targets: Tensor, replayed: Tensor, listener: Listener
    ) -> None:
        """Minimise Eq. 13 on batches of ``batch_size`` images of the task and ``memory_batch_size`` replayed ones.

        Args:
            tokens: of the task's images.
            targets: outputs of the newest head that stand for the task's images, (N,).
            replayed: the same for the images in memory, (M,).
        """
        config = self.config
        replay = self.prepare(self.memory.images) if len(self.memory) else None
        targets, replayed = targets.to(self.device), replayed.to(self.device)
        steps = -(-len(tokens) // config.batch_size)

        def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            draw = generator(config.seed, "epoch", task.index, epoch)
            own = self._weighted_batches(len(tokens), config.batch_size, draw)
            shown = self._shown(tokens, task, epoch)
            shown.ahead([index for index, _ in own])
            if replay is None:
                yield from ((shown[index], targets[index], weight) for index, weight in own)
                return
            again = self._shown(replay, task, epoch, "replay")
            drawn = repeated_shuffles(len(replay), steps * config.memory_batch_size, draw).to(self.device)
            for b, (index, weight) in enumerate(own):
                other = drawn[b * config.memory_batch_size :][: config.memory_batch_size]
                # the last batch of an epoch may be smaller; its replayed part counts for as much less
                share = min(1.0, (len(tokens) - b * config.batch_size) / config.batch_size)
                yield (
                    torch.cat([shown[index], again[other]]),
                    torch.cat([targets[index], replayed[other]]),
                    torch.cat([weight, torch.full_like(other, share, dtype=weight.dtype)]),
                )

        self._train(task, batches, steps, listener)

    def _balanced_sample(self, task: TaskData, draw: torch.Generator) -> Tensor:
        """Indices of random images of the task, of each class as many as the memory holds of one."""
        most = int(np.bincount(self.memory.columns).max())
        order = torch.randperm(len(task.images), generator=draw)
        return torch.cat([order[task.targets[order] == c][:most] for c in range(task.classes)])
