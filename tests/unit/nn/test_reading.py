"""Reading ahead: the same images as without, read before they are asked for."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from morecl.nn.reading import DEPTH, ReadAhead
from morecl.pictures import InMemory, Pictures

ARRAY = np.random.default_rng(0).integers(0, 256, (30, 4, 4, 3)).astype(np.uint8)
CPU = torch.device("cpu")


class Watched(InMemory):
    """Keeps what was read, by which thread."""

    def __init__(self, array: Any):
        super().__init__(array)
        self.asked: list[list[int]] = []
        self.threads: set[int] = set()

    def read(self, rows: Any, out: Any) -> None:
        self.threads.add(threading.get_ident())
        super().read(rows, out)
        self.asked.append(rows.tolist())


def wait_for(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited in vain")


@pytest.fixture
def source() -> Watched:
    return Watched(ARRAY)


def test_announced_batches_are_read_before_they_are_asked_for(source: Watched) -> None:
    images = ReadAhead(Pictures(source), CPU)
    batches = torch.randperm(30, generator=torch.Generator().manual_seed(0)).split(4)
    images.announce(batches)
    wait_for(lambda: len(source.asked) == DEPTH)
    for number, index in enumerate(batches):
        assert torch.equal(images.select(index), torch.from_numpy(ARRAY)[index])
        wait_for(lambda number=number: len(source.asked) == min(len(batches), DEPTH + number + 1))
    assert sorted(map(tuple, source.asked)) == sorted(tuple(index.tolist()) for index in batches), "each once"
    assert threading.get_ident() not in source.threads


def test_others_may_be_asked_for_in_between(source: Watched) -> None:
    images = ReadAhead(Pictures(source), CPU)
    batches = torch.arange(12).split(4)
    images.announce(batches)
    other, equal = torch.tensor([29, 0]), batches[0].clone()
    for index in (other, equal, batches[0], other, batches[2], batches[1]):  # equal tensors are not the same
        assert torch.equal(images.select(index), torch.from_numpy(ARRAY)[index])


def test_a_new_plan_replaces_the_old_one(source: Watched) -> None:
    images = ReadAhead(Pictures(source), CPU)
    first, second = torch.arange(20).split(5), torch.arange(20).flip(0).split(5)
    images.announce(first)
    images.select(first[0])
    wait_for(lambda: len(source.asked) == 4)
    images.announce(second)
    wait_for(lambda: len(source.asked) == 4 + DEPTH)
    for index in second:
        assert torch.equal(images.select(index), torch.from_numpy(ARRAY)[index])
    images.announce([])


def test_the_range_that_follows_is_read_ahead(source: Watched) -> None:
    images = ReadAhead(Pictures(source), CPU)
    for start in range(0, 30, 8):
        assert torch.equal(images.range(start, start + 8), torch.from_numpy(ARRAY)[start : start + 8])
        following = [*range(start + 8, min(start + 16, 30))]
        wait_for(lambda following=following: not following or following in source.asked)
    assert sorted(source.asked) == [[*range(a, min(a + 8, 30))] for a in (0, 8, 16, 24)], "each once"
    for start, stop in ((3, 7), (20, 24), (3, 7)):  # not what follows
        assert torch.equal(images.range(start, stop), torch.from_numpy(ARRAY)[start:stop])
    assert torch.equal(images.take(torch.tensor([5, 2])).range(0, 9), torch.from_numpy(ARRAY)[[5, 2]])


def test_an_error_while_reading_reaches_the_one_who_asks() -> None:
    class Broken(InMemory):
        def read(self, rows: Any, out: Any) -> None:
            raise OSError("the disk is gone")

    images = ReadAhead(Pictures(Broken(ARRAY)), CPU)
    batches = torch.arange(8).split(4)
    images.announce(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        images.select(batches[0])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    images = ReadAhead(Pictures(InMemory(ARRAY)), device)
    expected = torch.from_numpy(ARRAY).to(device)
    for _ in range(20):
        batches = torch.randperm(30, device=device).split(4)
        images.announce(batches)
        for index in batches:
            found = images.select(index)
            assert found.device.type == "cuda"
            assert torch.equal(found, expected[index])
        assert torch.equal(images.range(3, 9), expected[3:9])
