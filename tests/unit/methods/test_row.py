"""ROW: its three steps of training, and its product against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tiny
from morecl.catalogue import SHIPPED
from morecl.methods import tools
from morecl.methods.row import Row, RowRule, _half_own
from morecl.progress import EpochDone
from morecl.training import ProtectedSGD

FIRST, SECOND, THIRD = (
    tiny.task([0, 1], ["a", "b"], 8),
    tiny.task([2, 3, 4], ["c", "d", "e"], 8),
    tiny.task([5], ["f"], 8),
)
TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(6)])


def learner(**changes: Any) -> Row:
    one = tiny.create("row", memory_size=18, **changes)
    assert isinstance(one, Row)
    return one


@pytest.fixture(scope="module")
def taught() -> Row:
    one = learner()
    for task in (FIRST, SECOND, THIRD):
        one.learn_task(*task)
    return one


def heads(one: Row, kind: str) -> list[torch.Tensor]:
    return [getattr(net, kind).weight.detach().clone() for net in one.tasks]


# ---- training -----------------------------------------------------------------------------------------------------


def test_two_heads_per_task_of_which_one_has_an_ood_output(taught: Row) -> None:
    assert [net.head.out_features for net in taught.tasks] == [3, 4, 2]
    assert [net.wp_head.out_features for net in taught.tasks] == [2, 3, 1]
    assert taught.entries()["heads"] == (tiny.DIM + 1) * (3 + 4 + 2 + 2 + 3 + 1)


def test_the_first_task_needs_no_fine_tuning() -> None:
    one, events = learner(), list[EpochDone]()
    one.learn_task(*FIRST, events.append)
    assert not [event for event in events if event.stage]
    (net,) = one.tasks
    assert torch.equal(net.wp_head.weight, net.head.weight[:-1])
    assert torch.equal(net.wp_head.bias, net.head.bias[:-1])


def test_both_heads_are_tuned_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, fit = list[tuple[str, int, float, float]](), tools.fit

    def spy(loss: Any, batches: Any, optimizer: ProtectedSGD, **kwargs: Any) -> None:
        (group,) = optimizer.param_groups
        seen.append((kwargs["stage"], kwargs["epochs"], group["lr"], group["momentum"]))
        fit(loss, batches, optimizer, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    one = learner(lr=0.01, momentum=0.5, wp_epochs=2, ood_epochs=3)
    one.learn_task(*FIRST)
    one.learn_task(*SECOND)
    assert seen == [("", 1, 0.01, 0.5), ("", 1, 0.01, 0.5), ("wp-head", 2, 0.01, 0.5), ("ood-heads", 3, 0.01, 0.5)]
    seen.clear()
    two = learner(lr=0.01, head_lr=0.002)
    two.learn_task(*FIRST)
    two.learn_task(*SECOND)
    assert [lr for _, _, lr, _ in seen] == [0.01, 0.01, 0.002, 0.002]


def test_the_wp_heads_loss_is_a_mean_over_images(monkeypatch: pytest.MonkeyPatch) -> None:
    one, fit = learner(), tools.fit
    one.learn_task(*FIRST)
    seen: list[tuple[float, float]] = []

    def spy(loss: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs["stage"] == "wp-head":
            index, weight = torch.tensor([0, 9, 17, 3]), torch.tensor([1.0, 1.0, 1.0, 0.0])  # the last fills up
            with torch.no_grad():
                z = one.embed(one.prepare(SECOND[0]), "1")[[0, 9, 17]]
                log_p = one.tasks[1].wp_head(z).log_softmax(1)
                targets = torch.tensor(["cde".index(SECOND[1][i]) for i in (0, 9, 17)])
                seen.append((float(loss(index, weight)), float(-log_p[range(3), targets].mean())))
        fit(loss, *args, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    one.learn_task(*SECOND)
    [(value, expected)] = seen
    assert value == pytest.approx(expected, rel=1e-5)


def test_the_ood_heads_loss_is_a_mean_over_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a larger batch would be a larger rate."""
    one, fit = learner(), tools.fit
    one.learn_task(*FIRST)
    seen: list[tuple[float, float]] = []

    def spy(loss: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs["stage"] == "ood-heads":
            rows = torch.tensor([[0, 1, 2, 9, 10], [3, 4, 5, 0, 1]])  # of each head
            with torch.no_grad():
                seen.append((float(loss(rows)), np.mean([float(loss(one_each)) for one_each in rows.split(1, 1)])))
        fit(loss, *args, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    one.learn_task(*SECOND)
    [(value, expected)] = seen
    assert value == pytest.approx(expected, rel=1e-5)


def test_all_ood_heads_are_refreshed_and_only_the_newest_wp_head(taught: Row) -> None:
    one = learner()
    one.learn_task(*FIRST)
    one.learn_task(*SECOND)
    ood, within = heads(one, "head"), heads(one, "wp_head")
    features = one.features(TEST, task=0)
    one.learn_task(*THIRD)
    assert all(not torch.equal(a, b) for a, b in zip(ood, heads(one, "head"), strict=False))
    assert all(torch.equal(a, b) for a, b in zip(within, heads(one, "wp_head"), strict=False))
    assert np.array_equal(one.features(TEST, task=0), features)


def test_an_ood_head_learns_to_reject_what_came_later() -> None:
    """The first head's ood output, before and after the second task, on that task's images."""
    one = learner(ood_epochs=20, lr=0.02, backbone=SHIPPED)
    one.learn_task(*FIRST)
    z = torch.from_numpy(one.features(SECOND[0], task=0))
    own = torch.from_numpy(one.features(FIRST[0], task=0))

    def rejected() -> tuple[float, float]:
        with torch.no_grad():
            p = [one.tasks[0].head(x).softmax(1)[:, -1].mean() for x in (z, own)]
        return float(p[0]), float(p[1])

    before = rejected()
    one.learn_task(*SECOND)
    after = rejected()
    assert after[0] > 0.8 > 0.2 > after[1]
    assert after[0] > before[0] + 0.4


def test_of_each_class_as_many_images_as_the_memory_has() -> None:
    one = learner()
    one.learn_task(*FIRST)
    quota = len(one.memory) // 2
    from morecl.random import generator
    from morecl.task import task_data

    images, labels = SECOND
    task = task_data(images, labels, ["c", "d", "e"], 1, 2)
    drawn = one._balanced_sample(task, generator(0, "test"))
    assert np.bincount(task.targets.numpy()[drawn]).tolist() == [min(quota, 8)] * 3
    assert len(set(drawn.tolist())) == len(drawn)
    one.memory.replace(one.memory.images[[0, -1]], one.memory.columns[[0, -1]])
    assert len(one._balanced_sample(task, generator(0, "test"))) == 3


def test_half_of_a_batch_are_images_of_the_heads_task() -> None:
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
    rows = _half_own(owner, [0, 1, 2], 4, torch.Generator().manual_seed(0))
    assert rows.shape == (2, 3, 8)  # task 1 has five images: two batches of four
    for j in range(3):
        own, others = owner[rows[:, j, :4]], owner[rows[:, j, 4:]]
        assert (own == j).all() and (others != j).all()
        assert set(rows[:, j, :4].flatten().tolist()) == set((owner == j).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("memory_size", [0, 1])
def test_little_or_no_memory(memory_size: int) -> None:
    """With one place at most one of the two tasks has an image, and the other keeps its OOD head."""
    one = tiny.create("row", memory_size=memory_size)
    for task in (FIRST, SECOND, THIRD):
        one.learn_task(*task)
    assert np.isfinite(one.scores(TEST)).all()


# ---- the rule -----------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def test_scores_are_the_product_of_both_heads_and_the_coefficient(taught: Row) -> None:
    expected = np.zeros((len(TEST), 6))
    first = 0
    for k, (images, labels) in enumerate((FIRST, SECOND, THIRD)):
        net, size = taught.tasks[k], taught.task_sizes[k]
        train, z = taught.features(images, task=k).astype(float), taught.features(TEST, task=k)
        of_class = [train[[label == name for label in labels]] for name in taught.classes[first : first + size]]
        means = [x.mean(0) for x in of_class]
        covariance = np.mean([np.cov(x.T, bias=True) for x in of_class], 0)
        precision = np.linalg.inv(0.8 * covariance + 0.2 * np.eye(tiny.DIM))
        with torch.no_grad():
            within, ood = (head(torch.from_numpy(z)).double().numpy() for head in (net.wp_head, net.head))
        for i, x in enumerate(z.astype(float)):
            distance = min(np.sqrt((x - m) @ precision @ (x - m)) for m in means)
            inside = softmax(ood[i] / 5)[:-1].max()
            expected[i, first : first + size] = softmax(within[i] / 5) * inside / distance
        first += size
    np.testing.assert_allclose(taught.scores(TEST), expected, rtol=1e-4)
    p = taught.predict(TEST)
    np.testing.assert_allclose(p.ood_score, -expected.max(1), rtol=1e-4)
    np.testing.assert_allclose(p.confidence, expected.max(1) / expected.sum(1), rtol=1e-4)


def test_with_one_task_the_ood_head_is_not_asked() -> None:
    one = learner()
    one.learn_task(*FIRST)
    before = one.scores(TEST)
    one.tasks[0].head.bias.data[-1] += 3
    assert np.array_equal(one.scores(TEST), before)
    assert isinstance(one.rule, RowRule)


def test_resumes() -> None:
    assert tiny.resumes(lambda: tiny.learner_of(Row, memory_size=6, memory_batch_size=4, wp_epochs=1, ood_epochs=1))
