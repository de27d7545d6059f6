"""MORE as a whole, on a real small learner: what it says equals what NumPy makes of its features, and nothing is lost.

The learner has four tasks of unequal size, one of them a single image; the numbers are recomputed from its public
parts (features, statistics, masks, memory) and the weights of its heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import more_reference as reference
import morecl
import tiny
from morecl.catalogue import SHIPPED
from morecl.methods import tools
from morecl.methods.more import More
from morecl.progress import EpochDone

RTOL = 1e-5
TASKS = [
    tiny.task([0, 1], ["a", "b"], 10),
    tiny.task([2, 3, 4], ["c", "d", "e"], 6),
    tiny.task([5], ["f"], 1),
    tiny.task([6, 7], ["g", "h"], 5),
]
SIZES = [2, 3, 1, 2]
TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(10)])  # kinds 8 and 9 are never learned
SETTINGS: dict[str, Any] = {"backbone": SHIPPED, "epochs": 3, "lr": 0.02, "memory_size": 16, "back_update_epochs": 3}


def create(**changes: Any) -> More:
    learner = tiny.create("more", **(SETTINGS | changes))
    assert isinstance(learner, More)
    return learner


@dataclass(frozen=True)
class Lesson:
    """A learner after four tasks, which no test may change, and what it was after each of them."""

    learner: More
    snapshots: list[dict[str, Any]]
    features: list[list[np.ndarray]]  # [k][j]: of TEST after task k under network j


def teach(learner: More) -> Lesson:
    lesson = Lesson(learner, [], [])
    for k, (images, labels) in enumerate(TASKS):
        learner.learn_task(images, labels)
        lesson.snapshots.append(tiny.snapshot(learner))
        lesson.features.append([learner.features(TEST, task=j) for j in range(k + 1)])
    return lesson


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return teach(create())


@pytest.fixture(scope="module")
def learner(lesson: Lesson) -> More:
    return lesson.learner


@pytest.fixture(scope="module")
def plain() -> More:
    """The same without the coefficient."""
    return teach(create(coefficient=False)).learner


def head(learner: More, k: int) -> tuple[np.ndarray, np.ndarray]:
    layer = learner.tasks[k].head
    return layer.weight.detach().double().numpy().copy(), layer.bias.detach().double().numpy().copy()


def features(learner: More, images: Any, k: int) -> np.ndarray:
    return learner.features(images, task=k).astype(np.float64)


def mask(learner: More, k: int) -> np.ndarray:
    """The masks of task k, one row an adapter: (12, 4 + 192)."""
    return np.concatenate(list(learner.masks(k).values())).reshape(12, 196)


def changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Names of the tensors that are in both snapshots and differ."""
    common = one["state"].keys() & other["state"].keys()
    return {key for key in common if not np.array_equal(one["state"][key], other["state"][key])}


# ---- prediction ---------------------------------------------------------------------------------------------------


def test_class_means_and_covariance(learner: More) -> None:
    """Eq. 5 and 6 on the features of the task's own network."""
    for k, (images, labels) in enumerate(TASKS):
        targets = np.array([labels.index(label) for label in labels])
        means, covariance = reference.class_statistics(features(learner, images, k), targets, SIZES[k])
        statistics = learner.statistics(k)
        assert statistics.samples == len(images)
        np.testing.assert_allclose(statistics.means.numpy(), means, rtol=1e-9)
        np.testing.assert_allclose(statistics.covariance.numpy(), covariance, rtol=1e-9, atol=1e-12)


