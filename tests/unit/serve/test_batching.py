"""Requests that arrive together become one batch; the queue is bounded; every request gets its own results."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from morecl.serve.batching import Batcher
from morecl.serve.limits import RefusedError


def image(value: int) -> Any:
    return np.full((1, 1, 3), value, np.uint8)


class Asked:
    """Answers an image with its value, and remembers the batches. Closed, it lets nobody through."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.open = threading.Event()
        self.started = threading.Event()

    def __call__(self, images: Sequence[Any], key: str) -> list[int]:
        self.started.set()
        assert self.open.wait(10)
        values = [int(one[0, 0, 0]) for one in images]
        self.batches.append((key, values))
        if 255 in values:
            raise ValueError("a bad one")
        return values


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def batcher(asked: Asked) -> Iterator[Batcher[str, int]]:
    batcher: Batcher[str, int] = Batcher(asked, size=8, room=20, wait=0.01)
    yield batcher
    asked.open.set()
    batcher.close()


def busy(batcher: Batcher[str, int], asked: Asked) -> Future[list[int]]:
    """Keep the thread busy, so that what is submitted next waits together."""
    first = batcher.submit([image(0)], "a")
    assert asked.started.wait(10)
    return first


def test_what_waits_is_answered_together_and_each_gets_its_own(batcher: Batcher[str, int], asked: Asked) -> None:
    first = busy(batcher, asked)
    waiting = [batcher.submit([image(i), image(i + 100)], "a") for i in (1, 2, 3)]
    asked.open.set()
    assert first.result(10) == [0]
    assert [future.result(10) for future in waiting] == [[1, 101], [2, 102], [3, 103]]
    assert asked.batches == [("a", [0]), ("a", [1, 101, 2, 102, 3, 103])]
    assert batcher.waiting == 0


def test_a_batch_holds_no_more_than_its_size_and_only_equal_questions(batcher: Batcher[str, int], asked: Asked) -> None:
    busy(batcher, asked)
    keys = "abaaaaaaaa"
    waiting = [batcher.submit([image(i)], key) for i, key in enumerate(keys)]
    asked.open.set()
    assert [future.result(10) for future in waiting] == [[i] for i in range(len(keys))]
    assert asked.batches[1:] == [("a", [0, 2, 3, 4, 5, 6, 7, 8]), ("b", [1]), ("a", [9])]


def test_a_request_larger_than_a_batch_is_answered_alone(batcher: Batcher[str, int], asked: Asked) -> None:
    asked.open.set()
    assert batcher.submit([image(i) for i in range(12)], "a").result(10) == list(range(12))


def test_a_full_queue_refuses_and_has_room_again_later(batcher: Batcher[str, int], asked: Asked) -> None:
    busy(batcher, asked)
    waiting = [batcher.submit([image(1)] * 10, "a") for _ in range(2)]
    with pytest.raises(RefusedError, match="too many images") as refused:
        batcher.submit([image(1)], "a")
    assert refused.value.status == 503 and refused.value.retry_after
    asked.open.set()
    assert all(future.result(10) for future in waiting)
    assert batcher.submit([image(7)], "a").result(10) == [7]


def test_an_error_reaches_those_who_asked_and_nobody_else(batcher: Batcher[str, int], asked: Asked) -> None:
    busy(batcher, asked)
    bad, same, other = (batcher.submit([image(v)], key) for v, key in ((255, "a"), (1, "a"), (2, "b")))
    asked.open.set()
    for future in (bad, same):
        with pytest.raises(ValueError, match="a bad one"):
            future.result(10)
    assert other.result(10) == [2]


def test_who_has_gone_is_not_asked_about(batcher: Batcher[str, int], asked: Asked) -> None:
    busy(batcher, asked)
    gone, there = batcher.submit([image(1)], "a"), batcher.submit([image(2)], "a")
    assert gone.cancel()
    asked.open.set()
    assert there.result(10) == [2]
    assert asked.batches[1:] == [("a", [2])]


def test_closing_answers_what_waits_and_refuses_the_rest(asked: Asked) -> None:
    batcher: Batcher[str, int] = Batcher(asked, size=8, room=20, wait=10)
    futures = [batcher.submit([image(i)], "a") for i in range(3)]
    asked.open.set()
    batcher.close()
    assert [future.result(0) for future in futures] == [[0], [1], [2]]
    with pytest.raises(RefusedError, match="stopping"):
        batcher.submit([image(1)], "a")
