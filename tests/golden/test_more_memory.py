"""The replay memory of MORE: never over its budget, balanced, made of what was shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from morecl.memory import ReplayMemory
from morecl.random import generator

Tasks = list[list[int]]  # for each task the number of images of each of its classes


def numbered(first: int, count: int) -> np.ndarray:
    """Images that can be told apart: their number is in their pixels."""
    numbers = np.arange(first, first + count)
    pixels = np.stack([numbers // 256, numbers % 256, np.zeros_like(numbers)], -1).astype(np.uint8)
    return np.broadcast_to(pixels[:, None, None], (count, 2, 2, 3)).copy()


def numbers_of(images: np.ndarray) -> list[int]:
    return [int(image[0, 0, 0]) * 256 + int(image[0, 0, 1]) for image in images]


@given(
    size=st.integers(0, 40),
    tasks=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_budget_balance_and_origin(size: int, tasks: Tasks, seed: int) -> None:
    memory = ReplayMemory(size, [f"class {c}" for c in range(20)], side=2)
    shown: dict[int, set[int]] = {}
    stored: dict[int, set[int]] = {}
    total = column = 0
    for k, counts in enumerate(tasks):
        columns = np.concatenate([np.full(n, column + c) for c, n in enumerate(counts)])
        columns = np.random.default_rng(seed).permutation(columns)
        images = numbered(total, len(columns))
        for number, c in zip(numbers_of(images), columns, strict=True):
            shown.setdefault(int(c), set()).add(number)
        memory.update(images, columns, generator(seed, "memory", k))
        total, column = total + len(columns), column + len(counts)

        assert len(memory) == len(memory.images) == len(memory.labels) <= size
        held = {c: np.flatnonzero(memory.columns == c) for c in range(column)}
        counts_held = {c: len(own) for c, own in held.items()}
        if column <= size:
            assert counts_held == {c: min(size // column, len(shown[c])) for c in range(column)}
        else:  # as many classes as there are places
            assert sorted(counts_held.values()) == [0] * (column - size) + [1] * size
        now = {c: set(numbers_of(memory.images[own])) for c, own in held.items()}
        for c, numbers in now.items():
            assert len(numbers) == len(held[c]), "an image is stored twice"
            assert numbers <= shown[c], "an image is stored under a class it was not shown with"
            assert c not in stored or numbers <= stored[c], "an image that was dropped has come back"
        assert memory.labels == [f"class {c}" for c in memory.columns]
        stored = now


def test_drawn_at_random() -> None:
    """Each of 20 images is among the 5 kept in about a quarter of 400 draws: 100 +- 4 standard deviations (8.7)."""
    kept = np.zeros(20)
    for seed in range(400):
        memory = ReplayMemory(5, ["a"], side=2)
        memory.update(numbered(0, 20), np.zeros(20, np.int64), generator(seed, "memory", 0))
        kept[numbers_of(memory.images)] += 1
    assert (abs(kept - 100) < 35).all()


def test_more_classes_than_places() -> None:
    """Each of 8 classes, in tasks of 3, 3 and 2, is among the 4 that have an image in about half of 400 draws: 200 +- 4
    standard deviations (10)."""
    kept = np.zeros(8)
    for seed in range(400):
        memory = ReplayMemory(4, [f"class {c}" for c in range(8)], side=2)
        for k, columns in enumerate(np.split(np.repeat(np.arange(8), 2), [6, 12])):
            memory.update(numbered(2 * int(columns[0]), len(columns)), columns, generator(seed, "memory", k))
        assert [number // 2 for number in numbers_of(memory.images)] == memory.columns.tolist()
        kept[memory.columns] += 1
    assert kept.sum() == 1600 and (abs(kept - 200) < 40).all()


def test_images_are_copies() -> None:
    images = numbered(0, 4)
    memory = ReplayMemory(4, ["a"], side=2)
    memory.update(images, np.zeros(4, np.int64), generator(0, "memory", 0))
    images[:] = 255
    assert sorted(numbers_of(memory.images)) == [0, 1, 2, 3]


def test_tasks_of_different_image_sizes_share_a_memory() -> None:
    learner = tiny.create("more")
    for k, side in enumerate((8, 21, 8)):
        learner.learn_task(tiny.pictures(k, 5, side=side), [k] * 5)
    assert learner.memory.images.shape == (12, 8, 8, 3)
    assert sorted(learner.memory.labels) == [0] * 4 + [1] * 4 + [2] * 4


def test_no_memory_at_all() -> None:
    learner = tiny.create("more", memory_size=0)
    for k in range(2):
        learner.learn_task(*tiny.task([2 * k, 2 * k + 1], [2 * k, 2 * k + 1], 4))
    assert len(learner.memory) == 0
    assert learner.scores(tiny.pictures(0, 2)).shape == (2, 4)


@pytest.mark.parametrize("method", ["agem", "gd", "hal", "more", "row", "tpl"])
def test_each_task_of_a_learner_has_a_draw_of_its_own(method: str) -> None:
    """With one draw for all tasks the images of a class would be chosen in the same order as those of the first."""
    learner = tiny.create(method, memory_size=6, epochs=1, seed=3)
    expected = ReplayMemory(6, learner.classes, learner.memory.images.shape[1])
    for k, kinds in enumerate([[0, 1], [2], [3, 4]]):
        images, labels = tiny.task(kinds, kinds, 9)
        learner.learn_task(images, labels)
        expected.update(images, np.array([learner.classes.index(y) for y in labels]), generator(3, "memory", k))
        assert np.array_equal(learner.memory.columns, expected.columns), k
        assert np.array_equal(learner.memory.images, expected.images), k