def expected_scores(learner: More, coefficient: bool) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 7 or Eq. 2, and the probabilities alone: (N, classes) each."""
    scores, probabilities = [], []
    for k in range(len(TASKS)):
        z = features(learner, TEST, k)
        p = reference.probabilities(z, *head(learner, k), temperature=2.0)
        s = learner.statistics(k)
        P = reference.precision(s.covariance.numpy(), s.samples, SIZES[k])
        factor = reference.coefficient(z, s.means.numpy(), P, c=20.0) if coefficient else np.ones(len(z))
        scores.append(p * factor[:, None])
        probabilities.append(p)
    return np.concatenate(scores, 1), np.concatenate(probabilities, 1)


@pytest.mark.parametrize("coefficient", [True, False])
def test_prediction(coefficient: bool, request: pytest.FixtureRequest) -> None:
    """Eq. 7 with the coefficient, Eq. 2 without; Algorithm 2: label, confidence, OOD score."""
    learner = request.getfixturevalue("learner" if coefficient else "plain")
    scores, probabilities = expected_scores(learner, coefficient)
    np.testing.assert_allclose(learner.scores(TEST), scores, rtol=RTOL)
    p = learner.predict(TEST)
    column = scores.argmax(1)
    rows = np.arange(len(TEST))
    assert p.labels == ["abcdefgh"[c] for c in column]
    assert p.task.tolist() == np.repeat(range(4), SIZES)[column].tolist()
    np.testing.assert_allclose(p.ood_score, -scores.max(1), rtol=RTOL)
    np.testing.assert_allclose(p.confidence, probabilities[rows, column], rtol=RTOL)
    few = learner.predict(TEST[:2])  # so few that they may go through all networks at once, rounded differently
    np.testing.assert_allclose(learner.scores(TEST[:2]), scores[:2], rtol=1e-4)
    np.testing.assert_allclose(few.ood_score, -scores[:2].max(1), rtol=1e-4)


def test_the_coefficient_is_applied_in_prediction_only(learner: More, plain: More) -> None:
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(plain))


# ---- no forgetting ------------------------------------------------------------------------------------------------


def test_features_of_finished_tasks_never_change(lesson: Lesson, tmp_path: Path) -> None:
    lesson.learner.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved")
    for j in range(4):
        first = lesson.features[j][j]
        for k in range(j, 4):
            assert np.array_equal(first, lesson.features[k][j]), f"task {j} after task {k}"
        assert np.array_equal(first, loaded.features(TEST, task=j)), f"task {j} after loading"
        assert all(not np.array_equal(first, other) for other in lesson.features[j][:j])


def test_masks_are_exactly_zero_or_one(learner: More) -> None:
    for k in range(len(TASKS)):
        masks = learner.masks(k)
        assert list(masks)[:4] == ["blocks.0.attn.m1", "blocks.0.attn.m2", "blocks.0.mlp.m1", "blocks.0.mlp.m2"]
        assert [value.shape for value in masks.values()] == [(4,), (192,)] * 12
        assert set(mask(learner, k).flatten().tolist()) == {0.0, 1.0}
        embedding = learner.tasks[k].embedding.detach().numpy()
        assert np.array_equal(mask(learner, k), embedding > 0)
        assert abs(embedding).max() <= 6


def test_capacity_is_the_share_of_neurons_taken(learner: More) -> None:
    taken = np.max([mask(learner, k) for k in range(4)], axis=0)
    assert learner.capacity() == pytest.approx(100 * taken.mean(), rel=1e-6)


def test_protected_adapter_weights_do_not_move_and_others_do(lesson: Lesson) -> None:
    assert lesson.learner.config.momentum == 0.9
    taken = np.zeros((12, 196))
    for k in range(3):
        taken = np.maximum(taken, mask(lesson.learner, k))
        m1, m2 = taken[:, :4] == 1, taken[:, 4:] == 1
        protected = {
            "w1": np.broadcast_to(m1[:, :, None], (12, 4, 192)),
            "b1": m1,
            "w2": m2[:, :, None] & m1[:, None, :],
            "b2": m2,
        }
        before, after = lesson.snapshots[k]["state"], lesson.snapshots[k + 1]["state"]
        moved = 0
        for name, guarded in protected.items():
            key = f"model.adapters.{name}"
            assert np.array_equal(before[key][guarded], after[key][guarded]), key
            moved += int((before[key][~guarded] != after[key][~guarded]).sum())
        assert moved > 100, f"nothing was learned after task {k}"


def test_earlier_tasks_keep_all_they_own_but_the_heads(lesson: Lesson) -> None:
    heads = {f"model.tasks.{k}.head.{name}" for k in range(3) for name in ("weight", "bias")}
    of_tasks = {key for key in changed(lesson.snapshots[2], lesson.snapshots[3]) if key.startswith("model.tasks.")}
    assert of_tasks == heads


# ---- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [18, 24])
def test_objective(batch_size: int) -> None:
    """Eq. 13 = Eq. 1 + Eq. 12, in a task of one batch with a rate so small that nothing moves.

    When a batch is not full (18 of 24), its replayed images count for as much less.
    """
    frozen = {"lr": 1e-30, "epochs": 1, "memory_size": 6, "memory_batch_size": 6, "back_update": False}
    learner = create(batch_size=batch_size, **frozen)
    events: list[EpochDone] = []
    s = 1 / 500 + (500 - 1 / 500) * 3 / 4  # one batch, one epoch: the last of the shortest cycle
    taken = np.zeros((12, 196))
    for k, (images, labels) in enumerate([tiny.task([0, 1], ["a", "b"], 9), TASKS[1]]):
        replayed = learner.memory.images
        assert len(replayed) == (6 if k else 0)
        learner.learn_task(images, labels, events.append)
        shown = np.concatenate([images, replayed]) if k else images
        targets = np.array([labels.index(label) for label in labels] + [SIZES[k]] * len(replayed))
        weight, bias = head(learner, k)
        logits = features(learner, shown, k) @ weight.T + bias
        a = reference.sigmoid(s * learner.tasks[k].embedding.detach().double().numpy())
        weights = np.array([1.0] * len(images) + [18 / batch_size] * len(replayed))
        expected = reference.cross_entropy(logits, targets, weights) + reference.regulariser(list(a), list(taken), 0.75)
        assert events[-1].loss == pytest.approx(expected, rel=RTOL)
        taken = mask(learner, k).astype(np.float64)


class Spy:
    """Pairs the tokens that go through the network in training with the targets of the loss that follows."""

    def __init__(self, learner: More, patch: pytest.MonkeyPatch):
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tokens: torch.Tensor | None = None
        trunk, cross_entropy = learner.network.trunk, F.cross_entropy

        def spied_trunk(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if torch.is_grad_enabled():
                self._tokens = tokens.detach()
            return trunk(tokens, *args, **kwargs)

        def spied_loss(logits: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._tokens is not None:
                assert len(self._tokens) == len(targets)
                self.rows += zip(self._tokens, targets, strict=True)
                self._tokens = None
            return cross_entropy(logits, targets, *args, **kwargs)

        patch.setattr(learner.network, "trunk", spied_trunk)
        patch.setattr(F, "cross_entropy", spied_loss)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[More, Spy]]:
    learner = create(batch_size=4, memory_batch_size=3, epochs=2)
    yield learner, Spy(learner, monkeypatch)


def test_replayed_images_are_only_ever_ood(spied: tuple[More, Spy]) -> None:
    learner, spy = spied
    for k, (images, labels) in enumerate(TASKS):
        replayed = learner.memory.images
        own = learner.prepare(images).range(0, len(images))
        old = learner.prepare(replayed).range(0, len(replayed))
        spy.rows.clear()
        learner.learn_task(images, labels)
        seen_own, seen_old = np.zeros(len(own), int), np.zeros(len(old), int)
        for tokens, target in spy.rows:
            same_own, same_old = (tokens == own).all(2).all(1), (tokens == old).all(2).all(1)
            assert int(same_own.sum()) + int(same_old.sum()) == 1, "a row that is neither of the task nor replayed"
            if same_own.any():
                assert int(target) == labels.index(labels[int(same_own.nonzero())])
                seen_own[int(same_own.nonzero())] += 1
            else:
                assert int(target) == SIZES[k], "a replayed image has a class as its target"
                seen_old[int(same_old.nonzero())] += 1
        assert (seen_own == 2).all(), "each image of the task once an epoch"
        if k == 0:
            assert not len(seen_old)
        else:
            assert seen_old.sum() == 2 * 3 * -(-len(own) // 4), "3 join each batch"
            assert seen_old.max() - seen_old.min() <= 2, "drawn evenly: at most one round apart in each epoch"


def test_divergence_is_said_and_undone() -> None:
    learner = create(epochs=6, lr=1e30)
    with pytest.raises(morecl.DivergedError, match=r"task 1 is (nan|inf|-inf) .*lr"):
        learner.learn_task(*TASKS[0])
    assert learner.classes == [] and learner.task_sizes == []
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(create(lr=1e30)))


# ---- back-update --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own_share", "momentum"), [(None, 0.9), (0.9, 0.0)])
def test_back_update(own_share: float | None, momentum: float) -> None:
    """Eq. 3: head j on the features of network j, with the memory before the task and the task as ood.

    The batch holds all samples and the memory is larger than the task, so no random draw matters.
    """
    learner = create(
        epochs=1,
        memory_size=30,
        back_update_batch_size=1000,
        back_update_epochs=4,
        back_update_momentum=momentum,
        back_update_own_share=own_share,
        back_update_lr=0.01,
    )
    first = np.cumsum([0, *SIZES])
    for k, (images, labels) in enumerate(TASKS):
        assert k == 0 or len(learner.memory) >= len(images)
        before = [head(learner, j) for j in range(k)]
        replayed, columns = learner.memory.images, learner.memory.columns.copy()
        learner.learn_task(images, labels)
        for j in range(k):
            ood = SIZES[j]
            own = (columns >= first[j]) & (columns < first[j + 1])
            targets = np.concatenate([np.where(own, columns - first[j], ood), np.full(len(images), ood)])
            assert (own.any() and not own.all()) or k == 1
            z = features(learner, np.concatenate([replayed, images]), j)
            expected = reference.back_update(
                z, targets, *before[j], lr=0.01, momentum=momentum, steps=4, own_share=own_share
            )
            for now, wanted, then in zip(head(learner, j), expected, before[j], strict=True):
                change = wanted - then
                assert abs(change).max() > 1e-3
                np.testing.assert_allclose(now - then, change, atol=1e-4 * abs(change).max())


@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_back_update_of_the_paper_and_of_its_authors(preset: str) -> None:
    """Rate 0.01, absolute, all samples the same. The paper: momentum 0.9, on from the last head, features of network j.
    The authors' code: no momentum, from the head as it was trained, features of the first network.

    One batch holds all samples, so its order does not matter. Of each class there are as many images as the memory
    holds of one, or fewer: both draws take the whole task.
    """
    learner = create(epochs=1, memory_size=30, back_update_batch_size=1000, back_update_epochs=4, preset=preset)
    config, paper = learner.config, preset == "paper"
    assert (config.back_update_lr, config.back_update_rate, config.back_update_own_share) == (0.01, "absolute", None)
    first = np.cumsum([0, *SIZES])
    trained: list[tuple[np.ndarray, np.ndarray]] = []
    sizes = []
    for k, (images, labels) in enumerate(TASKS):
        before = [head(learner, j) for j in range(k)] if paper else trained
        replayed, columns = learner.memory.images, learner.memory.columns.copy()
        if not paper and k:
            assert np.bincount(columns).max() >= np.unique(labels, return_counts=True)[1].max()
        learner.learn_task(images, labels)
        trained = [*trained, head(learner, k)]
        for j in range(k):
            own = (columns >= first[j]) & (columns < first[j + 1])
            targets = np.concatenate([np.where(own, columns - first[j], SIZES[j]), np.full(len(images), SIZES[j])])
            z = features(learner, np.concatenate([replayed, images]), j if paper else 0)
            sizes.append(np.mean(z**2))
            expected = reference.back_update(
                z, targets, *before[j], lr=0.01, momentum=0.9 if paper else 0, steps=4, own_share=None, relative=False
            )
            for now, wanted, then in zip(head(learner, j), expected, before[j], strict=True):
                change = wanted - then
                assert abs(change).max() > 1e-3
                np.testing.assert_allclose(now - then, change, atol=1e-4 * abs(change).max())
    assert all(abs(size - 1) > 0.01 for size in sizes)  # a relative rate would show


def test_the_authors_draw_takes_of_each_class_as_many_as_the_memory_holds_of_one() -> None:
    learner = create(epochs=1, memory_size=6, preset="authors")
    seen: list[torch.Tensor] = []
    fit_heads = learner._fit_heads
    learner._fit_heads = lambda tasks, parts, columns, **rest: (  # type: ignore[method-assign]
        seen.append(columns), fit_heads(tasks, parts, columns, **rest)
    )[-1]  # fmt: skip
    for images, labels in TASKS:
        learner.learn_task(images, labels)
    counts = [torch.bincount(columns).tolist() for columns in seen]
    assert counts == [[3, 3, 3, 3, 3], [1] * 6, [1] * 8]


def test_heads_as_trained_are_saved_and_used_again(tmp_path: Path) -> None:
    learner = create(epochs=1, preset="authors")
    for images, labels in TASKS[:2]:
        learner.learn_task(images, labels)
    learner.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved")
    for each in (learner, loaded):
        each.learn_task(*TASKS[2])
    assert not changed(tiny.snapshot(learner), tiny.snapshot(loaded))
    kept = learner.tasks[0].trained_head
    assert kept.shape == (3, learner.network.dim + 1)
    assert not torch.equal(kept[:, :-1], learner.tasks[0].head.weight)  # the back-update changed it
    plain = create(epochs=1)
    plain.learn_task(*TASKS[0])
    assert plain.tasks[0].trained_head.numel() == 0
    assert learner.entries()["heads"] == 2 * sum((size + 1) * (learner.network.dim + 1) for size in SIZES[:3])


def test_back_update_changes_earlier_heads_only() -> None:
    with_it, without = create(), create(back_update=False)
    for learner in (with_it, without):
        for images, labels in TASKS[:2]:
            learner.learn_task(images, labels)
    assert changed(tiny.snapshot(with_it), tiny.snapshot(without)) == {
        "model.tasks.0.head.weight",
        "model.tasks.0.head.bias",
    }


def test_back_update_draws_as_many_of_the_task_at_random_as_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = create(memory_size=6)
    learner.learn_task(*TASKS[0])
    embedded: dict[str, list[np.ndarray]] = {}
    embed = learner.embed

    def spied(tokens: Any, network: str) -> torch.Tensor:
        embedded.setdefault(network, []).append(tokens.images.numpy())
        return embed(tokens, network)

    monkeypatch.setattr(learner, "embed", spied)
    images, labels = TASKS[1]
    stored = learner.memory.images
    assert len(images) == 18 and len(stored) == 6
    monkeypatch.setattr(learner, "_require_finite", lambda task: None)
    learner.learn_task(images, labels)
    replay, sample = embedded["0"]  # the memory before the task, and as many of the task
    assert np.array_equal(replay, stored)
    drawn = [next(i for i, image in enumerate(images) if np.array_equal(image, one)) for one in sample]
    assert len(set(drawn)) == 6 and set(drawn) != set(range(6))
    assert [len(each) for each in embedded["1"]] == [18]  # the statistics


def test_each_epoch_of_back_update_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = create(epochs=1, memory_size=6, back_update_batch_size=4)
    learner.learn_task(*TASKS[0])
    orders: list[list[int]] = []
    fit = tools.fit

    def spy(loss: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs["stage"] == "back-update":
            orders.extend(torch.cat([index for index, _ in batches(epoch)]).tolist() for epoch in range(2))
        fit(loss, batches, *args, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    learner.learn_task(*TASKS[1])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12)) and orders[0] != orders[1]


def test_no_back_update_without_memory() -> None:
    """Nothing to tell own classes by: the heads stay as they were."""
    learner = create(memory_size=0)
    learner.learn_task(*TASKS[0])
    before = head(learner, 0)
    learner.learn_task(*TASKS[1])
    assert all(np.array_equal(a, b) for a, b in zip(before, head(learner, 0), strict=True))
    assert learner.seconds["back_update"] == 0


# ---- size ---------------------------------------------------------------------------------------------------------

# (classes of each task, bottleneck, paper's entries in millions: table of memory sizes, row MORE)
PAPER = {
    "CIFAR10-5T": ([2] * 5, 64, 23.7),
    "CIFAR100-10T": ([10] * 10, 128, 25.9),
    "CIFAR100-20T": ([5] * 20, 128, 27.7),
    "T-ImageNet-5T": ([40] * 5, 128, 25.1),
    "T-ImageNet-10T": ([20] * 10, 128, 25.9),
}


@pytest.mark.parametrize("bottleneck", [64, 128])
def test_entries_agree_with_the_paper(bottleneck: int) -> None:
    learner = morecl.create(
        "more", backbone="deit_small_patch16_224", pretrained=False, bottleneck=bottleneck, device="cpu"
    )
    D, L = 384, 12
    for sizes, _, millions in (row for row in PAPER.values() if row[1] == bottleneck):
        T, C = len(sizes), sum(sizes)
        learner._reset()
        for size in sizes:
            learner._grow(size)
        entries = learner.entries()
        assert sum(entries.values()) / 1e6 == pytest.approx(millions, abs=0.1)
        assert entries == {
            "backbone": 21_665_664,  # DeiT-S/16 without its classifier
            "adapters": 2 * L * (2 * D * bottleneck + bottleneck + D),
            "norms": T * (2 * L + 1) * 2 * D,
            "embeddings": T * 2 * L * (bottleneck + D),
            "heads": (C + T) * (D + 1),
            "statistics": C * D + T * D * D,
        }
