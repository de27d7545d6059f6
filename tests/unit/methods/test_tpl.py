"""TPL: the networks it trains, and Eq. 1-11 against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tiny
from morecl import gaussian
from morecl.methods import masked, tpl
from morecl.methods.tpl import Tpl, TplRule

FIRST, SECOND, THIRD = (
    tiny.task([0, 1], ["a", "b"], 8),
    tiny.task([2, 3, 4], ["c", "d", "e"], 8),
    tiny.task([5], ["f"], 8),
)
TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(6)])


def learner(**changes: Any) -> Tpl:
    one = tiny.create("tpl", memory_size=18, **changes)
    assert isinstance(one, Tpl)
    return one


@pytest.fixture(scope="module")
def taught() -> Tpl:
    one = learner()
    for task in (FIRST, SECOND, THIRD):
        one.learn_task(*task)
    return one


def features(one: Tpl, images: np.ndarray) -> list[torch.Tensor]:
    return one.embed_all(one.prepare(images))


# ---- training -----------------------------------------------------------------------------------------------------


def test_a_head_has_a_column_for_every_class_seen(taught: Tpl) -> None:
    assert [net.head.out_features for net in taught.tasks] == [2, 5, 6]


def test_replayed_images_keep_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    one, seen = learner(), list[int]()
    one.learn_task(*FIRST)
    entropy = F.cross_entropy

    def spy(logits: torch.Tensor, targets: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.extend(targets.tolist())
        return entropy(logits, targets, **kwargs)

    monkeypatch.setattr(masked.F, "cross_entropy", spy)
    monkeypatch.setattr(tpl, "CALIBRATION_STEPS", 0)
    one.learn_task(*SECOND)
    counts = np.bincount(seen, minlength=5)
    assert counts[:2].sum() == 3 * 8  # three batches of the task, each with eight from memory
    assert counts[2:].tolist() == [8, 8, 8]
    assert (counts[:2] > 0).all()


def test_training_is_nesterovs_with_weight_decay() -> None:
    """One step from the same start, with and without decay, differs by what torch's rule says."""
    one, other = learner(batch_size=64, weight_decay=0.01), learner(batch_size=64, weight_decay=0.0)
    one.learn_task(*FIRST)
    other.learn_task(*FIRST)
    start = learner()
    start.task_sizes.append(2)
    start._grow(2)
    weight = start.tasks[0].norms.weight.detach()
    moved = other.tasks[0].norms.weight.detach() - weight
    decay = -0.005 * 0.01 * weight * (1 + 0.9)  # g + momentum v, and v = g in the first step
    torch.testing.assert_close(one.tasks[0].norms.weight.detach() - weight, moved + decay, rtol=0, atol=2e-6)


def test_features_of_finished_tasks_stay_bit_identical_under_weight_decay() -> None:
    one = learner(weight_decay=0.5, lr=0.02)
    one.learn_task(*FIRST)
    before = one.features(TEST, task=0)
    adapters = {name: p.detach().clone() for name, p in one.adapters.named_parameters()}
    one.learn_task(*SECOND)
    assert np.array_equal(one.features(TEST, task=0), before)
    assert any(not torch.equal(p, adapters[name]) for name, p in one.adapters.named_parameters())


# ---- the rule -----------------------------------------------------------------------------------------------------


def by_hand(one: Tpl, images: np.ndarray, k: int) -> np.ndarray:
    """Eq. 9 as the authors compute it, for task ``k``, written image by image."""
    task = (FIRST, SECOND, THIRD)[k]
    first, size = sum(one.task_sizes[:k]), one.task_sizes[k]
    head = one.tasks[k].head
    train = one.features(task[0], task=k)
    targets = torch.tensor([one.classes.index(label) - first for label in task[1]])
    g = gaussian.estimate(torch.from_numpy(train), targets, size)
    precision = gaussian.precision(g).numpy()

    def largest_logit(z: np.ndarray) -> float:
        return float(head(torch.from_numpy(z)).detach().double()[first : first + size].max())

    def inverse(z: np.ndarray) -> float:
        return max(20 / float((z - mean) @ precision @ (z - mean)) for mean in g.means.numpy())

    logit_scale = max(np.mean([largest_logit(z) for z in train]), tpl.MIN_SCALE)
    inverse_scale = 20 * float(tpl.held_out_mean(torch.from_numpy(train), targets, g, torch.from_numpy(precision)))
    others = np.array([c < first or c >= first + size for c in one.memory.columns])
    replayed = one.features(one.memory.images[others], task=k).astype(np.float64)
    replayed /= np.linalg.norm(replayed, axis=1, keepdims=True)
    scores = []
    for z in one.features(images, task=k):
        md, logit = inverse(z) / inverse_scale, largest_logit(z) / logit_scale
        unit = z.astype(np.float64) / np.linalg.norm(z)
        near = np.sort(((replayed - unit) ** 2).sum(1))
        scores.append(-np.log(np.exp(-(md + near[4])) + np.exp(-logit)))
    return np.array(scores)


