"""Data sets, and how they are divided into tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from morecl.errors import InputError
from morecl.pictures import AnyImages, chunks, some

Images = AnyImages  # uint8 (N, H, W, 3) or (N, H, W): an array, or images that are read when they are asked for
Labels = NDArray[np.int64]  # (N,)
Division = int | list[int]  # a number of tasks of equal size, or the size of each


@dataclass(frozen=True)
class Dataset:
    """Images and labels of one data set, train and test.

    Labels are indices into ``classes``. The arrays must not be changed. ``skipped`` lists the files that could not be
    read (only with ``folder:PATH``). Of a folder without train/ and test/, the test images were held out by
    :func:`morecl.data.folder.load_folder` and are never learned.
    """

    name: str
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    classes: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    chosen_side: bool = False  # the recipe says at which side a user's folder is stored, whatever the backbone needs

    def __post_init__(self) -> None:
        if twice := sorted({name for name in self.classes if self.classes.count(name) > 1}):
            raise InputError(f"data set {self.name} has more than one class called {', '.join(twice)}")

    @property
    def side(self) -> int:
        """Height of the images in pixels, as stored here."""
        return int(self.x_train.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over types, shapes and bytes of the four arrays and the class names: 64 hex digits."""
        digest = hashlib.sha256()
        for x, y in ((self.x_train, self.y_train), (self.x_test, self.y_test)):
            digest.update(f"{x.dtype.str}{x.shape}".encode())
            for part in chunks(x):
                digest.update(part.data)
            digest.update(f"{y.dtype.str}{y.shape}".encode())
            digest.update(np.ascontiguousarray(y).data)
        digest.update("\n".join(self.classes).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """One task of a stream: its classes (labels of the data set, in learning order) and its images."""

    index: int
    classes: tuple[int, ...]
    x_train: Images = field(repr=False)
    y_train: Labels = field(repr=False)
    x_test: Images = field(repr=False)
    y_test: Labels = field(repr=False)


class TaskStream:
    """The classes of ``dataset`` in ``class_order``, divided into consecutive groups.

    ``tasks`` is their number, or the number of classes of each, in order. If the classes do not divide evenly into a
    number of tasks, the first groups get one class more (10 classes, 3 tasks: 4 + 3 + 3).
    ``scored_on`` says what the data set's ``x_test`` holds: the test split, or training images held out for validation.
    """

    def __init__(
        self,
        dataset: Dataset,
        class_order: Sequence[int],
        tasks: Division,
        scored_on: Literal["test", "validation"] = "test",
    ):
        if sorted(class_order) != list(range(len(dataset.classes))):
            raise InputError(
                f"the class order is not a permutation of the {len(dataset.classes)} labels of {dataset.name}"
            )
        ends = np.cumsum(task_sizes(tasks, len(class_order), dataset.name))
        self.dataset = dataset
        self.scored_on = scored_on
        self.class_order = tuple(int(c) for c in class_order)
        self.groups = tuple(tuple(int(c) for c in g) for g in np.split(np.array(self.class_order), ends[:-1]))

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Task]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, index: int) -> Task:
        """Images that are not in memory are not read here either, but when the task is learned."""
        group, d = self.groups[index], self.dataset
        train, test = np.flatnonzero(np.isin(d.y_train, group)), self.test_rows(index)
        return Task(index, group, some(d.x_train, train), d.y_train[train], some(d.x_test, test), d.y_test[test])

    def test_rows(self, index: int) -> NDArray[np.intp]:
        """Where the test images of a task are in ``dataset.x_test``."""
        return np.flatnonzero(np.isin(self.dataset.y_test, self.groups[index]))


def task_sizes(tasks: Division, classes: int, name: str) -> list[int]:
    """The number of classes of each task when the ``classes`` of the data set ``name`` are divided into ``tasks``."""
    if isinstance(tasks, int):
        if not 1 <= tasks <= classes:
            raise InputError(f"cannot divide {classes} classes into {tasks} tasks")
        return equal_sizes(tasks, classes)
    if not tasks or min(tasks) < 1:
        raise InputError(f"tasks = {tasks}: every task needs at least 1 class")
    if sum(tasks) != classes:
        raise InputError(
            f"tasks of {', '.join(map(str, tasks))} classes have {sum(tasks)} in all, but {name} has {classes}: "
            f"give sizes that sum to {classes}"
        )
    return list(tasks)


def equal_sizes(tasks: int, classes: int) -> list[int]:
    """As equal as possible; the first tasks get one class more."""
    size, over = divmod(classes, tasks)
    return [size + (k < over) for k in range(tasks)]
