"""Answers for a few images on a GPU, where they are really captured."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import morecl
from few_images import (
    assert_equal,
    big,
    every_backbone,
    every_kind,
    images,
    of_backbone,
    of_few,
    pictures,
    taught,
    usual,
)
from tiny import images_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:answers for few images cannot be captured")]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tasks", [1, 5, 12])
@pytest.mark.parametrize("method", ["more", "morerp"])
def test_replayed_answers_are_the_computed_ones_bit_by_bit(method: str, tasks: int, precision: str) -> None:
    learner = big(method, tasks, precision=precision)
    for count in (1, 2, 3, 8):
        for seed in range(4):
            x = pictures(count, seed)
            filled = np.concatenate([x, x[-1:], x[-1:]])[: {3: 4}.get(count, count)]
            found, computed = learner.output(x), of_few(learner, filled)
            for name, value in vars(computed).items():
                assert torch.equal(vars(found)[name], value[:count]), (count, seed, name)
    assert len(learner._derived["replayed"]) == 4


@pytest.mark.parametrize("tasks", [1, 5, 12])
@pytest.mark.parametrize("method", ["more", "morerp"])
def test_replayed_answers_are_those_of_the_usual_way(method: str, tasks: int) -> None:
    learner = big(method, tasks, precision="fp32")
    for count in (1, 2, 8):
        for seed in range(3):
            x = pictures(count, seed)
            assert_equal(learner.output(x), usual(learner, x), 1e-3)


@every_kind
def test_what_is_learned_drops_what_is_captured(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learner = taught(kind, monkeypatch, device="cuda", precision="fp32")
    learner.compiled = False  # would take long and is not what is tested

    def check() -> None:
        for seed in range(4):
            assert_equal(learner.output(images(1, seed)), usual(learner, images(1, seed)), 1e-3)
        assert len(learner._derived["replayed"]) == 1

    check()
    learner.learn_task(*images_of(10, 11, each=4))
    check()
    learner.add_examples(*images_of(0, 3, each=4))
    check()
    label = learner.predict(images(1)).labels[0]
    learner.rename(label, "new")
    assert learner.predict(images(1)).labels == ["new"]
    learner.forget("new")
    check()
    assert "new" not in learner.predict(images(8)).labels
    learner.save(tmp_path / "saved")
    before = learner.scores(images(1))
    loaded = morecl.load(tmp_path / "saved")
    assert loaded.captured
    for _ in range(3):
        np.testing.assert_allclose(loaded.scores(images(1)), before, rtol=1e-3, atol=1e-3)


@every_backbone
def test_every_backbone_is_captured(name: str) -> None:
    learner = of_backbone(name, "cuda")
    for seed in range(3):
        assert_equal(learner.output(pictures(2, seed)), usual(learner, pictures(2, seed)), 1e-3)
    assert len(learner._derived["replayed"]) == 1


def test_other_threads_replay_and_learners_do_not_meet() -> None:
    """Captured in this thread, replayed in others; a learner for each of two, and a third that captures meanwhile."""
    learners = [big("more", 5), big("morerp", 12)]
    x = [pictures(1, seed) for seed in range(6)]
    for learner in learners:
        for _ in range(2):
            learner.predict(x[0])
    expected = [[vars(learner.output(image)) for image in x] for learner in learners]
    wrong: list[object] = []

    def ask(which: int) -> None:
        try:
            for call in range(200):
                found = vars(learners[which].output(x[call % 6]))
                if not all(torch.equal(found[name], value) for name, value in expected[which][call % 6].items()):
                    wrong.append((which, call))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    third = big("more", 3)
    for count in (1, 1, 2, 2, 8, 8):
        third.predict(pictures(count))
    for thread in threads:
        thread.join()
    assert not wrong and len(third._derived["replayed"]) == 3


@pytest.mark.parametrize("method", ["more", "morerp"])
def test_memory_does_not_grow_with_calls_or_shapes(method: str) -> None:
    learner = big(method, 5)

    def ask(rounds: int) -> None:
        for seed in range(rounds):
            for side in (16, 32, 48, 50, 52):
                for count in (1, 2, 8):
                    for _ in range(3):
                        learner.predict(pictures(count, seed, side))

    def used() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    ask(3)  # 15 shapes, more than are kept: captures come and go
    before = used()
    ask(4)
    after = used()
    assert after[0] <= before[0] + 2**20 and after[1] <= before[1] + 2**25
    x = pictures(1)
    for _ in range(3):
        learner.predict(x)
    before = used()
    for _ in range(200):
        learner.predict(x)
    assert used() == before


def test_memory_is_given_back_with_the_learner() -> None:
    def used() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    gc.collect()
    held = []
    for _ in range(4):
        learner = big("morerp", 12)
        for count in (1, 8):
            for _ in range(3):
                learner.predict(pictures(count))
        del learner
        gc.collect()
        held.append(used())
    assert held[-1] <= held[1] + 2**20
