"""Tiny learners and tasks for the tests of the replay methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from morecl.methods import Learner
from morecl.pictures import ImageArray

SETTINGS: dict[str, Any] = {"image_size": 16, "bottleneck": 4, "epochs": 1, "batch_size": 8, "device": "cpu"}


def tiny(cls: type[Learner], **settings: Any) -> Any:
    """A learner of class ``cls`` on the shipped backbone, at 16 px."""
    return cls(cls.Config.parse(SETTINGS | settings))


def images_of(*classes: int, each: int = 8) -> tuple[ImageArray, list[int]]:
    """``each`` random 8 x 8 images of each class, around a colour of its own; equal arguments give equal images."""
    rng = np.random.default_rng(classes)
    labels = [c for c in classes for _ in range(each)]
    centre = np.random.default_rng(7).integers(0, 200, (100, 1, 1, 3))
    return (centre[labels] + rng.integers(0, 56, (len(labels), 8, 8, 3))).astype(np.uint8), labels


def teach(learner: Any, *tasks: tuple[int, ...], each: int = 8) -> Any:
    for classes in tasks:
        learner.learn_task(*images_of(*classes, each=each))
    return learner


def found_in(rows: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """How far each of ``rows`` is from the nearest row of ``among``. (N, D), (M, D) -> (N,)"""
    return torch.cdist(rows.double(), among.double()).amin(1)


def same_state(a: Learner, b: Learner) -> bool:
    """Whether all that two learners have learned is the same, bit for bit."""
    x, y = a.state(), b.state()
    return x.keys() == y.keys() and all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)


def resumes(make: Callable[[], Learner]) -> bool:
    """Whether a learner restored after the first of two tasks ends as one that was never interrupted."""
    straight, resumed = make(), make()
    teach(straight, (0, 1), each=4)
    state = {key: value.clone() for key, value in straight.state().items()}
    resumed.restore(straight.classes, straight.task_sizes, state)
    return same_state(teach(straight, (2, 3), each=4), teach(resumed, (2, 3), each=4))
