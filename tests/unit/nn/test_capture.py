"""Answers that are replayed: which calls are captured, how many images they hold, what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from morecl.nn import capture
from morecl.nn.capture import Batch, CapturedStep, Replayed

CPU = torch.device("cpu")


class Rehearsal:
    """A stand-in for :class:`CapturedStep` on any device, which knows whose memory it shares."""

    made: list[Rehearsal]

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch, changed: Sequence[Tensor] = (), **how: Any):
        self.inputs, self.step, self.how = tuple(part.clone() for part in batch), step, how
        self.made.append(self)

    def __call__(self, batch: Batch) -> Tensor:
        for buffer, part in zip(self.inputs, batch, strict=True):
            buffer.copy_(part)
        return self.step(self.inputs)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[Rehearsal]:
    monkeypatch.setattr(Rehearsal, "made", [], raising=False)
    monkeypatch.setattr(capture, "CapturedStep", Rehearsal)
    return Rehearsal.made


def images(count: int, side: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count, side]).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def sums(x: Tensor) -> Tensor:
    return x.double().sum((1, 2, 3))[:, None]


def expected(x: np.ndarray) -> np.ndarray:
    return x.astype(float).sum((1, 2, 3))[:, None]


def test_the_second_call_with_a_shape_is_captured(rehearsed: list[Rehearsal]) -> None:
    replayed = Replayed(CPU)
    for call in range(4):
        x = images(1, seed=call)
        assert np.array_equal(replayed(sums, x), expected(x))
        assert len(rehearsed) == len(replayed) == min(call, 1)
    assert rehearsed[0].how == {"beside": None, "among_threads": True}


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_few_images_are_filled_up_to_the_next_size(count: int, size: int, rehearsed: list[Rehearsal]) -> None:
    seen: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return sums(x)

    replayed = Replayed(CPU)
    for call in range(3):
        x = images(count, seed=call)
        found = replayed(run, x)
        assert np.array_equal(found, expected(x))
        assert seen[-1].shape == (size, 4, 4, 3)
        assert all(np.array_equal(row, x[-1]) for row in seen[-1][count:].numpy())


def test_each_shape_has_its_own_and_all_share_memory(rehearsed: list[Rehearsal]) -> None:
    replayed = Replayed(CPU)
    for count, side in ((1, 4), (2, 4), (1, 6)):
        for seed in range(3):
            x = images(count, side, seed)
            assert np.array_equal(replayed(sums, x), expected(x))
    assert len(replayed) == len(rehearsed) == 3
    assert [step.how["beside"] for step in rehearsed] == [None, rehearsed[0], rehearsed[0]]


def test_no_more_shapes_are_kept_than_fit_and_the_one_used_last_stays(rehearsed: list[Rehearsal]) -> None:
    replayed = Replayed(CPU)
    for side in range(1, capture.SHAPES + 5):
        for seed in range(2):
            replayed(sums, images(1, side, seed))
            replayed(sums, images(2, 3, seed))
    assert len(replayed) == capture.SHAPES
    captured = len(rehearsed)
    assert captured == 1 + capture.SHAPES + 4  # each once
    replayed(sums, images(2, 3))
    assert len(rehearsed) == captured
    replayed(sums, images(1, 1))  # was dropped: is new again
    assert len(rehearsed) == captured


def test_what_was_captured_in_inference_mode_works_outside(rehearsed: list[Rehearsal]) -> None:
    replayed = Replayed(CPU)
    with torch.inference_mode():
        for seed in range(3):
            replayed(sums, images(1, seed=seed))
    assert len(rehearsed) == 1
    assert np.array_equal(replayed(sums, images(1, seed=4)), expected(images(1, seed=4)))


def test_what_cannot_be_captured_is_computed_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*arguments: Any, **how: Any) -> None:
        tried.append(how)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(capture, "CapturedStep", fail)
    replayed = Replayed(CPU)
    replayed(sums, images(1))
    with pytest.warns(UserWarning, match="cannot be captured and take longer: operation not permitted when stream is"):
        assert np.array_equal(replayed(sums, images(1)), expected(images(1)))
    for count in (1, 2, 2, 2):
        assert np.array_equal(replayed(sums, images(count)), expected(images(count)))
    assert len(tried) == 1


def test_threads_take_turns(rehearsed: list[Rehearsal]) -> None:
    """Each thread gets the answer for its own image, though all share one buffer."""
    replayed, busy = Replayed(CPU), threading.Lock()

    def run(x: Tensor) -> Tensor:
        assert busy.acquire(blocking=False), "two at a time"
        found = sums(x)
        for _ in range(20):
            found = found + 0.0
        busy.release()
        return found

    wrong: list[int] = []

    def ask(seed: int) -> None:
        x = images(1, seed=seed)
        for _ in range(50):
            if not np.array_equal(replayed(run, x), expected(x)):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(replayed) == 1


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_replayed_on_new_numbers() -> None:
    weight = torch.randn(5, 3, device="cuda", dtype=torch.float64)

    def step(batch: Batch) -> Tensor:
        return batch[0] @ weight

    first, second = (torch.randn(4, 5, device="cuda", dtype=torch.float64) for _ in range(2))
    captured = CapturedStep(step, (first,))
    for x in (second, first):
        assert torch.equal(captured((x,)).clone(), x @ weight)
    assert torch.equal(captured((second.cpu().pin_memory(),)).clone(), second @ weight)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
def test_on_a_gpu_shapes_take_turns_and_share_memory() -> None:
    replayed = Replayed(torch.device("cuda"))
    for seed in range(5):
        for count, side in ((1, 4), (3, 4), (8, 64), (1, 64), (2, 7)):
            x = images(count, side, seed)
            assert np.array_equal(replayed(sums, x), expected(x))
    assert len(replayed) == 5


WAITING = """
import warnings
import torch
from test_capture import expected, images, sums
from morecl.nn.capture import Replayed

def waits(x):
    return sums(x) * float(x.double().sum() > -1)

device = torch.device("cuda")
replayed, stream = Replayed(device), torch.cuda.current_stream()
for call in range(4):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert (replayed(waits, images(1, seed=call)).numpy() == expected(images(1, seed=call))).all()
    assert ["cannot be captured" in str(warning.message) for warning in told] == ([True] if call == 1 else [])
assert torch.cuda.current_stream() == stream and len(replayed) == 0
other = Replayed(device)
for call in range(4):
    assert (other(sums, images(2, seed=call)).numpy() == expected(images(2, seed=call))).all()
assert len(other) == 1
print("all is well")
"""


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_waits_is_not_captured_and_leaves_all_else_working() -> None:
    """In a process of its own: a capture that fails could harm other tests."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WAITING], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout == "all is well\n", done.stderr


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
def test_on_a_gpu_threads_capture_and_replay_at_the_same_time() -> None:
    """Each thread has its own function and shapes; captures wait for each other, all else goes on."""
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            replayed = Replayed(torch.device("cuda"))
            factor = torch.full((1,), float(seed), device="cuda", dtype=torch.float64)
            for call in range(40):
                x = images(1 + call % 3, 8 + seed, call)
                if not np.array_equal(replayed(lambda x: sums(x) * factor, x), expected(x) * seed):
                    wrong.append(seed)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
