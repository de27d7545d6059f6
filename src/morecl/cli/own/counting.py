"""A progress line on stderr for a stream of answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.live import Live

from morecl.progress import Clock, ProgressLine, time_left

T = TypeVar("T")


def counted_off(items: Iterable[T], total: Callable[[], int | None]) -> Iterator[T]:
    """``items``, with a progress line while they come if stderr is a terminal.

    Args:
        total: how many there will be, ``None`` if nobody knows; only asked if it is shown.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    progress = Counting(total())
    live = Live(
        console=console, get_renderable=progress.line, refresh_per_second=4, transient=True, redirect_stdout=False
    )
    with live:
        for item in items:
            progress.done += 1
            yield item


class Counting:
    """How many images are done, of how many."""

    def __init__(self, total: int | None, clock: Clock = time.monotonic):
        self.total = total
        self.done = 0
        self._clock = clock
        self._started = clock()

    def line(self) -> ProgressLine:
        speed = self.done / max(self._clock() - self._started, 1e-9)
        of = "" if self.total is None else f"/{self.total:,}"
        return ProgressLine(
            share=None if self.total is None else self.done / max(1, self.total),
            title=f"{self.done:,}{of} images",
            speed=f"{speed:.0f} img/s" if self.done else "",
            left=time_left(max(0, self.total - self.done) / speed) if self.total is not None and self.done else "",
        )
