from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tiny
from morecl.methods.base import TaskData
from morecl.methods.hal import Hal
from morecl.progress import Listener
from morecl.random import generator

FIRST, SECOND = tiny.task([0, 1], ["a", "b"], 8), tiny.task([2, 3], ["c", "d"], 8)


def learner(**changes: object) -> Hal:
    settings = {k: v for k, v in tiny.SETTINGS.items() if k in Hal.Config.model_fields}
    return Hal(Hal.Config.parse(settings | {"epochs": 1, "anchor_steps": 5} | changes))


@torch.no_grad()
def objective(one: Hal, images: Tensor, columns: Tensor, mean: Tensor, hindsight: list[Tensor]) -> Tensor:
    """loss(theta_M) - loss(theta) - gamma || phi - phi_t ||^2 of each image, written out once more."""

    def loss() -> Tensor:
        return F.cross_entropy(one.head(one._features(one.network.stem(images))), columns, reduction="none")

    near = one.config.gamma * (one._features(one.network.stem(images)) - mean).pow(2).sum(1)
    now = loss()
    with one._at(hindsight):
        later = loss()
    return later - now - near


def test_anchors_move_to_maximise_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner(gamma=1e-3, lr=0.02, anchor_lr=0.1)
    find, gains = Hal._find_anchors, []

    def spy(self: Hal, task: TaskData, mean: Tensor, listener: Listener) -> Tensor:
        found = find(self, task, mean, listener)
        hindsight = self._hindsight(task, listener)
        if hindsight is not None:
            start = torch.rand(found.shape, generator=generator(0, "anchors", task.index))
            columns = torch.arange(2, 4)
            values = [objective(self, images, columns, mean, hindsight) for images in (start, found)]
            gains.append(values[1] - values[0])
        return found

    monkeypatch.setattr(Hal, "_find_anchors", spy)
    one.learn_task(*FIRST)
    one.learn_task(*SECOND)
    assert one.anchors.images.shape == (4, 3, 8, 8)
    assert (gains[0] > 0).all()


@pytest.mark.parametrize("tasks", [1, 2])  # the first has no hindsight and goes its own way in the code
def test_the_mean_embedding_draws_anchors_near(tasks: int) -> None:
    distances = []
    for gamma in (0.0, 0.1):
        one = learner(gamma=gamma, anchor_lr=0.5)
        for images, labels in (FIRST, SECOND)[:tasks]:
            one.learn_task(images, labels)
        mean = one.embed(one.prepare(images), "").mean(0)
        with torch.no_grad():
            distances.append((one._features(one.network.stem(one.anchors.images[-2:])) - mean).norm(dim=1).mean())
    assert distances[1] < 0.9 * distances[0]


def change_of_a_step(one: Hal, anchors: Tensor) -> float:
    """How far predictions on the anchors move when the gradients that are there are followed."""
    ahead = [p.detach() - one.config.lr * p.grad for p in one.model.parameters() if p.grad is not None]
    with torch.no_grad():
        before = one.head(one._features(anchors))
        with one._at(ahead):
            return float((one.head(one._features(anchors)) - before).norm())


@pytest.mark.parametrize("lamb", [0.5, 1e4])  # the larger one would overshoot if it were followed to its end
def test_predictions_on_anchors_are_held(lamb: float) -> None:
    one = learner(lamb=lamb)
    one.learn_task(*FIRST)
    anchors = one.network.stem(one.anchors.images)
    tokens = one.prepare(FIRST[0])
    one._loss(tokens.range(0, 8), torch.ones(8, dtype=torch.int64)).backward()
    free = change_of_a_step(one, anchors)
    one._hold(anchors)
    assert change_of_a_step(one, anchors) < 0.8 * free


def test_anchors_of_earlier_tasks_are_held_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Tensor] = []
    monkeypatch.setattr(Hal, "_hold", lambda self, anchors: held.append(anchors))
    one = learner()
    one.learn_task(*FIRST)
    assert not held
    anchors = one.network.stem(one.anchors.images)
    one.learn_task(*SECOND)
    assert len(held) == 2  # 16 images in batches of 8
    assert all(torch.equal(x, anchors) for x in held)


def test_looking_ahead_leaves_no_trace() -> None:
    one = learner(lamb=0.0)
    one.learn_task(*FIRST)
    own = [p.detach().clone() for p in one.model.parameters()]
    with one._at([torch.zeros_like(p) for p in own]):
        assert all(not p.any() for p in one.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(own, one.model.parameters(), strict=True))
