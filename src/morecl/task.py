"""A task: images and labels as a user gives them, checked, and as a method gets them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from morecl.errors import InputError, shortened
from morecl.images import as_images
from morecl.labels import Forgotten, encode, same_types
from morecl.pictures import AnyImages


@dataclass(frozen=True)
class TaskData:
    """A task as a method gets it. Tensors are on the CPU."""

    index: int  # 0-based
    images: AnyImages  # uint8 (N, H, W, 3)
    targets: Tensor  # (N,) the class of each image, counted within the task: 0..classes-1
    classes: int
    first_column: int  # position of the task's first class among all classes seen

    @property
    def columns(self) -> Tensor:
        """(N,) the class of each image, counted over all tasks: its position in ``learner.classes``."""
        return self.first_column + self.targets


def read_task(images: Any, labels: Any, side: int) -> tuple[AnyImages, list[Hashable]]:
    """What ``learn_task`` was given, as uint8 (N, H, W, 3) and N labels.

    Raises:
        TypeError, ValueError: something about it is not usable.
    """
    if labels is None:
        images, labels = _folder(images)
    names = _check_labels(labels)
    array = as_images(list(images) if isinstance(images, Iterator) else images, side)
    if len(array) != len(names):
        raise ValueError(f"as many labels as images are needed: there are {len(array)} images, {len(names)} labels")
    if not names:
        raise ValueError("the task is empty: it has no images")
    return array, names


def refuse_known(names: Sequence[Hashable], known: Sequence[Hashable]) -> None:
    """Raise ``ValueError`` if one of ``names`` has been learned before."""
    seen = {name: name for name in known}
    again = [name for name in dict.fromkeys(names) if name in seen]
    for name in again:
        _refuse_other_type(name, seen[name])
    if again:
        raise ValueError(f"already learned: {shortened(again)}; a task holds new classes only")


def refuse_unknown(names: Sequence[Hashable], known: Sequence[Hashable]) -> None:
    """Raise :class:`InputError` if one of ``names`` has not been learned."""
    seen = set(known)
    unknown = [name for name in dict.fromkeys(names) if name not in seen]
    if unknown:
        raise InputError(
            f"not learned yet: {shortened(unknown)}; further images are of classes that are known, and learn_task "
            "learns new ones"
        )


def check_label(label: Any) -> Hashable:
    """``label`` as it is kept, or an error that says why it cannot be one."""
    return _check_labels([label])[0]


def task_data(
    array: AnyImages, names: Sequence[Hashable], classes: Sequence[Hashable], index: int, first: int
) -> TaskData:
    """Images and their labels ``names``, all among the task's ``classes``, as task number ``index``."""
    position = {name: i for i, name in enumerate(classes)}
    targets = torch.tensor([position[name] for name in names])
    return TaskData(index=index, images=array, targets=targets, classes=len(classes), first_column=first)


def _check_labels(labels: Any) -> list[Hashable]:
    if isinstance(labels, Tensor | np.ndarray):
        if labels.ndim != 1:
            raise ValueError(f"labels must have one dimension, got shape {tuple(labels.shape)}")
        labels = labels.tolist()
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence):
        raise TypeError(f"labels must be a list or a one-dimensional array, got {type(labels).__name__}")
    names = [label.item() if isinstance(label, np.generic) else label for label in labels]
    checked: dict[Hashable, Hashable] = {}
    for index, name in enumerate(names):
        try:
            if name in checked:
                _refuse_other_type(name, checked[name])
                continue
        except TypeError as error:
            raise TypeError(f"label {index} is a {type(name).__name__}, which cannot be hashed") from error
        if isinstance(name, Forgotten):
            raise TypeError(f"label {index} is the placeholder of a forgotten class, which no image can have")
        if name is None:
            raise ValueError(f"label {index} is None: it is missing")
        if name != name:
            raise ValueError(f"label {index} is not a number (NaN)")
        encode(name)  # else training would end in a learner that cannot be saved
        checked[name] = name
    return names


def _refuse_other_type(label: Hashable, equal: Hashable) -> None:
    """Raise ``ValueError`` if ``label`` and an ``equal`` one are 1 and ``True``, or 1 and 1.0."""
    if not same_types(label, equal):
        raise ValueError(
            f"the labels {equal!r:.60} and {label!r:.60} are equal in Python, so they would be one class: "
            "write both alike, or give one of them another name"
        )


def _folder(path: Any) -> tuple[list[Path], list[str]]:
    """Image files and labels of a folder with one sub-folder per class."""
    from morecl.data.folder import labelled_files

    if not isinstance(path, str | Path):
        raise TypeError("labels are missing; only a folder with one sub-folder of images per class needs none")
    return labelled_files(Path(path).expanduser())
