from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tiny
from morecl.methods import tools
from morecl.methods.base import TaskData
from morecl.methods.hal import Hal
from morecl.progress import EpochDone, Listener, silent
from morecl.random import generator
from morecl.training import Batch

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


def second_task() -> TaskData:
    return TaskData(1, SECOND[0], torch.arange(16) % 2, 2, 2)


def test_the_ascent_follows_the_gradient_of_all_three_terms() -> None:
    one = learner(gamma=0.02, lr=0.05)
    one.learn_task(*FIRST)
    hindsight = one._hindsight(second_task(), silent)
    assert hindsight is not None
    images = torch.rand(2, 3, 8, 8, generator=generator(0, "images")).requires_grad_()
    columns, mean = torch.tensor([0, 1]), torch.ones(one.network.dim)
    features = one._features(one.network.stem(images))
    near = 0.02 * (features - mean).pow(2).sum()
    terms = [near, F.cross_entropy(one.head(features), columns, reduction="sum")]
    expected = -sum(torch.autograd.grad(term, images, retain_graph=True)[0] for term in terms)
    with one._at(hindsight):
        later = F.cross_entropy(one.head(one._features(one.network.stem(images))), columns, reduction="sum")
        expected = expected + torch.autograd.grad(later, images)[0]
    torch.testing.assert_close(one._ascent(images, columns, mean, hindsight), expected, rtol=1e-4, atol=1e-5)


def test_hindsight_is_training_on_the_memory_and_leaves_no_trace() -> None:
    one = learner(finetune_epochs=3, lr=0.02)
    one.learn_task(*FIRST)
    own = [p.detach().clone() for p in one.model.parameters()]
    images, columns = one.prepare(one.memory.images).range(0, 12), torch.from_numpy(one.memory.columns)
    events: list[EpochDone] = []
    hindsight = one._hindsight(second_task(), events.append)
    assert [(event.stage, event.epoch, event.epochs) for event in events] == [("hindsight", n, 3) for n in (1, 2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(own, one.model.parameters(), strict=True))
    assert hindsight is not None
    with torch.no_grad():
        before = float(one._cross_entropy(images, columns))
        with one._at(hindsight):
            assert float(one._cross_entropy(images, columns)) < 0.5 * before


def test_anchors_stay_images() -> None:
    one = learner(anchor_lr=1e4)
    one.learn_task(*FIRST)
    levels = one.anchors.images * one.preprocess.std + one.preprocess.mean
    assert levels.min() > -0.01 and levels.max() < 255.01
    assert levels.min() < 0.01 and levels.max() > 254.99  # so large a rate goes to the ends


def test_replayed_images_join_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner(memory_batch_size=5)
    one.learn_task(*FIRST)
    own, old = one.prepare(SECOND[0]).range(0, 16), one.prepare(one.memory.images).range(0, 12)
    columns = torch.cat([2 + torch.arange(16) % 2, torch.from_numpy(one.memory.columns)])
    seen: list[Batch] = []
    fit = tools.fit

    def spy(loss: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs["stage"]:
            seen.extend(batches(0))
        fit(loss, batches, *args, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    one.learn_task(*SECOND)
    assert len(seen) == 2
    for x, y in seen:
        number = torch.cdist(x.flatten(1), torch.cat([own, old]).flatten(1)).argmin(1)
        assert torch.equal(columns[number], y)
        assert [int((number < 16).sum()), int((number >= 16).sum())] == [8, 5]


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
    one._cross_entropy(tokens.range(0, 8), torch.ones(8, dtype=torch.int64)).backward()
    free = change_of_a_step(one, anchors)
    one._hold(anchors)
    assert change_of_a_step(one, anchors) < 0.8 * free


def as_one(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in tensors]).double()


@pytest.mark.parametrize("lamb", [0.1, 1e4])
def test_what_is_added_is_the_gradient_of_the_penalty(lamb: float) -> None:
    """lambda sum || f_theta~(e) - f_theta(e) ||^2 at theta~: all of it where it is short, else what is of use."""
    one = learner(lamb=lamb, lr=0.005)
    one.learn_task(*FIRST)
    anchors, parameters = one.network.stem(one.anchors.images), list(one.model.parameters())
    sizes = [p.numel() for p in parameters]
    one._cross_entropy(one.prepare(FIRST[0]).range(0, 8), torch.ones(8, dtype=torch.int64)).backward()
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    ahead = [p.detach() - 0.005 * g for p, g in zip(parameters, gradients, strict=True)]
    with torch.no_grad():
        before = one.head(one._features(anchors))
    with one._at(ahead):
        change = one.head(one._features(anchors)) - before
        wanted = torch.autograd.grad(lamb * change.pow(2).sum(), parameters)
    one._hold(anchors)
    added = as_one([p.grad - g for p, g in zip(parameters, gradients, strict=True) if p.grad is not None])
    if lamb == 0.1:
        assert (added - as_one(wanted)).norm() < 1e-3 * added.norm()
        return
    assert torch.cosine_similarity(added, as_one(wanted), dim=0) > 0.999
    nearest = change_of_a_step(one, anchors)
    assert added.norm() < as_one(gradients).norm()
    parts = [part.view_as(p) for p, part in zip(parameters, added.float().split(sizes), strict=True)]
    for more in (0.2, -0.4):  # a fifth more than was added, then a fifth less: further away from what was said
        for p, part in zip(parameters, parts, strict=True):
            assert p.grad is not None
            p.grad += more * part
        assert change_of_a_step(one, anchors) > nearest


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