def test_task_scores_are_those_of_the_equations(taught: Tpl) -> None:
    rule = taught.rule
    assert isinstance(rule, TplRule)
    z = features(taught, TEST)
    with torch.no_grad():
        raw = rule._raw_scores(z, rule._own_logits(z)).numpy()
    for k in range(3):
        np.testing.assert_allclose(raw[:, k], by_hand(taught, TEST, k), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(taught.predict(TEST).ood_score, -raw.max(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mean", ["held-out", "plain"])
def test_the_mean_of_md(mean: str) -> None:
    """The plain one is over all training images and the nearest class of the task, computed here one by one."""
    one = learner(md_mean=mean)
    for k, task in enumerate((FIRST, SECOND, THIRD)):
        one.learn_task(*task)
        first, size = sum(one.task_sizes[:k]), one.task_sizes[k]
        train = one.features(task[0], task=k).astype(np.float64)
        targets = torch.tensor([one.classes.index(label) - first for label in task[1]])
        g = gaussian.estimate(torch.from_numpy(train), targets, size)
        precision = gaussian.precision(g).numpy()
        nearest = [min((z - mu) @ precision @ (z - mu) for mu in g.means.numpy()) for z in train]
        plain = np.mean(1 / np.array(nearest))
        rule = one.rule
        assert isinstance(rule, TplRule)
        assert (float(rule.scales[k, 0]) == pytest.approx(plain, rel=1e-4)) == (mean == "plain")
    assert "md_mean" in type(one.config).with_role("scoring")  # so that trained networks can be rescored


def normal(count: int, dim: int, draw: int) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)


@pytest.mark.parametrize("count", [60, 12], ids=["inverted", "shrunk"])
def test_an_image_is_left_out_of_the_gaussians_in_closed_form(count: int) -> None:
    """Against covariances without the image that are inverted one by one. A class's sum is still divided by all its n,
    and what is shrunk, and how far, is as with all images."""
    dim, classes = 20, 2
    z, targets = normal(count, dim, 0), torch.arange(count) % classes
    g = gaussian.estimate(z, targets, classes)
    r, n = float(gaussian.shrinkage(g)), count // classes
    assert (r == 0) == (count == 60)
    trace = float(torch.trace(g.covariance))
    inverses = []
    for i in range(count):
        others = (targets == targets[i]) & (torch.arange(count) != i)
        mean = z[others].mean(0)
        sums = torch.zeros_like(g.covariance)
        for c in range(classes):
            left = z[(targets == c) & (torch.arange(count) != i)]
            sums += (left - left.mean(0)).T @ (left - left.mean(0))
        without = sums / n / classes
        inverse = torch.linalg.inv((1 - r) * without + r * trace / dim * torch.eye(dim, dtype=torch.float64))
        inverses.append(1 / float((z[i] - mean) @ inverse @ (z[i] - mean)))
    found = float(tpl.held_out_mean(z, targets, g, gaussian.precision(g)))
    assert found == pytest.approx(np.mean(inverses), rel=1e-9)


def test_the_mean_that_is_held_out_is_that_of_new_images() -> None:
    z, new, targets = normal(60, 40, 0), normal(4000, 40, 1), torch.zeros(60, dtype=torch.int64)
    g = gaussian.estimate(z, targets, 1)
    precision = gaussian.precision(g)
    expected = gaussian.mahalanobis(new, g.means, precision).pow(-2).mean()
    plain = gaussian.mahalanobis(z, g.means, precision).pow(-2).mean()
    assert float(tpl.held_out_mean(z, targets, g, precision)) == pytest.approx(float(expected), rel=0.15)
    assert plain > 2 * expected


def test_an_image_that_is_alone_in_its_class_does_not_count() -> None:
    z = normal(9, 4, 0)
    targets = torch.tensor([0] * 8 + [1])
    g = gaussian.estimate(z, targets, 2)
    precision = gaussian.precision(g)
    squares = gaussian.mahalanobis(z[:8], g.means[:1], precision)[:, 0] ** 2
    expected = ((1 / squares - (1 - gaussian.shrinkage(g)) / 14).clamp(min=0) * (7 / 8) ** 2).mean()
    torch.testing.assert_close(tpl.held_out_mean(z, targets, g, precision), expected)
    alone = gaussian.estimate(z[:2], torch.arange(2), 2)
    assert tpl.held_out_mean(z[:2], torch.arange(2), alone, gaussian.precision(alone)).isfinite()


def test_scores_are_log_probabilities_of_the_class_and_of_the_task(taught: Tpl) -> None:
    rule, z = taught.rule, features(taught, TEST)
    assert isinstance(rule, TplRule)
    with torch.no_grad():
        own = rule._own_logits(z)
        scale, shift = rule.calibration.T
        p_task = ((scale * rule._raw_scores(z, own) + shift) / 0.05).softmax(1)
        expected = torch.cat([logits.softmax(1) * p_task[:, k : k + 1] for k, logits in enumerate(own)], 1)
    p = np.exp(taught.scores(TEST))
    np.testing.assert_allclose(p, expected.numpy(), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(p.sum(1), 1)


def test_composition_is_a_soft_minimum_or_the_papers_soft_maximum(taught: Tpl) -> None:
    z = features(taught, TEST)
    raw = []
    for composition in ("minimum", "maximum"):
        config = taught.config.model_copy(update={"composition": composition})
        rule = Tpl(config, taught.backbone)._new_rule()
        for size in taught.task_sizes:
            rule.grow(size)
        rule.load_state_dict(taught.rule.state_dict())
        rule._heads = taught._heads
        with torch.no_grad():
            raw.append(rule._raw_scores(z, rule._own_logits(z)))
    low, high = raw
    # log(e^a + e^b) - (-log(e^-a + e^-b)) = log((e^a + e^b)(e^-a + e^-b)) >= log 4, equal where a = b
    assert (high - low >= np.log(4) - 1e-9).all()


def test_calibration_repairs_a_task_that_claims_too_much() -> None:
    draw = torch.Generator().manual_seed(0)
    tasks = torch.arange(3).repeat_interleave(40)
    scores = F.one_hot(tasks, 3).double() + 0.2 * torch.randn(120, 3, generator=draw, dtype=torch.float64)
    scores[:, 1] += 0.7
    calibration = tpl._calibration(scores, tasks)
    assert calibration.shape == (3, 2) and not calibration.requires_grad
    after = scores * calibration[:, 0] + calibration[:, 1]
    assert F.cross_entropy(after, tasks) < 0.7 * F.cross_entropy(scores, tasks)
    assert (after.argmax(1) == tasks).double().mean() > (scores.argmax(1) == tasks).double().mean()
    assert calibration[1, 1] < min(calibration[0, 1], calibration[2, 1])


def test_calibration_is_gradient_descent_with_momentum() -> None:
    """100 steps at rate 0.01 with momentum 0.8 from scale 1 and shift 0, in NumPy."""
    rng = np.random.default_rng(0)
    tasks = np.arange(30) % 3
    scores = rng.normal(size=(30, 3)) + np.eye(3)[tasks] * [2.0, 0.5, 1.0]
    found = np.stack([np.ones(3), np.zeros(3)])  # scale and shift
    velocity = np.zeros((2, 3))
    for _ in range(100):
        weights = np.exp(scores * found[0] + found[1])
        error = (weights / weights.sum(1, keepdims=True) - np.eye(3)[tasks]) / 30
        velocity = 0.8 * velocity + np.stack([(error * scores).sum(0), error.sum(0)])
        found = found - 0.01 * velocity
    calibration = tpl._calibration(torch.from_numpy(scores), torch.from_numpy(tasks))
    np.testing.assert_allclose(calibration.numpy().T, found, rtol=1e-9, atol=1e-12)


def test_the_calibration_is_fitted_on_the_memory_as_the_task_left_it(taught: Tpl) -> None:
    rule = taught.rule
    assert isinstance(rule, TplRule)
    z = features(taught, taught.memory.images)
    owner = torch.from_numpy(taught.task_of_column()[taught.memory.columns])
    assert torch.equal(rule.owner, owner) and set(owner.tolist()) == {0, 1, 2}
    with torch.no_grad():
        expected = tpl._calibration(rule._raw_scores(z, rule._own_logits(z)), owner)
    torch.testing.assert_close(rule.calibration, expected, rtol=1e-4, atol=1e-4)
    off = learner(calibrate=False)
    off.learn_task(*FIRST)
    off.learn_task(*SECOND)
    assert off.rule.state_dict()["calibration"].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("memory_size", [0, 2])
def test_little_or_no_memory(memory_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer replayed images of other tasks than neighbours are asked for, or none."""
    one = tiny.create("tpl", memory_size=memory_size)
    one.learn_task(*FIRST)
    one.learn_task(*SECOND)
    assert np.isfinite(one.scores(TEST)).all()
    rule = one.rule
    assert isinstance(rule, TplRule)
    z = features(one, TEST)  # type: ignore[arg-type]
    distance = rule._neighbour_distance(1, z[1])
    others = rule.replayed[1][rule.owner != 1]
    if not len(others):
        assert distance.tolist() == [0] * len(TEST)
    else:
        farthest = torch.cdist(F.normalize(z[1], dim=1).double(), others.double()).square().amax(1)
        torch.testing.assert_close(distance, farthest, rtol=1e-5, atol=1e-6)
        monkeypatch.setattr(tpl, "SIMILARITIES_AT_ONCE", 3 * len(others))  # three images at a time
        torch.testing.assert_close(rule._neighbour_distance(1, z[1]), distance, rtol=1e-12, atol=1e-12)


def test_resumes() -> None:
    assert tiny.resumes(lambda: tiny.learner_of(Tpl, memory_size=6, memory_batch_size=4))
