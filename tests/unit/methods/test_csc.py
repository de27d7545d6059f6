from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

import tiny
from morecl.methods.csc import Csc
from morecl.methods.ncm import Ncm

TASKS = tiny.task([0, 1], ["a", "b"], 5), tiny.task([2, 3, 4], ["c", "d", "e"], 5)


def taught(cls: type[Csc] | type[Ncm]) -> Csc | Ncm:
    one = cls(cls.Config.parse({"image_size": 8, "device": "cpu", "precision": "fp32"}))
    for images, labels in TASKS:
        one.learn_task(images, labels)
    return one


def test_scores_are_cosines_with_the_class_means() -> None:
    one = taught(Csc)
    images, labels = tiny.task([0, 1], ["a", "b"], 5)
    z = one.features(images).astype(np.float64)
    mean = z[[label == "b" for label in labels]].mean(0)
    expected = z @ mean / np.linalg.norm(z, axis=1) / np.linalg.norm(mean)
    assert np.allclose(one.scores(images)[:, 1], expected, atol=1e-9)
    ood = one.predict(images).ood_score
    p = np.exp(one.scores(images))
    assert np.allclose(-ood, (p / p.sum(1, keepdims=True)).max(1))


def test_ncm_measures_the_distance_to_the_class_means() -> None:
    one = taught(Ncm)
    images, labels = np.concatenate([x for x, _ in TASKS]), [label for _, y in TASKS for label in y]
    z = one.features(images).astype(np.float64)
    means = np.stack([z[[label == name for label in labels]].mean(0) for name in "abcde"])
    distance = np.linalg.norm(z[:, None] - means[None], axis=2)
    assert np.allclose(one.scores(images), -distance, atol=1e-5)
    p = np.exp(-distance) / np.exp(-distance).sum(1, keepdims=True)
    answer = one.predict(images)
    assert np.allclose(answer.ood_score, -p.max(1), atol=1e-6)
    assert np.allclose(answer.confidence, p.max(1), atol=1e-6)


def test_length_does_not_count() -> None:
    one = taught(Csc)
    z = torch.randn(20, one.network.dim, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(one.score([z]).scores, one.score([7 * z]).scores, atol=1e-12)


def test_ncm_and_csc_agree_on_unit_vectors() -> None:
    ncm, csc = taught(Ncm), taught(Csc)
    z = torch.randn(200, ncm.network.dim, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(ncm.score([z]).scores.argmax(1), csc.score([z]).scores.argmax(1))
    z = F.normalize(z.double(), dim=1)
    for one in (ncm, csc):
        one.prototypes.means.copy_(F.normalize(one.prototypes.means, dim=1))
    distance, similarity = ncm.score([z]).scores, csc.score([z]).scores
    assert torch.equal(distance.argmax(1), similarity.argmax(1))
    assert torch.allclose(distance.square(), 2 - 2 * similarity, atol=1e-6)
