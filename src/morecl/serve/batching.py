"""Requests that arrive together are answered as one batch: a bounded queue and one thread that asks the model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from morecl.images import ImageArray
from morecl.serve.limits import RefusedError

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Item(Generic[Key, Result]):
    images: list[ImageArray]
    key: Key
    future: Future[list[Result]] = field(default_factory=Future)


class Batcher(Generic[Key, Result]):
    """Calls ``answer(images, key)`` for images of many requests at once; only requests with equal keys share a call.

    Args:
        size: images after which a batch is full.
        room: images that may wait; more are refused.
        wait: seconds that the first request of a batch waits for others.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[ImageArray], Key], Sequence[Result]],
        *,
        size: int = 64,
        room: int = 512,
        wait: float = 0.005,
    ):
        self._answer, self._size, self._room, self._wait = answer, size, room, wait
        self._items: deque[_Item[Key, Result]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.waiting = 0  # images in the queue
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def submit(self, images: list[ImageArray], key: Key) -> Future[list[Result]]:
        """One result for each image, later.

        Raises:
            RefusedError: too many images wait already.
        """
        item: _Item[Key, Result] = _Item(images, key)
        with self._changed:
            if self._closed:
                raise RefusedError(503, "the server is stopping")
            if self.waiting + len(images) > self._room:
                raise RefusedError(503, "too many images wait for an answer; try again in a moment", retry_after=1)
            self._items.append(item)
            self.waiting += len(images)
            self._changed.notify_all()
        return item.future

    def close(self) -> None:
        """Answer what waits, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._take():
            self._run([item for item in batch if item.future.set_running_or_notify_cancel()])

    def _take(self) -> list[_Item[Key, Result]]:
        """The next batch: items with equal keys, at least one. Empty: closed, and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            if not self._items:
                return []
            until = time.monotonic() + self._wait
            while self.waiting < self._size and not self._closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            first = self._items.popleft()
            batch, others, count = [first], deque[_Item[Key, Result]](), len(first.images)
            while self._items:
                item = self._items.popleft()
                if item.key == first.key and count + len(item.images) <= self._size:
                    batch.append(item)
                    count += len(item.images)
                else:
                    others.append(item)
            self._items = others
            self.waiting -= count
            return batch

    def _run(self, batch: list[_Item[Key, Result]]) -> None:
        if not batch:
            return
        images = [image for item in batch for image in item.images]
        try:
            results = list(self._answer(images, batch[0].key))
            if len(results) != len(images):
                raise RuntimeError(f"{len(images)} images, {len(results)} results")
        except BaseException as error:
            for item in batch:
                item.future.set_exception(error)
            return
        for item in batch:
            item.future.set_result(results[: len(item.images)])
            del results[: len(item.images)]
