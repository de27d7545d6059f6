"""Which images are held back and kept, and how duplicates are found."""

from __future__ import annotations

import numpy as np
import pytest

from morecl.classifier import holding
from morecl.classifier.holding import HeldBack, Seen, choose, fingerprints
from morecl.random import generator


def test_a_fifth_of_each_class_is_held_back() -> None:
    names = ["a"] * 20 + ["b"] * 4 + ["c"] * 5 + ["d"] * 2000
    held = choose(names, seed=0, lesson=0)
    assert held.tolist() == sorted(held.tolist())
    counts = {name: sum(names[i] == name for i in held) for name in "abcd"}
    assert counts == {"a": 4, "b": 0, "c": 1, "d": 100}
    assert np.array_equal(held, choose(names, seed=0, lesson=0))
    assert not np.array_equal(held, choose(names, seed=1, lesson=0))
    assert not np.array_equal(held, choose(names, seed=0, lesson=1))


def test_few_further_images_of_known_classes_are_held_back_together() -> None:
    names = ["a", "b", "c", "a", "b", "b", "d"] + ["e"] * 10
    held = choose(names, seed=0, lesson=3, known=True)
    assert (held < 7).sum() == 1 and (held >= 7).sum() == 2
    assert np.array_equal(held[held >= 7], choose(names, seed=0, lesson=3))  # of the others as without
    assert len({choose(names, seed=0, lesson=n, known=True)[0] for n in range(50)}) == 7  # any of them
    assert [len(choose(["a"] * n, seed=0, lesson=0, known=True)) for n in range(6)] == [0, 0, 0, 1, 1, 1]
    assert len(choose([f"{i // 4}" for i in range(1600)], seed=0, lesson=0, known=True)) == 320


def test_the_same_picture_is_found_again() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    images[3] = images[1]
    prints = fingerprints(images)
    assert prints[3] == prints[1] and len(set(prints.tolist())) == 5
    assert fingerprints(images[:, ::-1][:, ::-1])[0] == prints[0]
    assert len(fingerprints(images[:0])) == 0


def test_a_spent_budget_leaves_each_class_an_equal_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "BUDGET", 24 * 12)  # images of 2 x 2 pixels
    images = np.arange(40, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 2, 2, 3), np.uint8)
    held = HeldBack.none(2).with_more(images[:20], np.zeros(20, np.int64), generator(0))
    assert len(held) == 20
    held = held.with_more(images[20:], np.repeat([1, 2], [17, 3]), generator(0))
    assert held.counts(4).tolist() == [8, 8, 3, 0]
    assert all(image[0, 0, 0] // 20 == (column > 0) for image, column in zip(held.images, held.columns, strict=True))
    assert held.without(1).counts(3).tolist() == [8, 0, 3]


def test_what_is_kept_of_a_class_is_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 20 images is among the 8 kept in 40 % of 300 draws: 120 +- 4 standard deviations (8.5)."""
    monkeypatch.setattr(holding, "BUDGET", 8 * 12)
    images = np.arange(20, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 2, 2, 3), np.uint8)
    columns, kept = np.zeros(20, np.int64), np.zeros(20)
    for seed in range(300):
        held, again = (HeldBack.none(2).with_more(images, columns, generator(seed)) for _ in range(2))
        assert np.array_equal(held.images, again.images)
        kept[held.images[:, 0, 0, 0]] += 1
    assert kept.sum() == 2400 and (abs(kept - 120) < 34).all()


def test_a_class_keeps_a_few_whatever_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "BUDGET", 1)
    held = HeldBack.none(2).with_more(np.zeros((30, 2, 2, 3), np.uint8), np.arange(30) % 3, generator(0))
    assert held.counts(3).tolist() == [5, 5, 5]


def test_pictures_of_a_class_can_be_taken_in_again_once_it_is_forgotten() -> None:
    seen = Seen.nothing().with_more(np.arange(4, dtype=np.uint64), np.array([0, 1, 0, 1]))
    assert seen.without(1).prints.tolist() == [0, 2]
