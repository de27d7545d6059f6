"""Further images of known classes: statistics, sums and memory are those of all images at once, computed with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import more_reference as reference
import tiny
from morecl import gaussian, kernel_ridge
from morecl.memory import ReplayMemory, hypergeometric
from morecl.methods import more as module
from morecl.methods.more import More, _balanced, _emphasis
from morecl.methods.morerp import Morerp
from morecl.random import generator
from morecl.ridge import RELATIVE_STRENGTHS
from morecl.symmetric import unpacked

TASKS = [tiny.task([0, 1], ["a", "b"], 9), tiny.task([2, 3, 4], ["c", "d", "e"], 6), tiny.task([5], ["f"], 1)]
MORE = {"b": tiny.pictures(1, 5, draw=3), "c": tiny.pictures(2, 1, draw=3), "f": tiny.pictures(5, 4, draw=3)}
IMAGES = np.concatenate(list(MORE.values()))
LABELS = [label for label, images in MORE.items() for _ in images]


@pytest.mark.parametrize("classes", [1, 3])
def test_gaussians_of_all_images_at_once(classes: int) -> None:
    rng = np.random.default_rng(0)
    targets = np.concatenate([np.arange(classes), rng.integers(0, classes, 40)])
    features = rng.normal(size=(len(targets), 7)) + 3 * targets[:, None]
    cut = classes + 12
    z, y = torch.from_numpy(features), torch.from_numpy(targets)
    first = gaussian.estimate(z[:cut], y[:cut], classes)
    counts, spread = y[:cut].bincount(minlength=classes), gaussian.scatters(z[:cut], y[:cut], first.means)
    for part in (slice(cut, cut + 1), slice(cut + 1, None)):  # one image, then many
        first, counts, spread = gaussian.extended(first, counts, spread, z[part], y[part])
    means, covariance = reference.class_statistics(features, targets, classes)
    np.testing.assert_allclose(first.means.numpy(), means, rtol=1e-10)
    np.testing.assert_allclose(first.covariance.numpy(), covariance, rtol=1e-10, atol=1e-13)
    assert first.samples == len(targets) and counts.tolist() == np.bincount(targets).tolist()
    for c in range(classes):
        own = features[targets == c] - features[targets == c].mean(0)
        np.testing.assert_allclose(unpacked(spread[c], 7).numpy(), own.T @ own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["more", "morerp"])
def test_statistics_of_a_learner_are_those_of_all_its_images(method: str) -> None:
    learner: Any = tiny.create(method)
    for images, labels in TASKS:
        learner.learn_task(images, labels)
    learner.add_examples(IMAGES[:6], LABELS[:6])
    learner.add_examples(IMAGES[6:], LABELS[6:])
    for k, (images, labels) in enumerate(TASKS):
        own = list(dict.fromkeys(labels))
        parts = [(images, labels), (IMAGES[:6], LABELS[:6]), (IMAGES[6:], LABELS[6:])]
        z = np.concatenate([learner.features(x, task=k) for x, _ in parts]).astype(np.float64)
        names = [label for _, part in parts for label in part]
        rows = np.array([label in own for label in names])
        targets = np.array([own.index(label) for label in names if label in own])
        means, covariance = reference.class_statistics(z[rows], targets, len(own))
        statistics = learner.statistics(k)
        assert statistics.samples == rows.sum()
        np.testing.assert_allclose(statistics.means.numpy(), means, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(statistics.covariance.numpy(), covariance, rtol=1e-10, atol=1e-10 * covariance.max())
        assert torch.equal(learner.tasks[k].precision, gaussian.precision(statistics))


def test_the_ridge_is_that_of_all_images() -> None:
    """The strength is the one it chose; W of all images at once, in float64."""
    learner: Any = tiny.create("morerp", projection=40)
    assert isinstance(learner, Morerp)
    for images, labels in TASKS:
        learner.learn_task(images, labels)
    learner.add_examples(IMAGES, LABELS)
    ridge = learner.rule.ridge
    parts = [*TASKS, (IMAGES, LABELS)]
    phi = np.concatenate([ridge.random_features(learner.embed(learner.prepare(x), "patches 0")) for x, _ in parts])
    phi = phi.astype(np.float64)
    columns = np.array([learner.classes.index(label) for _, labels in parts for label in labels])
    assert learner.rule.counts.tolist() == np.bincount(columns).tolist()
    gram, cross = phi.T @ phi, phi.T @ np.eye(6)[columns]
    np.testing.assert_allclose(unpacked(ridge.gram, ridge.width).numpy(), gram, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(ridge.cross.numpy(), cross, rtol=1e-9, atol=1e-9)
    r = RELATIVE_STRENGTHS[int(ridge.place)] * gram.diagonal().mean()
    expected = np.linalg.solve(gram + r * np.eye(len(gram)), cross)
    assert np.abs(ridge.weight.numpy() - expected).max() <= 1e-6 * np.abs(expected).max()


def test_the_kernel_classifier_is_that_of_all_images() -> None:
    learner: Any = tiny.create("morerp")
    for images, labels in TASKS:
        learner.learn_task(images, labels)
    learner.add_examples(IMAGES, LABELS)
    ridge, parts = learner.rule.ridge, [*TASKS, (IMAGES, LABELS)]
    z = torch.cat([learner.embed(learner.prepare(x), "patches 0") for x, _ in parts]).double()
    a = (z / ridge.scale).half().double().numpy()
    columns = np.array([learner.classes.index(label) for _, labels in parts for label in labels])
    kernel = np.exp(-((a[:, None] - a[None]) ** 2).mean(-1))
    strength = kernel_ridge.KERNEL_STRENGTHS[int(ridge.place)]
    expected = np.linalg.solve(kernel + strength * np.eye(len(a)), np.eye(6)[columns])
    assert np.abs(ridge.dual.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_further_images_of_a_class_for_which_images_in_memory_stand_in() -> None:
    """One class, then three: the ridge moved. New images count once, stand-ins as before; strengths are chosen on
    images whose weights are known."""
    learner = tiny.learner_of(Morerp, memory_size=20, projection=60)
    tiny.teach(learner, (0,), (1, 2, 3))
    rule = learner.rule
    assert rule.network == "patches 1"
    gram, cross = rule.ridge.gram.clone(), rule.ridge.cross.clone()
    new = tiny.images_of(0, 2, each=3)
    solved: list[tuple[torch.Tensor, ...]] = []
    solve = rule.ridge.solve
    rule.ridge.solve = lambda *args: (solved.append(args), solve(*args))
    learner.add_examples(*new)
    phi = rule.ridge.random_features(learner.embed(learner.prepare(new[0]), "patches 1")).double()
    assert torch.allclose(rule.ridge.cross - cross, phi.T @ torch.eye(4).double()[new[1]], atol=1e-9)
    added = unpacked(rule.ridge.gram - gram, 60)
    assert torch.allclose(added, phi.T @ phi, atol=1e-7)
    assert rule.counts.tolist() == [11, 8, 11, 8]
    assert rule.mixed.tolist() == [True, False, False, False]
    ((_, columns, weights, _),) = solved
    assert set(columns.tolist()) == {1, 2, 3} and (weights == 1).all()
    del rule.ridge.solve
    tiny.teach(learner, tuple(range(10, 18)))  # moves again: all older images stand in
    assert learner.rule.network == "patches 2" and not learner.rule.mixed.any()


# ---- memory -------------------------------------------------------------------------------------------------------


def numbered(first: int, count: int) -> np.ndarray:
    return np.full((count, 1, 1, 3), 0, np.uint8) + np.arange(first, first + count, dtype=np.uint8)[:, None, None, None]


def test_hypergeometric_draws() -> None:
    new, old, draws = 7, 9, 6
    drawn = [hypergeometric(new, old, draws, generator(seed, "test")) for seed in range(3000)]
    expected = 3000 * stats.hypergeom(new + old, new, draws).pmf(np.arange(draws + 1))
    found = np.bincount(drawn, minlength=draws + 1)
    assert stats.chisquare(found[1:], expected[1:] * found[1:].sum() / expected[1:].sum()).pvalue > 1e-3
    assert hypergeometric(3, 0, 5, generator(0)) == 3 and hypergeometric(0, 3, 5, generator(0)) == 0


def test_what_is_stored_of_a_class_is_a_uniform_sample_of_all_its_images() -> None:
    """10 images of which 4 are stored, then 14 more in two calls: each is stored with probability 4 / 24."""
    runs, stored = 3000, np.zeros(24)
    first_place = np.zeros(24)
    for seed in range(runs):
        memory = ReplayMemory(8, ["a", "b"], 1)
        memory.update(
            np.concatenate([numbered(0, 10), numbered(100, 10)]), np.repeat([0, 1], 10), generator(seed, "memory")
        )
        other = memory.images[memory.columns == 1].copy()
        memory.add(numbered(10, 9), np.zeros(9, np.int64), np.array([10, 10]), generator(seed, "one"))
        memory.add(numbered(19, 5), np.zeros(5, np.int64), np.array([19, 10]), generator(seed, "two"))
        own = memory.images[memory.columns == 0][:, 0, 0, 0]
        assert len(own) == len(set(own.tolist())) == 4
        assert np.array_equal(memory.images[memory.columns == 1], other)
        stored[own] += 1
        first_place[own[0]] += 1
    assert stats.chisquare(stored).pvalue > 1e-3
    assert stats.chisquare(first_place).pvalue > 1e-3  # or cutting the class from its end would prefer some


def test_a_class_with_few_images_fills_its_share() -> None:
    memory = ReplayMemory(10, ["a", "b"], 1)
    memory.update(numbered(0, 2), np.array([0, 1]), generator(0))
    memory.add(numbered(2, 3), np.zeros(3, np.int64), np.array([1, 1]), generator(1))
    assert sorted(memory.images[memory.columns == 0][:, 0, 0, 0].tolist()) == [0, 2, 3, 4]
    memory.add(numbered(5, 30), np.zeros(30, np.int64), np.array([4, 1]), generator(2))
    assert np.bincount(memory.columns).tolist() == [5, 1]


# ---- heads --------------------------------------------------------------------------------------------------------


def test_each_class_of_a_head_has_the_same_weight() -> None:
    targets = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 1]])  # ood: 2 and 1
    weights = _balanced(targets, torch.tensor([[2], [1]]), 0.6)
    assert weights.mean(1).tolist() == pytest.approx([1, 1])
    of_output = [float(weights[0][targets[0] == c].sum() / 8) for c in range(3)]
    assert of_output == pytest.approx([0.3, 0.3, 0.4])
    assert float(weights[1, 6] / 8) == pytest.approx(0.6)
    plain = _balanced(targets[:1], torch.tensor([[2]]), None)
    assert [float(plain[0][targets[0] == c].sum()) for c in range(3)] == pytest.approx([2.5, 2.5, 3])
    alone = _balanced(targets[:1], torch.tensor([[3]]), 0.6)  # nothing is rejected
    assert [float(alone[0][targets[0] == c].sum()) for c in range(3)] == pytest.approx([8 / 3] * 3)


def test_a_head_without_own_samples_learns_at_the_same_rate() -> None:
    targets = torch.tensor([[2, 2, 2, 2], [0, 2, 1, 2], [0, 1, 1, 0]])  # ood: 2
    ood = torch.full((3, 1), 2)
    for weights in (_emphasis(targets, ood, 0.6), _balanced(targets, ood, 0.6)):
        assert weights.mean(1).tolist() == pytest.approx([1, 1, 1])
        assert weights[1].tolist() == pytest.approx([1.2, 0.8, 1.2, 0.8])
    assert torch.equal(_emphasis(targets, ood, None), torch.ones(3, 4))


@pytest.mark.parametrize("share", [None, 0.6])
def test_classes_of_a_head_weigh_the_same(share: float | None) -> None:
    """Of ten samples each; by hand, class by class. The *ood* output is 3."""
    cases = [[0, 0, 0, 1, 2, 2, 3, 3, 3, 3], [0, 0, 1, 1, 1, 1, 1, 1, 1, 3], [1] * 9 + [3], [0] * 4 + [2] * 6, [3] * 10]
    found = _balanced(torch.tensor(cases), torch.full((len(cases), 1), 3), share)
    for case, weights in zip(cases, found.tolist(), strict=True):
        rejected, classes = case.count(3), {*case} - {3}
        own = 0.0 if not classes else 1.0 if not rejected else 1 - rejected / 10 if share is None else share
        expected = [10 * (1 - own) / rejected if c == 3 else 10 * own / len(classes) / case.count(c) for c in case]
        assert weights == pytest.approx(expected)


def test_later_back_updates_start_from_refitted_heads() -> None:
    learner: Any = tiny.create("more", memory_size=30, back_update_start="trained")
    for images, labels in TASKS[:2]:
        learner.learn_task(images, labels)
    before = [net.trained_head.clone() for net in learner.tasks]
    learner.add_examples(IMAGES[:6], LABELS[:6])
    for net, then in zip(learner.tasks, before, strict=True):
        now = torch.cat([net.head.weight, net.head.bias[:, None]], 1).detach()
        assert torch.equal(net.trained_head, now) and not torch.equal(now, then)


def test_heads_are_refitted_on_memory_and_new_images() -> None:
    """Full batches without momentum: gradient descent in NumPy gives the same heads."""
    learner: Any = tiny.create(
        "more", memory_size=30, back_update_batch_size=1000, back_update_lr=0.01, back_update_own_share=0.6
    )
    assert isinstance(learner, More)
    for images, labels in TASKS:
        learner.learn_task(images, labels)
    before = [(net.head.weight.detach().double().numpy().copy(), net.head.bias.detach().double().numpy().copy())
              for net in learner.tasks]  # fmt: skip
    stored, columns = learner.memory.images, learner.memory.columns
    images, labels = IMAGES[:6], LABELS[:6]  # of the first two tasks
    learner.add_examples(images, labels)
    first = [0, 2, 5, 6]
    all_columns = np.concatenate([columns, [learner.classes.index(label) for label in labels]])
    pool = np.concatenate([stored, images])
    for k, (weight, bias) in enumerate(before):
        z = learner.features(pool, task=k).astype(np.float64)
        own = (all_columns >= first[k]) & (all_columns < first[k + 1])
        y = np.where(own, all_columns - first[k], len(bias) - 1)
        total = {c: 0.6 / (len(bias) - 1) for c in range(len(bias) - 1)} | {len(bias) - 1: 0.4}
        share = np.array([total[c] / (y == c).sum() for c in y]) / (z**2).mean()
        for _ in range(module.REFIT_EPOCHS * learner.config.back_update_epochs):
            logits = z @ weight.T + bias
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            error = (p - np.eye(len(bias))[y]) * share[:, None]
            weight = weight - 0.01 * module.REFIT_RATE * error.T @ z
            bias = bias - 0.01 * module.REFIT_RATE * error.sum(0)
        change = abs(weight - before[k][0]).max()
        assert change > 1e-3
        np.testing.assert_allclose(learner.tasks[k].head.weight.detach().numpy(), weight, atol=1e-3 * change)
        np.testing.assert_allclose(learner.tasks[k].head.bias.detach().numpy(), bias, atol=1e-3 * change)
