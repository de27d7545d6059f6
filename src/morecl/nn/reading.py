"""Batches of images that are not on the device, read by threads while earlier ones are computed with."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from morecl.pictures import Pictures, Rows

DEPTH = 3  # batches that are read ahead
THREADS = 2

Key = Tensor | tuple[int, int]  # the indices of a batch (compared by identity), or start and stop


class ReadAhead:
    """``images`` as tensors on ``device``, batch by batch.

    Batches that were announced, and the range that follows the last one, are read ahead into pinned memory and copied
    to the GPU while it computes. All others are read when they are asked for. Threads only read: CUDA is called by the
    thread that asks, because a step may be captured at any moment, which forbids calls by others.
    """

    def __init__(self, images: Pictures, device: torch.device):
        self.images, self.device = images, device
        self._plan: deque[tuple[Key, Rows]] = deque()
        self._batches: deque[_Batch] = deque()  # the next of the plan, being read
        self._following: _Batch | None = None

    def __len__(self) -> int:
        return len(self.images)

    def announce(self, batches: Sequence[Tensor]) -> None:
        """These very tensors (B,) will be passed to :meth:`select`, in this order; others may come in between."""
        rows = torch.cat(list(batches)).cpu() if batches else torch.empty(0, dtype=torch.int64)  # one copy for all
        parts = rows.split([len(batch) for batch in batches])
        self._plan = deque((batch, part.numpy()) for batch, part in zip(batches, parts, strict=True))
        self._batches.clear()
        self._read_ahead()

    def select(self, index: Tensor) -> Tensor:
        """The images ``index`` (B,): uint8 (B, H, W, 3)."""
        if self._batches and self._batches[0].key is index:
            batch = self._batches.popleft()
            self._read_ahead()
        else:
            batch = self._start(index, index.cpu().numpy())
        images = batch.images()
        for later in self._batches:
            later.send()
        return images

    def range(self, start: int, stop: int) -> Tensor:
        """The images start..stop-1."""
        stop = min(stop, len(self))
        batch, self._following = self._following, None
        if batch is None or batch.key != (start, stop):
            batch = self._start((start, stop), np.arange(start, stop))
        after = min(stop + (stop - start), len(self))
        if after > stop:
            self._following = self._start((stop, after), np.arange(stop, after))
        return batch.images()

    def take(self, rows: Tensor) -> ReadAhead:
        """Of the images ``rows`` (B,) alone; none is read yet."""
        return ReadAhead(self.images.rows(rows.cpu().numpy()), self.device)

    def _read_ahead(self) -> None:
        while self._plan and len(self._batches) < DEPTH:
            self._batches.append(self._start(*self._plan.popleft()))

    def _start(self, key: Key, rows: Rows) -> _Batch:
        return _Batch(key, rows, self.images, self.device, self._pool)

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="morecl-read")


class _Batch:
    """One batch on its way: read into memory by a thread, then sent to the device."""

    def __init__(self, key: Key, rows: Rows, images: Pictures, device: torch.device, pool: ThreadPoolExecutor):
        self.key, self._device = key, device
        shape = (len(rows), *images.shape[1:])
        self._buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._read: Future[None] = pool.submit(images.read, rows, self._buffer.numpy())
        self._sent: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def send(self) -> None:
        """If it has been read, start the copy to the GPU, beside what is computed there."""
        if self._device.type != "cuda" or self._sent is not None or not self._read.done():
            return
        self._read.result()
        with torch.cuda.device(self._device), torch.cuda.stream(_copies(self._device)):
            self._sent = self._buffer.to(self._device, non_blocking=True)
            self._arrival = _copies(self._device).record_event()

    def images(self) -> Tensor:
        """On the device; waits until it has been read."""
        self._read.result()
        self.send()
        if self._sent is None or self._arrival is None:
            return self._buffer.to(self._device)
        now = torch.cuda.current_stream(self._device)
        now.wait_event(self._arrival)
        self._sent.record_stream(now)
        return self._sent


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all copies."""
    return torch.cuda.Stream(device)
