"""RanPAC: only the first task trains; a ridge classifier over all classes from sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from morecl.methods.ranpac import Ranpac
from morecl.random import generator
from morecl.task import TaskData
from tiny import images_of, learner_of, teach


def test_only_the_first_task_trains() -> None:
    learner = learner_of(Ranpac, projection=40)
    before = {key: value.clone() for key, value in learner.model.state_dict().items()}
    teach(learner, (0, 1))
    after = {key: value.clone() for key, value in learner.model.state_dict().items()}
    assert not torch.equal(before["adapters.w2"], after["adapters.w2"])
    teach(learner, (2, 3), (4,))
    assert learner.model.state_dict().keys() == after.keys()
    for key, value in learner.model.state_dict().items():
        assert torch.equal(value, after[key]), key
    assert learner.networks() == ["after task 1"]


def test_weights_are_those_of_all_images_at_once() -> None:
    learner = teach(learner_of(Ranpac, projection=30), (0, 1), (2,), (3, 4))
    parts = [images_of(*classes) for classes in ((0, 1), (2,), (3, 4))]
    z = torch.cat([learner.embed(learner.prepare(x), "after task 1") for x, _ in parts])
    ridge = learner.rule.ridge
    phi = ridge.random_features(z).double().numpy()
    onehot = np.eye(5)[np.concatenate([labels for _, labels in parts])]
    candidates = [np.linalg.solve(phi.T @ phi + 10.0**e * np.eye(30), phi.T @ onehot) for e in range(-8, 9)]
    errors = [np.abs(ridge.weight.numpy() - expected).max() / np.abs(expected).max() for expected in candidates]
    assert min(errors) < 1e-5


def test_the_strength_is_that_of_least_held_out_error(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = teach(learner_of(Ranpac, projection=50), (0, 1))
    targets = torch.arange(40) % 2
    images = np.zeros((40, 8, 8, 3), np.uint8)
    task = TaskData(index=1, images=images, targets=targets, classes=2, first_column=2)
    rng = np.random.default_rng(0)
    features = torch.from_numpy(rng.normal(size=(40, learner.network.dim))).float()
    features[:, :2] += 5 * torch.nn.functional.one_hot(targets, 2)
    order = torch.randperm(40, generator=generator(0, "ridge strength", 1))
    phi = learner.rule.ridge.random_features(features[order]).double().numpy()
    onehot = np.eye(2)[targets[order]]
    errors = []
    for exponent in range(-8, 9):
        weight = np.linalg.solve(phi[:32].T @ phi[:32] + 10.0**exponent * np.eye(50), phi[:32].T @ onehot[:32])
        errors.append(((phi[32:] @ weight - onehot[32:]) ** 2).sum())
    expected = 10.0 ** (int(np.argmin(errors)) - 8)
    assert learner.rule._strength(features, task) == expected
    monkeypatch.setattr("morecl.methods.ranpac.RANDOM_FEATURES_AT_ONCE", 0)
    monkeypatch.setattr("morecl.methods.ranpac.held_out_errors", None)
    assert learner.rule._strength(features, task) == expected, "too many images to hold all random features at once"


def test_the_largest_output_tells_how_well_an_image_is_known() -> None:
    learner = teach(learner_of(Ranpac, projection=30), (0, 1), (2,))
    x, _ = images_of(0, 1, 2, 3, each=3)
    outputs, answer = learner.scores(x), learner.predict(x)
    np.testing.assert_allclose(answer.ood_score, -outputs.max(1), rtol=1e-6)
    np.testing.assert_allclose(answer.confidence, 1 / np.exp(outputs - outputs.max(1)[:, None]).sum(1), rtol=1e-6)


def test_sums_are_counted_as_kept_and_weights_are_not() -> None:
    learner = teach(learner_of(Ranpac, projection=30), (0, 1), (2,))
    scale_place_and_sharpness = 3
    assert learner.entries()["statistics"] == 30 * 31 // 2 + 3 * 30 + scale_place_and_sharpness
