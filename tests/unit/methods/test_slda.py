"""SLDA: linear discriminant analysis from sums over images, whatever the tasks."""

from __future__ import annotations

import numpy as np
import torch

from morecl.methods.slda import Slda, _log_odds
from tiny import images_of, learner_of, teach


def test_scores_are_those_of_discriminant_analysis() -> None:
    learner = teach(learner_of(Slda, shrinkage=0.01), (0, 1), (2,), (3, 4))
    parts = [images_of(*classes) for classes in ((0, 1), (2,), (3, 4))]
    z = np.concatenate([learner.features(x) for x, _ in parts]).astype(np.float64)
    y = np.concatenate([labels for _, labels in parts])
    means = np.stack([z[y == c].mean(0) for c in range(5)])
    covariance = (z - means[y]).T @ (z - means[y]) / len(z)
    precision = np.linalg.inv(0.99 * covariance + 0.01 * np.eye(len(covariance)))
    new = learner.features(images_of(0, 2, 4, each=3)[0]).astype(np.float64)
    distances = [np.einsum("nd,de,ne->n", new - m, precision, new - m) for m in means]
    expected = -0.5 * np.stack(distances, 1)  # what all classes share does not matter
    scores = learner.scores(images_of(0, 2, 4, each=3)[0])
    assert np.allclose(scores - scores[:, :1], expected - expected[:, :1], rtol=1e-6, atol=1e-6)


def test_the_confidence_is_the_largest_softmax_probability() -> None:
    learner = teach(learner_of(Slda, shrinkage=1.0), (0, 1), (2,))  # far from certain
    x, _ = images_of(0, 1, 2, 3, each=3)
    scores, answer = learner.scores(x), learner.predict(x)
    p = 1 / np.exp(scores - scores.max(1)[:, None]).sum(1)
    np.testing.assert_allclose(answer.confidence, p, rtol=1e-6)
    unsure = p < 0.9
    assert unsure.any()
    np.testing.assert_allclose(answer.ood_score[unsure], -np.log(p[unsure] / (1 - p[unsure])), rtol=1e-5)


def test_tasks_do_not_matter() -> None:
    x, _ = images_of(0, 3, each=4)
    rng = np.random.default_rng(0)
    images, labels = images_of(0, 1, 2, 3)
    at_once = learner_of(Slda)
    order = rng.permutation(len(images))
    at_once.learn_task(images[order], np.array(labels)[order])
    one_by_one = learner_of(Slda)
    for c in at_once.classes:
        own = np.array(labels) == c
        one_by_one.learn_task(images[own], np.array(labels)[own])
    expected = at_once.scores(x)
    # features of other batches are rounded differently, and the inverse of an almost singular matrix makes more of it
    assert np.abs(one_by_one.scores(x) - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_ood_score_ranks_as_the_softmax_does_and_does_not_round_to_one() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 4, generator=draw, dtype=torch.float64)
    p = scores.softmax(1).amax(1)
    assert torch.allclose(_log_odds(scores), (p / (1 - p)).log())
    sharp = 300 * scores  # p is 1 - 1e-20 for most
    assert (sharp.softmax(1).amax(1) == 1).float().mean() > 0.5
    assert len(_log_odds(sharp).unique()) == 200
    assert (_log_odds(scores[:, :1]) == 0).all()  # one class: the softmax says nothing


def test_unknown_images_are_ranked_although_all_answers_are_certain() -> None:
    learner = teach(learner_of(Slda), (0, 1), (2, 3))
    answer = learner.predict(images_of(0, 1, 2, 3, 4, 5, each=4)[0])
    assert len(np.unique(answer.ood_score)) == len(answer.ood_score)


def test_means_and_scatter_are_counted_as_kept() -> None:
    learner = teach(learner_of(Slda), (0, 1), (2,))
    dim = learner.network.dim
    assert learner.entries()["statistics"] == 3 * dim + dim**2 + 1  # the last: the number of images
