from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

import tiny
from morecl.methods.csc import Csc
from morecl.methods.ncm import Ncm


def taught(cls: type[Csc] | type[Ncm]) -> Csc | Ncm:
    one = cls(cls.Config.parse({"image_size": 8, "device": "cpu", "precision": "fp32"}))
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 5))
    one.learn_task(*tiny.task([2, 3, 4], ["c", "d", "e"], 5))
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
