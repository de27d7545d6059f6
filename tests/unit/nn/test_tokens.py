"""Tokens are the same whether they are cached or computed for each batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tiny
from morecl.nn import tokens as module
from morecl.nn.reading import ReadAhead
from morecl.pictures import InMemory, Pictures


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


def unread(images: Any) -> Pictures:
    return Pictures(InMemory(images))


def test_of_images_that_are_not_in_memory_they_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, cached or not."""
    learner, images = tiny.create("ncm"), np.concatenate([tiny.pictures(k, 150) for k in range(2)])
    assert len(images) > module.STEM_BATCH
    index = torch.tensor([3, 0, 299, 3])
    for budget in (module.CPU_CACHE_BYTES, 0):
        monkeypatch.setattr(module, "CPU_CACHE_BYTES", budget)
        held, read = learner.prepare(images), learner.prepare(unread(images))
        assert (held.cache is None) == (read.cache is None) == (budget == 0)
        for tokens in (held, read):
            tokens.ahead([index])
        assert torch.equal(held[index], read[index])
        assert torch.equal(held.range(290, 310), read.range(290, 310))
        assert torch.equal(held.take(index)[torch.tensor([2])], read.take(index)[torch.tensor([2])])


@pytest.mark.parametrize("method", ["agem", "derpp", "eeil", "hal", "hat", "icarl", "more", "owm", "pass"])
def test_what_is_learned_from_unread_images_is_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, when every batch is read on its own."""
    monkeypatch.setattr(module, "CPU_CACHE_BYTES", 0)
    held, read = tiny.create(method), tiny.create(method)
    for k in range(2):
        images, labels = tiny.task([2 * k, 2 * k + 1], [f"a{k}", f"b{k}"], 5)
        held.learn_task(images, labels)
        read.learn_task(unread(images), labels)
    tiny.assert_same(tiny.snapshot(held), tiny.snapshot(read))
    test = tiny.pictures(0, 5, draw=1)
    assert np.array_equal(held.scores(test), read.scores(unread(test)))


def test_unread_images_have_a_budget_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, images = tiny.create("ncm"), tiny.pictures(0, 12)
    monkeypatch.setattr(module, "UNREAD_CACHE_BYTES", 12 * learner.network.prefix_bytes - 1)
    assert learner.prepare(images).cache is not None and learner.prepare(unread(images)).cache is None


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["finetune", "more"])
def test_on_a_gpu_images_that_do_not_fit_are_read_ahead(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through captured steps, too."""
    first, second = (tiny.task([2 * k, 2 * k + 1], [f"a{k}", f"b{k}"], 40) for k in range(2))
    test, scores = tiny.pictures(0, 9, draw=1), []
    for fits, make in ((True, np.asarray), (False, np.asarray), (False, unread)):
        if not fits:
            monkeypatch.setattr(module, "GPU_CACHE_SHARE", 0.0)
        learner = tiny.create(method, device="cuda", epochs=3)
        assert isinstance(learner.prepare(make(first[0])).images, torch.Tensor if fits else ReadAhead)
        for images, labels in (first, second):
            learner.learn_task(make(images), labels)
        scores.append(learner.scores(test))
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-2)
    np.testing.assert_allclose(scores[2], scores[1], rtol=1e-2)
