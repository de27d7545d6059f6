"""Small tasks and small settings: what the tests that really learn are made from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import morecl
from morecl.catalogue import SHIPPED
from morecl.methods import METHODS, Learner

Images = NDArray[np.uint8]

# A ViT of timm's with random weights, which takes a fourth of the time of the shipped one: 16 px, patches of 4, three
# blocks of 64 dimensions. Weights of attn.proj and mlp.fc2 have a deviation of 0.2, and norms and biases are moved
# by 0.2 and 0.02 times normal noise, so that each of them matters.
BACKBONE = Path(__file__).with_name("small_vit.safetensors")
DIM, DEPTH = 64, 3

SETTINGS: dict[str, Any] = {
    "backbone": str(BACKBONE),
    "image_size": 8,
    "bottleneck": 4,
    "batch_size": 8,
    "memory_size": 12,
    "memory_batch_size": 8,
    "back_update_batch_size": 8,
    "eval_batch_size": 16,
    "device": "cpu",
    "precision": "fp32",
}


def settings_for(method: str, **changes: Any) -> dict[str, Any]:
    """The small settings that ``method`` knows, one of everything it has epochs or steps of, and ``changes``; without
    small settings that have no effect beside these."""
    config = METHODS[method].Config
    short = {name: 1 for name in config.model_fields if name.endswith(("epochs", "steps"))}
    few = {"projection": 40} if method == "ranpac" else {}
    on_gpu = {"backbone": SHIPPED} if changes.get("device") == "cuda" else {}  # hardly slower there, and what is used
    chosen = config.choose(short | SETTINGS | few | on_gpu | changes) | changes
    known = {key: value for key, value in chosen.items() if key in config.model_fields}  # a test's method may have more
    off = config.parse(known).switched_off(further=True).keys() - changes.keys()
    return {key: value for key, value in chosen.items() if key not in off}


def create(method: str = "more", **changes: Any) -> Learner:
    return morecl.create(method, **settings_for(method, **changes))


def pictures(kind: int, count: int, *, draw: int = 0, side: int = 8) -> Images:
    """``count`` noisy pictures (count, side, side, 3) of one kind; another ``draw`` gives others of the same kind."""
    pattern = np.random.default_rng([kind, 7]).integers(20, 236, (side, side, 3))
    noise = np.random.default_rng([kind, draw, 8]).integers(-20, 21, (count, side, side, 3))
    return (pattern + noise).astype(np.uint8)


def task(kinds: Sequence[int], labels: Sequence[Hashable], count: int, draw: int = 0) -> tuple[Images, list[Hashable]]:
    """``count`` pictures of each kind under its label, the classes interleaved."""
    images = np.stack([pictures(kind, count, draw=draw) for kind in kinds], 1)
    return images.reshape(-1, *images.shape[2:]), list(labels) * count


def snapshot(learner: Learner) -> dict[str, Any]:
    """All that a learner has learned, copied."""
    state = {key: value.detach().cpu().numpy().copy() for key, value in learner.state().items()}
    return {"classes": list(learner.classes), "task_sizes": list(learner.task_sizes), "state": state}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two snapshots are equal, bit for bit."""
    assert one["classes"] == other["classes"]
    assert one["task_sizes"] == other["task_sizes"]
    assert one["state"].keys() == other["state"].keys()
    for key, value in one["state"].items():
        assert value.dtype == other["state"][key].dtype, key
        assert np.array_equal(value, other["state"][key]), key


def learner_of(cls: type[Learner], **settings: Any) -> Any:
    """A learner of class ``cls`` with the settings given and few others changed: a small backbone, one epoch."""
    small = {"backbone": str(BACKBONE), "bottleneck": 4, "epochs": 1, "batch_size": 8, "device": "cpu"}
    few = {"projection": 200} if cls.name == "ranpac" else {}
    return cls(cls.Config.parse(cls.Config.choose(small | few) | settings))


def images_of(*classes: int, each: int = 8) -> tuple[Images, list[int]]:
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


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two snapshots are equal, bit for bit."""
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


def resumes(make: Callable[[], Learner]) -> bool:
    """Whether a learner restored after the first of two tasks ends as one that was never interrupted."""
    straight, resumed = make(), make()
    teach(straight, (0, 1), each=4)
    state = {key: value.clone() for key, value in straight.state().items()}
    resumed.restore(straight.classes, straight.task_sizes, state)
    return is_same(snapshot(teach(straight, (2, 3), each=4)), snapshot(teach(resumed, (2, 3), each=4)))
