"""What a user may change between tasks: further images, labels, fewer classes, settings. All or nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from morecl.config import LearnerConfig, SgdConfig
from morecl.errors import DivergedError, InputError, shortened
from morecl.labels import Forgotten
from morecl.memory import ReplayMemory
from morecl.methods.tools import TrainingTools
from morecl.nn.backbone import Backbone
from morecl.pictures import Pictures
from morecl.progress import Listener, silent
from morecl.random import generator
from morecl.task import TaskData, check_label, read_task, refuse_unknown, task_data

State = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """What a learner was at one moment; see :meth:`BetweenTasks.snapshot`."""

    classes: list[Hashable]
    task_sizes: list[int]
    state: State  # copies
    unread: Pictures | None
    memory_size: int
    config: SgdConfig
    seconds: dict[str, float]


class BetweenTasks(TrainingTools):
    """The part of a learner that changes it between tasks. The attributes are set by :class:`Learner`."""

    name: ClassVar[str]
    Config: ClassVar[type[SgdConfig]]
    backbone: Backbone
    classes: list[Hashable]
    memory: ReplayMemory
    _derived: dict[str, Any]
    _changing = False  # what is learned may be half done

    if TYPE_CHECKING:  # the learner's

        def state(self) -> dict[str, Tensor]: ...
        def restore(
            self, classes: Sequence[Hashable], task_sizes: Sequence[int], state: State, unread: Pictures | None = None
        ) -> None: ...
        def _require_finite(self, task: TaskData) -> None: ...
        @property
        def memory_size(self) -> int: ...

    # ---- what a method may provide ----------------------------------------------------------------------------

    def _add_examples(self, examples: TaskData, listener: Listener) -> None:
        """Take in further images of known classes, which ``examples`` holds as one task of all classes. Optional."""
        raise NotImplementedError

    def _forget(self, column: int) -> None:
        """Make a class no longer an answer. Its label and images in memory are taken away afterwards. Optional."""
        raise NotImplementedError

    # ---- what a user calls ------------------------------------------------------------------------------------

    @property
    def can_add_examples(self) -> bool:
        """Whether the method has :meth:`add_examples`."""
        return self._has("_add_examples")

    @property
    def can_forget(self) -> bool:
        """Whether the method has :meth:`forget`."""
        return self._has("_forget")

    def add_examples(self, images: Any, labels: Any = None, listener: Listener = silent) -> None:
        """Take in further images of classes that are known.

        The networks do not change. What is computed from images (class means, sums, heads, memory) becomes what it
        would be, or close to it, had these images been there when their classes were learned.

        Args:
            images, labels: as in :meth:`learn_task`, but all labels have been learned before.
            listener: called after each epoch of what is trained again.

        Raises:
            InputError: a label is unknown, or the method cannot do this. The learner is unchanged.
            TypeError, ValueError: the input is not usable. The learner is unchanged.
        """
        self._require("_add_examples", "take further images of known classes")
        array, names = read_task(images, labels, self.backbone.input.resize)
        refuse_unknown(names, self.classes)
        examples = task_data(array, names, self.classes, len(self.task_sizes) - 1, 0)
        with self._all_or_nothing(examples.index):
            self._add_examples(examples, listener)
            self._derived.clear()
            self._require_finite(examples)

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Give a class another label, which no other class has. Nothing else changes."""
        column, name = self._column(old), check_label(new)
        if name in (other for c, other in enumerate(self.classes) if c != column):
            raise InputError(f"cannot rename {old!r}: another class is called {name!r}")
        self.classes[column] = name

    def forget(self, label: Hashable) -> None:
        """Make a class no longer an answer. Its label may be learned again later, as a new class.

        Its images leave the memory, and what was summed or counted for it alone becomes zero. Scores of the other
        classes stay exactly as they are. That is why something remains: the networks as they were trained, the class's
        output in its task's head, which now means one more "none of these", its mean as one of the task's known places,
        and its part in sums over images of all classes. In ``classes`` a :class:`morecl.labels.Forgotten` takes its
        place, so that columns do not move.

        Raises:
            InputError: there is no such class, it is the last one, or the method cannot do this.
        """
        self._require("_forget", "forget a class")
        column = self._column(label)
        if sum(not isinstance(other, Forgotten) for other in self.classes) == 1:
            raise InputError(f"cannot forget {label!r}: it is the only class, and nothing would be left to answer")
        with self._all_or_nothing(len(self.task_sizes) - 1), torch.no_grad():
            self._forget(column)
            self._derived.clear()
            self.memory.drop(column)
            self.classes[column] = Forgotten(column)

    def configure(self, **settings: Any) -> None:
        """Change how the next tasks are trained: ``configure(epochs=5, memory_size=500)``.

        A smaller memory is cut down at once; a larger one fills up with the next tasks.

        Raises:
            InputError: a setting does not exist, has a bad value, would have no effect, or cannot change any more
                because networks, random draws or answers depend on it. Nothing is changed.
        """
        given = list(settings)
        if settings.get("preset", "") is None and getattr(self.config, "preset", None):  # ours again
            names = {name for preset in self.Config.presets.values() for name in preset}
            settings = {**{name: self.Config.model_fields[name].default for name in names}, **settings}
        settings = {**self.Config.preset_settings(settings), **settings}
        config = self.Config.parse(self.config.model_dump() | settings)
        config.refuse_switched_off(given, further=True)
        config.refuse_classes(len(self.classes))
        self.Config.refuse_idle(self.name, settings, self.config.model_dump())
        differing = [key for key in settings if getattr(config, key) != getattr(self.config, key)]
        reasons = {
            **dict.fromkeys(LearnerConfig.model_fields, "what the networks are and where they run"),
            **dict.fromkeys(self.Config.with_role("lasting"), "what is kept of every task"),
            **dict.fromkeys(self.Config.with_role("scoring"), "how answers are made"),
        }
        for key in differing:
            if reason := reasons.get(key):
                raise InputError(f"{key} cannot change any more: it decides {reason}. Create a new learner with it")
        with self._all_or_nothing(len(self.task_sizes) - 1):
            self.config = config
            if "memory_size" in differing:
                draw = generator(config.seed, "memory size", len(self.task_sizes), self.memory_size)
                self.memory.resize(self.memory_size, draw)

    def snapshot(self) -> Snapshot:
        """What :meth:`go_back` needs to undo whatever comes next."""
        return Snapshot(
            classes=list(self.classes),
            task_sizes=list(self.task_sizes),
            state={key: value.clone() for key, value in self.state().items()},
            unread=self.memory.unread,
            memory_size=self.memory.size,
            config=self.config,
            seconds=dict(self.seconds),
        )

    def go_back(self, before: Snapshot) -> None:
        """Become again what the learner was ``before``."""
        self.config, self.memory.size = before.config, before.memory_size
        self.restore(before.classes, before.task_sizes, before.state, before.unread)
        self.seconds = dict(before.seconds)

    # ---- helpers ----------------------------------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self, task: int) -> Iterator[None]:
        """Put the learner back to what it was if anything goes wrong inside, an interruption included."""
        before = self.snapshot()
        self._changing = True
        try:
            yield
        except BaseException as error:
            self.go_back(before)
            if isinstance(error, LinAlgError):
                raise DivergedError(
                    f"training diverged: task {task + 1}: {error}; lower the learning rate (lr)"
                ) from error
            raise
        finally:
            self._changing = False

    def _require(self, method: str, ability: str) -> None:
        """Raise :class:`InputError` if the learner's class does not bring the optional ``method``."""
        if not self._has(method):
            raise InputError(f"method {self.name!r} cannot {ability}")

    def _has(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(BetweenTasks, method)

    def _column(self, label: Any) -> int:
        """The position of a class that has not been forgotten."""
        label = label.item() if isinstance(label, np.generic) else label
        if isinstance(label, Forgotten) or label not in self.classes:
            known = [other for other in self.classes if not isinstance(other, Forgotten)]
            listed = shortened(known, 10) or "nothing has been learned yet"
            raise InputError(f"there is no class {label!r}; known: {listed}")
        return self.classes.index(label)
