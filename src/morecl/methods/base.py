"""The base class of all methods.

Who calls what, in which order:

- ``learn_task`` (the user) checks the input, calls ``_grow`` to make room for the task, ``_learn`` to train it, and
  then ``rule.fit``. If anything goes wrong in there, an interruption included, the learner is put back to what it was.
- ``predict`` and ``scores`` (the user) and the evaluator all take the same path: ``networks`` names the networks whose
  features are needed, ``embed`` computes them, ``score`` turns them into one number per class. A network keeps its name
  while its features are unchanged, so the name is a safe cache key.
- ``add_examples``, ``forget``, ``rename`` and ``configure`` (the user) change a learner between tasks, all or nothing
  like ``learn_task`` (:mod:`morecl.methods.between_tasks`). The first two call ``_add_examples`` and ``_forget``, which
  not every method has.
- ``state`` and ``restore`` (checkpoints, and the methods above when they fail) take and put back all that was learned.
- ``adopt`` and ``fit_rule`` (rescoring) put another rule on networks that are already trained.

A method consists of networks and a rule. The networks are its own: ``_reset``, ``_grow``, ``_learn``, ``networks`` and
``embed``. The rule turns their features into scores (:mod:`morecl.scoring`): ``_new_rule``. How to train is in
:mod:`morecl.methods.tools`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from morecl.config import LearnerConfig, Role, SgdConfig
from morecl.errors import InputError
from morecl.images import ImageArray, as_images
from morecl.labels import Forgotten
from morecl.memory import ReplayMemory
from morecl.methods.between_tasks import BetweenTasks, State
from morecl.methods.tools import count
from morecl.nn.backbone import Backbone, load_backbone
from morecl.nn.capture import SIZES, Replayed, filled_up
from morecl.nn.device import resolve_compile, resolve_device, resolve_precision
from morecl.nn.network import AdaptedViT
from morecl.nn.preprocess import Preprocess
from morecl.nn.tokens import Tokens
from morecl.pictures import Pictures
from morecl.prediction import Chunk, OnError, Prediction, chunks
from morecl.progress import Listener, silent
from morecl.scoring import Features, LearnedTask, Output, Rule, by_network
from morecl.task import TaskData, read_task, refuse_known, task_data
from morecl.training import require_finite

__all__ = ["Learner", "Output", "Prediction", "TaskData", "count"]

Kept = TypeVar("Kept")

EVAL_BATCH_SIZE = {"cuda": 500}  # elsewhere 128
CHECKED_IMAGES = 32  # of each learned task, whose features and scores must be finite

# Every record has these keys, 0 where a method has no such part.
SECONDS = ("train", "back_update")
ENTRIES = ("backbone", "adapters", "norms", "embeddings", "heads", "statistics")

NOT_TRAINED: tuple[Role, ...] = ("scoring", "machine", "weights")  # roles of settings that do not affect training


class Learner(BetweenTasks, ABC):
    """An image classifier that learns new classes, task after task. See the module's text for the order of calls."""

    name: ClassVar[str]
    trained_as: ClassVar[str]  # the method that trains such networks: its own name if not set
    Config: ClassVar[type[SgdConfig]]
    keeps_all: ClassVar[bool] = False  # every image that was learned (``ReplayMemory.keep``), in memory or not

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls) and "trained_as" not in vars(cls):
            cls.trained_as = cls.name

    def __init__(self, config: LearnerConfig, backbone: Backbone | None = None):
        if not isinstance(config, self.Config):
            raise TypeError(f"{self.name} needs a {self.Config.__name__}, not a {type(config).__name__}")
        self.config = config
        self.device = resolve_device(config.device)
        self.dtype = resolve_precision(config.precision, self.device)
        self.compiled = resolve_compile(config.compile, self.device)
        self.captured = config.compile != "off" and self.device.type == "cuda"
        self.eval_batch_size = config.eval_batch_size or EVAL_BATCH_SIZE.get(self.device.type, 128)
        self.backbone = backbone or load_backbone(
            config.backbone, image_size=config.image_size, pretrained=config.pretrained, seed=config.seed
        )
        self.backbone.vit.to(self.device)
        self.preprocess = Preprocess(self.backbone.input, self.device)
        self.classes: list[Hashable] = []
        self.task_sizes: list[int] = []
        self.seconds = dict.fromkeys(SECONDS, 0.0)
        self.checked_images = CHECKED_IMAGES
        self._derived: dict[str, Any] = {}  # computed from what was learned; dropped when that changes
        self.memory = ReplayMemory(self.memory_size, self.classes, self.backbone.input.resize)
        self.network = AdaptedViT(self.backbone.vit, self.dtype, frozen=config.freeze_backbone, kernels=self.compiled)
        self.model = nn.ModuleDict()
        self._reset()
        self.rule = self._new_rule().to(self.device)

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
    def _new_rule(self) -> Rule:
        """The rule that turns features into scores, as before the first task."""

    @abstractmethod
    def networks(self) -> list[str]:
        """Names of the networks whose features :meth:`score` needs, in that order."""

    @abstractmethod
    def embed(self, tokens: Tokens, network: str) -> Tensor:
        """Features of all images under ``network``: (N, D) float32 on the device."""

    def embed_all(self, tokens: Tokens) -> list[Tensor]:
        """Features under each of :meth:`networks`; methods that can compute all at once override this."""
        return [self.embed(tokens, network) for network in self.networks()]

    def embed_rows(self, tokens: Tokens, rows: Tensor, networks: Tensor) -> Tensor:
        """Features (B, D) of the images ``rows`` (B,), the i-th under ``self.networks()[networks[i]]``; ``networks``
        (B,) ascend. Methods that can let networks share a pass override this."""
        wanted = zip(self.networks(), by_network(networks, rows), strict=False)
        return torch.cat([self.embed(tokens.take(mine), network) for network, mine in wanted if len(mine)])

    def _for_few(self, count: int) -> Callable[[Tensor], Output] | None:
        """A function that answers for ``count`` images (uint8, on the device) without synchronising with the device, so
        that it can be captured as a CUDA graph; ``None`` if the method has none."""
        return None

    def entries(self) -> dict[str, int]:
        """Numbers kept, by part, without the replay memory and what is derived from others. A method adds its own."""
        frozen = sum(value.numel() for value in self.backbone.state.values())
        parts = {
            "backbone": frozen if self.body is None else count(self.body),
            "statistics": sum(v.numel() for name, v in self.rule.state_dict().items() if name not in self.rule.derived),
        }
        return dict.fromkeys(ENTRIES, 0) | parts

    def buffer_entries(self) -> int:
        """Numbers in the images that are kept, of one byte each, and in what is stored with them."""
        return int(self.memory.images.nbytes) + sum(rows.size for rows in self.memory.extras.values())

    # ---- what a user calls ------------------------------------------------------------------------------------

    def learn_task(self, images: Any, labels: Any = None, listener: Listener = silent) -> None:
        """Learn new classes.

        Args:
            images: uint8 (N, H, W, 3) or (N, H, W); or a list or an iterator of PIL images, paths or single arrays; or,
                without ``labels``, the path of a folder with one sub-folder of images per class.
            labels: N labels, none of which has been learned before: text, numbers, true/false, or tuples of these.
                1, 1.0 and ``True`` are equal in Python, so only one of them can be a class.
            listener: called after each epoch.

        Raises:
            TypeError, ValueError: the input is not usable. The learner is unchanged.
            DivergedError: training produced numbers that are not finite. The learner is as before the task.
        """
        self._compile_ahead()
        array, names = read_task(images, labels, self.backbone.input.resize)
        refuse_known(names, self.classes)
        new = list(dict.fromkeys(names))
        task = task_data(array, names, new, len(self.task_sizes), len(self.classes))
        with self._all_or_nothing(task.index):
            self.classes.extend(new)
            self.task_sizes.append(len(new))
            self._grow(len(new))
            self.rule.grow(len(new))
            self._learn(task, listener)
            self._derived.clear()
            self._fit_rule(task)
            self._require_finite(task)

    def predict(self, images: Any, *, on_error: OnError = "raise") -> Prediction:
        """The most likely class of each image, and how little the image looks like anything learned.

        Args:
            images: uint8 (N, H, W, 3) or (N, H, W); or a list or iterator of PIL images, paths or single arrays. They
                are opened and processed in chunks, so memory does not grow with their number.
            on_error: what to do about an image of a list or an iterator that cannot be read: ``"raise"`` an error that
                names it, or ``"skip"`` it with a warning; its label is then ``None``, its confidence NaN.
        """
        parts = [self._answer(chunk, output) for chunk, output in self._outputs(images, on_error)]
        return Prediction(
            labels=[label for part in parts for label in part.labels],
            confidence=np.concatenate([part.confidence for part in parts]),
            ood_score=np.concatenate([part.ood_score for part in parts]),
            task=np.concatenate([part.task for part in parts]),
        )

    def scores(self, images: Any) -> NDArray[np.float64]:
        """(N, classes seen), columns in the order of ``classes``; the largest wins. ``images``: see :meth:`predict`."""
        return np.concatenate([output.scores.double().cpu().numpy() for _, output in self._outputs(images)])

    def features(self, images: Any, task: int = 0) -> NDArray[np.float32]:
        """(N, D): features under the network of ``task`` (0-based); a method with one network has task 0 only."""
        names = self.networks()
        if not 0 <= task < len(names):
            raise ValueError(f"there is no network of task {task}; {len(names)} learned so far")
        parts = [self.embed(self.prepare(chunk.images), names[task]) for chunk in self._chunks(images)]
        return np.concatenate([part.float().cpu().numpy() for part in parts])

    def save(self, folder: Any, *, include_backbone: bool = True) -> None:
        """Write a folder from which :func:`morecl.load` rebuilds this learner without any data set."""
        from morecl.checkpoint import save

        save(self, folder, include_backbone=include_backbone)

    # ---- what the evaluator and the checkpoint call -----------------------------------------------------------

    def prepare(self, images: Any) -> Tokens:
        """Images on the device, ready for :meth:`embed`."""
        return Tokens(self.network, self.preprocess, as_images(images, self.backbone.input.resize))

    @torch.no_grad()
    def score(self, features: Sequence[Tensor]) -> Output:
        """Scores from the features of :meth:`networks`."""
        return self.rule.score(features)

    @torch.no_grad()
    def answer(self, features: Features) -> Output:
        """Scores of the images whose ``features`` these are."""
        return self.rule.answer(features)

    def output(self, images: ImageArray, *, one_pass: bool = True) -> Output:
        """Scores of images (N, H, W, 3), on any device. ``one_pass``: see :class:`Features`."""
        run = self._for_few(filled_up(len(images))) if one_pass and self._replays(len(images)) else None
        if run is None:
            return self.answer(Features(self, self.prepare(images), one_pass=one_pass))
        replayed = self._derived.setdefault("replayed", Replayed(self.device))
        return Output.unpacked(replayed(lambda x: run(x).packed(), images))

    def task_of_column(self) -> NDArray[np.int64]:
        """The task of each class, in the order of ``classes``."""
        return np.repeat(np.arange(len(self.task_sizes)), self.task_sizes)

    def state(self) -> dict[str, Tensor]:
        """Everything learned except ``memory.unread``, as tensors by name (not copies)."""
        parts = {"model": self.model.state_dict(), "rule": self.rule.state_dict(), "memory": self.memory.state()}
        return {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}

    def restore(
        self, classes: Sequence[Hashable], task_sizes: Sequence[int], state: State, unread: Pictures | None = None
    ) -> None:
        """Become the learner whose :meth:`state` and ``memory.unread`` these are."""
        self._restore_networks(classes, task_sizes, state, unread)
        self.rule = self._rebuilt_rule(task_sizes, _part(state, "rule."))

    @property
    def memory_size(self) -> int:
        """Images the replay memory may hold; 0 for methods without one."""
        return int(getattr(self.config, "memory_size", 0))

    def capacity(self) -> float | None:
        """Percentage of what can be protected that finished tasks have taken; ``None`` without such protection."""
        return None

    # ---- another rule on the same networks --------------------------------------------------------------------

    @classmethod
    def adopt(cls, trained: Learner, config: LearnerConfig, before: Learner | None = None) -> Self:
        """A learner of this class with the networks and the memory of ``trained``, bit for bit.

        The rule is as before the newest task of ``trained``: call :meth:`fit_rule` with that task's images to finish it
        (a rule without state needs no such call). To rescore a run, adopt the learner after each of its tasks in turn.

        Args:
            trained: a learner whose networks are trained as this class's are (``trained_as``).
            config: may differ from that of ``trained`` in settings that only change scoring (role ``scoring``), the
                machine or the place of the backbone.
            before: this method after one task less, whose rule's state is carried over. Needed from the second task on
                if the rule has state.

        Raises:
            InputError: ``trained``, ``config`` or ``before`` do not go together.
        """
        if cls.trained_as != trained.trained_as:
            raise InputError(
                f"method {cls.name!r} uses networks that {cls.trained_as!r} trains; these are of {trained.trained_as!r}"
            )
        cls._refuse_other_training(trained.config, config)
        if any(isinstance(label, Forgotten) for label in trained.classes):
            raise InputError("a learner that has forgotten classes cannot be scored by another rule")
        learner = cls(config, trained.backbone)
        state = {key: value.clone() for key, value in trained.state().items()}
        learner._restore_networks(trained.classes, trained.task_sizes, state, trained.memory.unread)
        learner.seconds = dict(trained.seconds)
        if not trained.task_sizes:
            return learner
        *earlier, newest = trained.task_sizes
        if before is not None and (type(before) is not cls or before.classes != trained.classes[: sum(earlier)]):
            raise InputError(f"'before' must be a learner of method {cls.name!r} after one task less")
        learner.rule = learner._rebuilt_rule(earlier, before.rule.state_dict() if before else None)
        learner.rule.grow(newest)
        if before is None and earlier and learner.rule.is_fitted():
            raise InputError(f"the rule of {cls.name!r} takes in one task after the other: start from the first task")
        return learner

    def fit_rule(self, images: Any, labels: Any) -> None:
        """Fit the rule of an adopted learner to its newest task, whose ``images`` and ``labels`` these are."""
        array, names = read_task(images, labels, self.backbone.input.resize)
        size = self.task_sizes[-1] if self.task_sizes else 0
        new = self.classes[len(self.classes) - size :]
        if set(names) != set(new):
            raise InputError(f"these are not the images of the newest task, whose classes are {new}")
        self._fit_rule(task_data(array, names, new, len(self.task_sizes) - 1, len(self.classes) - size))
        self._derived.clear()

    @classmethod
    def adopted_config(cls, trained: Learner, settings: Mapping[str, Any]) -> SgdConfig:
        """The config for :meth:`adopt`: that of ``trained``, changed by ``settings``.

        Settings of scoring are taken over from ``trained`` only if it is of the same method.
        """
        taken = trained.config.model_dump()
        scoring = type(trained.config).with_role("scoring") if cls.name != trained.name else frozenset[str]()
        kept = (cls.Config.model_fields.keys() & taken.keys()) - scoring
        return cls.Config.parse({key: taken[key] for key in kept} | dict(settings))

    @classmethod
    def _refuse_other_training(cls, trained: LearnerConfig, config: LearnerConfig) -> None:
        free = cls.Config.with_role(*NOT_TRAINED) | type(trained).with_role(*NOT_TRAINED)
        one, other = trained.model_dump(), config.model_dump()
        if differing := sorted(key for key in (one.keys() | other.keys()) - free if one.get(key) != other.get(key)):
            values = ", ".join(f"{key}={other.get(key)!r} instead of {one.get(key)!r}" for key in differing)
            raise InputError(f"the networks were trained with other settings: {values}")

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _kept(self, name: str, make: Callable[[], Kept], *, fits: bool) -> Kept:
        """What ``make`` computes from what was learned: once if it ``fits``, until that changes."""
        if self._changing or not fits:
            return make()
        found = self._derived.get(name)
        if found is None:
            found = self._derived.setdefault(name, make())  # another thread may have been first: all use the same
        return cast(Kept, found)

    def _restore_networks(
        self, classes: Sequence[Hashable], task_sizes: Sequence[int], state: State, unread: Pictures | None
    ) -> None:
        self._derived.clear()
        self.classes[:] = classes
        self.task_sizes[:] = []
        self._reset()
        for size in task_sizes:
            self.task_sizes.append(size)
            self._grow(size)
        self.model.load_state_dict(_part(state, "model."))
        self.memory.restore(_part(state, "memory."), unread)

    def _rebuilt_rule(self, task_sizes: Sequence[int], state: dict[str, Tensor] | None) -> Rule:
        """A new rule with room for these tasks, and with ``state`` if it is given."""
        rule = self._new_rule().to(self.device)
        for size in task_sizes:
            rule.grow(size)
        if state is not None:
            rule.load_state_dict(state)
        return rule

    def _fit_rule(self, task: TaskData) -> None:
        with self._clock("train"), torch.no_grad():
            self.rule.fit(LearnedTask(self, task))

    def _require_finite(self, task: TaskData) -> None:
        """Raise :class:`DivergedError` if anything learned is not finite, or features and scores of some images."""
        require_finite(task.index, self.state().values())
        if not self.checked_images:
            return
        index = np.linspace(0, len(task.images) - 1, min(len(task.images), self.checked_images)).astype(np.int64)
        output = self.answer(Features(self, self.prepare(task.images[index]), one_pass=False))
        require_finite(task.index, vars(output).values())

    def _chunks(self, images: Any, on_error: OnError = "raise") -> Iterator[Chunk]:
        return chunks(images, self.eval_batch_size, self.backbone.input.resize, on_error)

    def _outputs(self, images: Any, on_error: OnError = "raise") -> Iterator[tuple[Chunk, Output]]:
        if not self.task_sizes:
            raise InputError("nothing has been learned yet: call learn_task first")
        for chunk in self._chunks(images, on_error):
            yield chunk, self.output(chunk.images, one_pass=chunk.first == 0)

    def _replays(self, count: int) -> bool:
        """Whether answers for so many images may come from a CUDA graph; not while anything changes or is observed."""
        return self.captured and 0 < count <= max(SIZES) and not self._changing and not self.network.is_observed

    def _answer(self, chunk: Chunk, output: Output) -> Prediction:
        labels: list[Any] = [None] * chunk.count
        confidence, ood_score = np.full(chunk.count, np.nan), np.full(chunk.count, np.nan)
        task = np.full(chunk.count, -1, np.int64)
        if len(chunk.readable):
            chosen = output.scores.argmax(1)
            columns = chosen.cpu().numpy()
            for position, column in zip(chunk.readable.tolist(), columns.tolist(), strict=True):
                labels[position] = self.classes[column]
            confidence[chunk.readable] = output.probabilities.gather(1, chosen[:, None])[:, 0].double().cpu().numpy()
            ood_score[chunk.readable] = (-output.known).double().cpu().numpy()
            task[chunk.readable] = self.task_of_column()[columns]
        return Prediction(labels, confidence, ood_score, task)


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
