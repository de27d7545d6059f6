"""Tokens are the same whether they are cached or computed for each batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from morecl.nn import tokens as module


def test_cached_and_computed_tokens_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, images = tiny.create("ncm"), tiny.pictures(0, 12)
    cached = learner.prepare(images)
    monkeypatch.setattr(module, "CPU_CACHE_BYTES", 0)
    computed = learner.prepare(images)
    assert cached.cache is not None
    assert computed.cache is None
    index = torch.tensor([3, 0, 11, 3])
    # a batch of another size may be summed in another order: float32 rounding only
    torch.testing.assert_close(computed[index], cached[index], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(computed.range(5, 9), cached.range(5, 9), rtol=1e-5, atol=1e-6)


def test_what_was_learned_does_not_depend_on_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    task, test = tiny.task([0, 1], ["a", "b"], 6), tiny.pictures(0, 4, draw=1)
    scores = []
    for budget in (module.CPU_CACHE_BYTES, 0):
        monkeypatch.setattr(module, "CPU_CACHE_BYTES", budget)
        learner = tiny.create("more")
        learner.learn_task(*task)
        scores.append(learner.scores(test))
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-3)


def test_with_a_trained_backbone_they_are_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resized and normalised; the budget counts their bytes."""
    learner, images = tiny.create("finetune", freeze_backbone=False), tiny.pictures(0, 12, side=11)
    size = 12 * 3 * 8 * 8 * 4
    for budget, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr(module, "CPU_CACHE_BYTES", budget)
        tokens = learner.prepare(images)
        assert (tokens.cache is not None) == fits
        index = torch.tensor([3, 0, 11, 3])
        expected = learner.preprocess(torch.from_numpy(images))
        torch.testing.assert_close(tokens[index], expected[index])
        torch.testing.assert_close(tokens.range(5, 9), expected[5:9])
