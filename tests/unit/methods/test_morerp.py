"""MORE-RP: MORE's networks, a ridge classifier over all classes, few networks asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import morecl
from morecl.catalogue import SHIPPED
from morecl.classifier.calibration import fit_temperature, softmax
from morecl.kernel_ridge import KERNEL_STRENGTHS
from morecl.methods import more
from morecl.methods.more import More
from morecl.methods.morerp import NOT_ASKED, Morerp
from morecl.scoring import Features
from tiny import images_of, learner_of, teach

STREAM = ((0, 1), (2, 3), (4,), (5, 6), (7, 8))


SUMS = 60  # random features


def morerp(**settings: Any) -> Any:
    return learner_of(Morerp, memory_size=20, **settings)


def images(count: int = 24) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def ours() -> Any:
    return teach(morerp(), *STREAM)


@pytest.fixture(scope="module")
def mores() -> Any:
    return teach(learner_of(More, memory_size=20), *STREAM)


def asking(learner: Any, asked: int | None, weight: float = 0.7) -> Any:
    """The same learner with another number of networks asked and another weight of the ridge."""
    learner.rule.asked = asked
    learner.rule.weight = weight
    return learner


def test_the_networks_are_mores(ours: Any, mores: Any) -> None:
    for key, value in mores.model.state_dict().items():
        assert torch.equal(value, ours.model.state_dict()[key]), key
    assert np.array_equal(ours.features(images(), 2), mores.features(images(), 2))


def test_known_is_mores_largest_score_and_the_kernels_if_all_networks_are_asked(ours: Any, mores: Any) -> None:
    known = -asking(ours, None).predict(images()).ood_score
    z = ours.embed(ours.prepare(images()), ours.rule.network)
    expected = np.log(-mores.predict(images()).ood_score) + ours.rule.ridge(z).amax(1).numpy()
    assert np.allclose(known, expected, atol=1e-6)
    sums = teach(morerp(projection=SUMS, asked=None), *STREAM)
    assert np.allclose(-sums.predict(images()).ood_score, np.log(-mores.predict(images()).ood_score), atol=1e-6)


def test_without_weight_the_ridge_has_no_say(ours: Any, mores: Any) -> None:
    assert asking(ours, None, weight=0).predict(images()).labels == mores.predict(images()).labels


def test_only_the_networks_that_the_ridge_ranks_highest_are_asked() -> None:
    """The number of passes does not grow with the tasks. Classes of other tasks are never the answer: they come behind,
    as if their networks were as sure as the least sure of those that were asked."""
    taught = teach(morerp(backbone=SHIPPED, image_size=16), *STREAM)  # its images fill up no shared passes
    everything = asking(taught, None).scores(images())
    learner = asking(taught, 2)
    seen: list[int] = []
    with learner.network.observe_features(lambda features: seen.append(len(features))):
        scores = learner.scores(images())
    assert sum(seen) == len(images()) * (1 + 2)
    _, outputs = learner.rule.compare(learner.embed(learner.prepare(images()), learner.rule.network))
    ridge, task = outputs.numpy(), learner.task_of_column()
    mores = everything - learner.rule.weight * ridge
    for row in range(len(images())):
        by_task = [np.logaddexp.reduce(ridge[row, task == k]) for k in range(len(STREAM))]
        asked = np.isin(task, np.argsort(by_task)[-2:])
        expected = everything[row].copy()
        least_sure = min(mores[row, task == k].max() for k in set(task[asked].tolist()))
        behind = np.minimum(least_sure + learner.rule.weight * ridge[row], expected[asked].max() - 1e-3)
        expected[~asked] = behind[~asked]
        assert np.allclose(scores[row], expected, atol=1e-4) and asked[scores[row].argmax()]


def test_a_true_class_that_was_not_asked_leaves_the_confidence_alone(ours: Any) -> None:
    """One such image among 24: were its score out of reach, only an infinite temperature would do."""
    scores = asking(ours, 1).scores(images())
    task, columns = ours.task_of_column(), scores.argmax(1)
    lowest = np.array(
        [[scores[row, task == k].max() for k in range(len(STREAM))] for row in range(len(scores))]
    ).argmin(1)
    columns[0] = np.flatnonzero(task == lowest[0])[0]
    confidence = softmax(scores, fit_temperature(scores, columns)).max(1)
    assert confidence.mean() > 0.5


def test_a_model_loaded_in_inference_mode_answers(ours: Any, tmp_path: Path) -> None:
    asking(ours, 3, weight=1.0).save(tmp_path / "model")
    with torch.inference_mode():
        loaded = morecl.load(tmp_path / "model")
        loaded.scores(images())
    assert loaded.predict(images()).labels == asking(ours, 3, weight=loaded.rule.weight).predict(images()).labels


@pytest.mark.parametrize("room", [1 << 20, 0])  # heads of similar tasks together, each by itself
@pytest.mark.parametrize("asked", [2, 4])
def test_scores_of_tasks_of_any_size_are_those_of_each_by_itself(
    asked: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = teach(morerp(), (0,), (1, 2, 3, 4, 5), (6, 7), (8,))
    monkeypatch.setattr(more, "FOLDED_BYTES", room)
    groups = [among for among, _ in learner._similar_heads()]
    assert sorted(map(tuple, groups)) == ([(0, 3), (1,), (2,)] if room else [(0,), (1,), (2,), (3,)])
    features = Features(learner, learner.prepare(images()))
    with torch.no_grad():
        chosen = torch.rand(24, 4, generator=torch.Generator().manual_seed(0)).topk(asked, dim=1).indices
        wanted = torch.zeros(24, 4, dtype=torch.bool).scatter_(1, chosen, True)
        found = learner.rule._more_scores(features, wanted)
        alone = [learner.rule._of_task(net, features(str(k)))[1].log() for k, net in enumerate(learner.tasks)]
    expected = torch.cat(alone, 1).where(wanted[:, learner.rule.task_of], torch.tensor(NOT_ASKED, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_asking_all_or_enough_networks_is_the_same(ours: Any) -> None:
    enough = asking(ours, len(STREAM)).scores(images())
    assert np.array_equal(enough, asking(ours, None).scores(images()))


def all_features(learner: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Of all images of the stream under the first network, (N, 2 D), and their columns."""
    assert learner.rule.network == "patches 0"
    parts = [images_of(*classes) for classes in STREAM]
    z = torch.cat([learner.embed(learner.prepare(x), "patches 0") for x, _ in parts])
    assert z.shape[1] == 2 * learner.network.dim
    return z, np.array([learner.classes.index(label) for _, labels in parts for label in labels])


