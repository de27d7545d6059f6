"""What a method is: the base class, and the objects that go in and come out.

Who calls what, in which order:

- ``learn_task`` (the user) checks the input, calls ``_grow`` to make room for the task and ``_learn`` to learn it. If
  anything goes wrong in there, interruption included, the learner is put back to what it was before.
- ``predict`` and ``scores`` (the user) and the evaluator all go the same way: ``networks`` names the networks whose
  features are needed, ``embed`` computes them, ``score`` turns them into one number per class. The name of a network
  stays the same exactly as long as its features do, so whoever keeps features by that name never computes twice.
- ``state`` and ``restore`` (checkpoint, and ``learn_task`` when it fails) take and put back all that was learned.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from morecl.config import LearnerConfig, SgdConfig
from morecl.errors import InputError
from morecl.images import ImageArray, as_array
from morecl.memory import ReplayMemory
from morecl.nn.adapter import AdapterWeights
from morecl.nn.backbone import Backbone, load_backbone
from morecl.nn.device import resolve_compile, resolve_device, resolve_precision
from morecl.nn.network import AdaptedViT, Norms
from morecl.nn.preprocess import Preprocess
from morecl.nn.tokens import Tokens
from morecl.progress import Listener, silent
from morecl.random import generator
from morecl.training import Batch, Capturing, ProtectedSGD, equal_batches, fit, row_batches

EVAL_BATCH_SIZE = {"cuda": 500}  # elsewhere 128

NormWeights = Norms | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TaskData:
    """A task as a method gets it. Tensors are on the CPU."""

    index: int  # 0-based
    images: ImageArray  # uint8 (N, H, W, 3)
    targets: Tensor  # (N,) the class of each image, counted within the task: 0..classes-1
    classes: int
    first_column: int  # position of the task's first class among all classes seen

    @property
    def columns(self) -> Tensor:
        """(N,) the class of each image, counted over all tasks: its position in ``learner.classes``."""
        return self.first_column + self.targets


@dataclass(frozen=True)
class Output:
    """What a method says of N images; columns in the order of ``learner.classes``."""

    scores: Tensor  # (N, C) the largest wins
    probabilities: Tensor  # (N, C) in [0, 1]: confidence in each class
    known: Tensor  # (N,) the higher, the better known; its negative is the OOD score


@dataclass(frozen=True)
class Prediction:
    """Answers for N images. ``ood_score``: higher = less known, everywhere in this package."""

    labels: list[Any]
    confidence: NDArray[np.float64]
    ood_score: NDArray[np.float64]
    task: NDArray[np.int64]


class Learner(ABC):
    """An image classifier that is taught new classes, task after task. See the module's text for the order of calls."""

    name: ClassVar[str]
    Config: ClassVar[type[SgdConfig]]

    def __init__(self, config: LearnerConfig, backbone: Backbone | None = None):
        if not isinstance(config, self.Config):
            raise TypeError(f"{self.name} needs a {self.Config.__name__}, not a {type(config).__name__}")
        self.config = config
        self.device = resolve_device(config.device)
        self.dtype = resolve_precision(config.precision, self.device)
        self.compiled = resolve_compile(config.compile, self.device)
        self.captured = config.compile != "off" and self.device.type == "cuda"  # training steps as CUDA graphs
        self.eval_batch_size = config.eval_batch_size or EVAL_BATCH_SIZE.get(self.device.type, 128)
        self.backbone = backbone or load_backbone(
            config.backbone, image_size=config.image_size, pretrained=config.pretrained, seed=config.seed
        )
        self.backbone.vit.to(self.device)
        self.preprocess = Preprocess(self.backbone.input, self.device)
        self.classes: list[Hashable] = []
        self.task_sizes: list[int] = []
        self.seconds: dict[str, float] = {"train": 0.0, "back_update": 0.0}
        self._derived: dict[str, Any] = {}  # what methods compute from what was learned; dropped when that changes
        self.memory = ReplayMemory(self.memory_size, self.classes, self.backbone.input.resize)
        self.network = AdaptedViT(self.backbone.vit, self.dtype, frozen=config.freeze_backbone, kernels=self.compiled)
        self.model = nn.ModuleDict()  # all that is learned, but for the memory
        self._reset()

    # ---- what a method provides -------------------------------------------------------------------------------

    @abstractmethod
    def _reset(self) -> None:
        """Put ``self.model`` into its form before the first task."""

    @abstractmethod
    def _grow(self, classes: int) -> None:
        """Make room for one more task of ``classes`` classes. Also called when a saved learner is rebuilt."""

    @abstractmethod
    def _learn(self, task: TaskData, listener: Listener) -> None:
        """Learn ``task``, for which room has been made."""

    @abstractmethod
    def networks(self) -> list[str]:
        """Names of the networks whose features :meth:`score` wants, in that order."""

    @abstractmethod
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        """Features of all images under ``network``: (N, D) float32 on the device."""

    def embed_all(self, tokens: Tokens) -> list[Tensor]:
        """Features under each of :meth:`networks`; methods that can do all at once override this."""
        return [self.embed(tokens, network) for network in self.networks()]

    @abstractmethod
    def score(self, features: Sequence[Tensor]) -> Output:
        """From the features of :meth:`networks` to scores."""

    def entries(self) -> dict[str, int]:
        """Numbers kept, by part, without the replay memory. A method adds what it keeps to the backbone's."""
        parts = dict.fromkeys(("backbone", "adapters", "norms", "embeddings", "heads", "statistics"), 0)
        frozen = sum(value.numel() for value in self.backbone.state.values())
        return parts | {"backbone": frozen if self.body is None else count(self.body)}

    # ---- what a user calls ------------------------------------------------------------------------------------

    def learn_task(self, images: Any, labels: Any, listener: Listener = silent) -> None:
        """Learn new classes.

        Args:
            images: uint8 (N, H, W, 3) or (N, H, W); or a list of PIL images or paths.
            labels: N hashable labels, none of which has been learned before.
            listener: told after each epoch.

        Raises:
            TypeError, ValueError: the input is not usable. The learner is unchanged.
            DivergedError: the loss ran away. The learner is as before the task.
        """
        array, names = self._check_task(images, labels)
        new = list(dict.fromkeys(names))
        position = {name: i for i, name in enumerate(new)}
        task = TaskData(
            index=len(self.task_sizes),
            images=array,
            targets=torch.tensor([position[name] for name in names]),
            classes=len(new),
            first_column=len(self.classes),
        )
        before = {key: value.clone() for key, value in self.state().items()}
        classes, sizes, seconds = list(self.classes), list(self.task_sizes), dict(self.seconds)
        try:
            self.classes.extend(new)
            self.task_sizes.append(len(new))
            self._grow(len(new))
            self._learn(task, listener)
            self._derived.clear()
        except BaseException:
            self.restore(classes, sizes, before)
            self.seconds = seconds
            raise

    def predict(self, images: Any) -> Prediction:
        """The most likely class of each image, and how little the image looks like anything learned."""
        output = self._output(images)
        if not len(output.scores):
            return Prediction([], np.empty(0), np.empty(0), np.empty(0, np.int64))
        chosen = output.scores.argmax(1)
        return Prediction(
            labels=[self.classes[c] for c in chosen.tolist()],
            confidence=output.probabilities.gather(1, chosen[:, None])[:, 0].double().cpu().numpy(),
            ood_score=(-output.known).double().cpu().numpy(),
            task=self.task_of_column()[chosen.cpu().numpy()],
        )

    def scores(self, images: Any) -> NDArray[np.float64]:
        """(N, classes seen), columns in the order of ``classes``; the largest wins."""
        return self._output(images).scores.double().cpu().numpy()

    def features(self, images: Any, task: int = 0) -> NDArray[np.float32]:
        """(N, D): features under the network of ``task`` (0-based); a method with one network has task 0 only."""
        names = self.networks()
        if not 0 <= task < len(names):
            raise ValueError(f"there is no network of task {task}; {len(names)} learned so far")
        return self.embed(self.prepare(images), names[task]).float().cpu().numpy()

    def save(self, folder: Any, *, include_backbone: bool = True) -> None:
        """Write a folder from which :func:`morecl.load` rebuilds this learner without any data set."""
        from morecl.checkpoint import save

        save(self, folder, include_backbone=include_backbone)

    # ---- what the evaluator and the checkpoint call -----------------------------------------------------------

    def prepare(self, images: Any) -> Tokens:
        """Images on the device, ready for :meth:`embed`."""
        return Tokens(self.network, self.preprocess, as_array(images, self.backbone.input.resize))

    def task_of_column(self) -> NDArray[np.int64]:
        """The task of each class, in the order of ``classes``."""
        return np.repeat(np.arange(len(self.task_sizes)), self.task_sizes)

    def state(self) -> dict[str, Tensor]:
        """All that was learned, as tensors by name (not copies)."""
        state = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        return state | {f"memory.{key}": value for key, value in self.memory.state().items()}

    def restore(self, classes: Sequence[Hashable], task_sizes: Sequence[int], state: dict[str, Tensor]) -> None:
        """Become the learner whose :meth:`state` this is."""
        self._derived.clear()
        self.classes[:] = classes
        self.task_sizes[:] = []
        self._reset()
        for size in task_sizes:
            self.task_sizes.append(size)
            self._grow(size)
        self.model.load_state_dict(_part(state, "model."))
        self.memory.restore(_part(state, "memory."))

    @property
    def memory_size(self) -> int:
        """Images the replay memory may hold; 0 for methods without one."""
        return int(getattr(self.config, "memory_size", 0))

    def capacity(self) -> float | None:
        """Share of the maskable neurons that finished tasks have taken, percent; ``None`` without masks."""
        return None

    # ---- a backbone that is trained ---------------------------------------------------------------------------

    @property
    def body(self) -> VisionTransformer | None:
        """The trained copy of the backbone that all tasks share, without its norms; ``None`` where there is none."""
        return cast(VisionTransformer, self.model["backbone"]) if "backbone" in self.model else None

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

    # ---- helpers for training ---------------------------------------------------------------------------------
    # Compiled blocks, captured steps and batches of equal shape are chosen here and nowhere else.

    def _trunk(
        self,
        prefix: Tensor,
        norms: NormWeights | None = None,
        adapters: AdapterWeights | None = None,
        body: VisionTransformer | None = None,
    ) -> Tensor:
        """Features (B, D) of a batch of tokens, see :meth:`AdaptedViT.trunk`; with gradients if they are enabled.

        Training compiles whole batches. Smaller ones are not worth it, and compiling takes longer than an evaluation.
        """
        whole = torch.is_grad_enabled() and len(prefix) >= self.config.batch_size
        return self.network.trunk(prefix, norms, adapters, body, compiled=self.compiled and whole)

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
        after_backward: Callable[..., None] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        """Minimise ``loss(*batch)`` over the batches of ``batches(epoch)``. See :func:`morecl.training.fit`.

        Args:
            images: per epoch; those of the task if not given.
            optimizer, epochs: :meth:`_optimizer` and ``config.epochs`` if not given.
            stage: a name for anything but the main training of the task, see :class:`morecl.progress.EpochDone`.
        """
        fit(
            loss,
            batches,
            optimizer or self._optimizer(),
            epochs=epochs or self.config.epochs,
            task=task.index,
            images=len(task.images) if images is None else images,
            listener=listener,
            stage=stage,
            after_backward=after_backward,
            after_step=after_step,
            capture=self.captured,
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
            return row_batches(inputs, rows, self.config.batch_size, draw)

        self._fit(loss, batches, task=task, listener=listener, images=len(inputs), stage=stage, **options)

    def _weighted_batches(self, count: int, size: int, draw: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """A random order of 0..count-1 in batches: [(index (B,), weight (B,)), ...] on the device.

        The last batch may be filled up with images of weight 0, so a loss must be a weighted mean.
        """
        return equal_batches(count, size, draw, self.device, fill=self.captured)

    def _repeated(self, step: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """``step``, as fast as possible for many calls in a row. It must change nothing but return its result."""
        return Capturing(step, []) if self.captured else step

    # ---- other helpers ----------------------------------------------------------------------------------------

    def _output(self, images: Any) -> Output:
        if not self.task_sizes:
            raise InputError("nothing has been learned yet: call learn_task first")
        return self.score(self.embed_all(self.prepare(images)))

    @torch.no_grad()
    def _in_batches(self, tokens: Tokens, run: Callable[[Tensor], Tensor]) -> Tensor:
        """``run(tokens[...])`` over all images, ``eval_batch_size`` at a time: (N, D)."""
        parts = [torch.empty(0, self.network.dim, device=self.device)]
        for start in range(0, len(tokens), self.eval_batch_size):
            parts.append(run(tokens.range(start, start + self.eval_batch_size)))
        return torch.cat(parts)

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to ``self.seconds[stage]``."""
        started = time.perf_counter()
        try:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self.seconds[stage] += time.perf_counter() - started

    def _check_task(self, images: Any, labels: Any) -> tuple[ImageArray, list[Hashable]]:
        if isinstance(labels, Tensor | np.ndarray):
            if labels.ndim != 1:
                raise ValueError(f"labels must have one dimension, got shape {tuple(labels.shape)}")
            labels = labels.tolist()
        if isinstance(labels, str | bytes) or not isinstance(labels, Sequence):
            raise TypeError(f"labels must be a list or a one-dimensional array, got {type(labels).__name__}")
        names = [label.item() if isinstance(label, np.generic) else label for label in labels]
        for index, name in enumerate(names):
            try:
                hash(name)
            except TypeError as error:
                raise TypeError(f"label {index} is a {type(name).__name__}, which cannot be hashed") from error
            if name != name:
                raise ValueError(f"label {index} is not a number (NaN)")
        array = as_array(images, self.backbone.input.resize)
        if len(array) != len(names):
            raise ValueError(f"{len(array)} images but {len(names)} labels")
        if not names:
            raise ValueError("the task is empty: it has no images")
        seen = set(self.classes)
        again = [name for name in dict.fromkeys(names) if name in seen]
        if again:
            raise ValueError(
                f"already learned: {', '.join(map(repr, again[:5]))}{' ...' if len(again) > 5 else ''}; "
                "a task holds new classes only"
            )
        return array, names


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def count(*modules: nn.Module) -> int:
    """Parameters of all ``modules`` together."""
    return sum(p.numel() for module in modules for p in module.parameters())