def test_the_kernel_classifier_is_that_of_all_images_under_the_first_network(ours: Any) -> None:
    z, columns = all_features(ours)
    ridge = ours.rule.ridge
    kept = (z.double() / ridge.scale).half()
    assert torch.equal(ridge.features, kept)
    assert np.array_equal(ridge.columns.numpy(), columns)
    a = kept.double().numpy()
    kernel = np.exp(-((a[:, None] - a[None]) ** 2).mean(-1))
    strength = KERNEL_STRENGTHS[int(ridge.place)]
    expected = np.linalg.solve(kernel + strength * np.eye(len(a)), np.eye(len(ours.classes))[columns])
    assert np.allclose(ridge.dual.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_sums_are_those_of_all_images_under_the_first_network() -> None:
    learner = teach(morerp(projection=SUMS), *STREAM)
    z, columns = all_features(learner)
    phi = learner.rule.ridge.random_features(z).double().numpy()
    cross = phi.T @ np.eye(len(learner.classes))[columns]
    assert np.allclose(learner.rule.ridge.cross.numpy(), cross, rtol=1e-5, atol=1e-4)


def test_a_class_that_is_forgotten_and_taught_again_counts_once_in_the_sums(tmp_path: Path) -> None:
    learner = teach(morerp(projection=SUMS), (0, 1), (2,), (3, 4))
    before = learner.rule.ridge.gram.clone()
    learner.forget(2)
    learner.save(tmp_path / "saved")
    again: Any = morecl.load(tmp_path / "saved")
    x, _ = images_of(2)
    again.learn_task(x, ["two"] * len(x))
    assert torch.allclose(again.rule.ridge.gram, before, rtol=1e-5, atol=1e-5 * float(before.max()))
    z = learner.embed(learner.prepare(x), "patches 0")
    phi = again.rule.ridge.random_features(z).double().sum(0)
    assert torch.allclose(again.rule.ridge.cross[:, 5], phi, rtol=1e-4, atol=1e-4)
    assert not again.rule.ridge.cross[:, 2].any()


def test_no_more_features_are_kept_than_asked_for() -> None:
    learner = teach(morerp(kept_features=30), (0, 1), (2, 3))  # 8 images of each class
    assert torch.bincount(learner.rule.ridge.columns).tolist() == [7, 7, 7, 7]
    x, y = images_of(0, 1, 2, 3)
    assert np.mean(np.array(learner.predict(x).labels) == y) > 0.9


@pytest.mark.parametrize("projection", [None, SUMS])
def test_a_small_first_task_hands_over_to_a_larger_one(projection: int | None) -> None:
    """One class adapts nothing: the classifier moves to the network of a task with twice as many classes and more."""
    learner = teach(morerp(projection=projection), (0,), (1, 2, 3))
    assert learner.rule.network == "patches 1"
    teach(learner, (4, 5))
    assert learner.rule.network == "patches 1"
    if projection is None:  # all images of a class count for as many as it had, however few stand in for them
        ridge = learner.rule.ridge
        totals = torch.zeros(6).index_add(0, ridge.columns, ridge.weights)
        assert torch.allclose(totals, torch.full((6,), 8.0))
        assert (ridge.columns == 0).sum() < 8
    held = int((learner.memory.columns == 0).sum())
    before = learner.rule.counted.clone()
    assert before[0] > 1 and (before[1:] == 1).all()
    teach(learner, (6, 7, 8))
    assert (learner.memory.columns == 0).sum() < held  # fewer are in memory, but in the sums nothing has changed
    ridge = learner.rule.ridge
    assert torch.equal(learner.rule.counted, torch.cat([before, torch.ones(3)]))
    assert torch.equal(ridge.weights.float(), learner.rule.counted[ridge.columns])


def test_the_classifier_does_not_move_away_from_classes_without_an_image_in_memory() -> None:
    first, second = tuple(range(4)), tuple(range(4, 12))
    for size, network in ((12, "patches 1"), (8, "patches 0")):  # images in memory after the second task
        learner = teach(learner_of(Morerp, memory_size=size), first, second)
        assert learner.rule.network == network
        assert set(learner.rule.ridge.columns.tolist()) == set(range(12))
        held = set(learner.memory.columns.tolist())
        assert (held >= set(first)) == (network == "patches 1")


def test_what_is_computed_from_the_rest_is_not_counted(ours: Any) -> None:
    kept = {name: value.numel() for name, value in ours.rule.state_dict().items()}
    more = learner_of(More, memory_size=20)
    teach(more, *STREAM)
    own = sum(kept.values()) - kept["ridge.dual"] - kept["forgotten"] - kept["mixed"]
    assert ours.entries()["statistics"] - more.entries()["statistics"] == own


def test_tasks_of_unequal_size_are_told_apart() -> None:
    """A head with one class wins too often by MORE's rule; the ridge classifier compares all classes."""
    stream = ((0, 1, 2, 3), (4,), (5, 6, 7, 8, 9), (10,))
    x, y = images_of(*range(11), each=6)
    accuracy = {
        cls: np.mean(np.array(teach(learner_of(cls, memory_size=44, epochs=4), *stream).predict(x).labels) == y)
        for cls in (More, Morerp)
    }
    assert accuracy[Morerp] > accuracy[More] + 0.05
    assert accuracy[Morerp] > 0.9


@pytest.mark.parametrize("projection", [None, SUMS])
def test_mores_networks_can_be_adopted(projection: int | None) -> None:
    trained, fresh = learner_of(More, memory_size=20), morerp(projection=projection)
    adopted = None
    for classes in STREAM[:3]:
        teach(trained, classes)
        teach(fresh, classes)
        config = Morerp.adopted_config(trained, {"projection": projection})
        adopted = Morerp.adopt(trained, config, before=adopted)
        adopted.fit_rule(*images_of(*classes))
    assert adopted is not None
    assert np.array_equal(adopted.scores(images()), fresh.scores(images()))


@pytest.mark.parametrize("projection", [None, SUMS])
def test_an_empty_batch_and_no_memory(projection: int | None) -> None:
    learner = teach(learner_of(Morerp, memory_size=0, projection=projection), (0, 1), (2, 3))
    assert learner.predict(np.empty((0, 8, 8, 3), np.uint8)).labels == []
    assert len(learner.answer(Features(learner, learner.prepare(images(2)))).known) == 2
