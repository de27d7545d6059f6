"""Progress of training: learners report each epoch to a listener; :func:`show` is a listener that prints a line.

>>> learner.learn_task(images, labels, morecl.progress.show())
task 1 epoch 3/20 ━━──────── loss 0.41 180 img/s 0:34 left
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segments
from rich.table import Table
from rich.text import Text

Clock = Callable[[], float]  # seconds since any fixed moment

_BAR_WIDTHS = (5, 10)  # smallest, largest
_DROPPED_FIRST = ("title", "loss", "step", "position")  # if the line is too long; bar, speed and time left stay


@dataclass(frozen=True)
class EpochDone:
    """One pass over a task's data is done.

    ``stage`` names an extra stage of a method (a teacher, balancing, back-update). It has its own number of epochs and
    does not count as progress of the task. Empty while the task itself is trained.

    ``images_per_second`` is ``None`` in a stage that does not pass images through the network.
    """

    task: int
    epoch: int  # 1-based
    epochs: int
    loss: float
    images_per_second: float | None
    stage: str = ""

    @property
    def step(self) -> str:
        """``epoch 3/20``, or the stage's name and its epoch."""
        return f"{self.stage or 'epoch'} {self.epoch}/{self.epochs}"

    @property
    def speed(self) -> str:
        """``180 img/s``; empty if there is none."""
        return "" if self.images_per_second is None else f"{self.images_per_second:.0f} img/s"


Listener = Callable[[EpochDone], None]


def silent(event: EpochDone) -> None:
    """Ignore the event."""


def show(console: Console | None = None, clock: Clock = time.monotonic) -> Listener:
    """A listener that prints one line per task and stage and updates it after each epoch.

    Prints to stderr, or to ``console``, and only if that is a terminal.
    """
    console = Console(stderr=True) if console is None else console
    return _Printer(console, clock) if console.is_terminal else silent


Count = Callable[[str, int, int], None]  # what is done, how many of them, out of how many (0: unknown)
_displays: list[Count] = []  # open displays; the last one shows counts


@contextmanager
def shown_by(display: Count) -> Iterator[None]:
    """Inside the block, what :func:`counting` counts goes to ``display``, which has a live line already."""
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)


@contextmanager
def counting(what: str, total: int, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to be called with the number of things done so far.

    Shown by an open display, or else by a line of its own on stderr if that is a terminal; not at all unless
    ``visible``.
    """
    if not visible:
        yield lambda done: None
    elif _displays:
        display = _displays[-1]
        display(what, 0, total)
        yield lambda done: display(what, done, total)
    else:
        from rich.progress import Progress

        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(what, total=total or None)
            yield lambda done: bar.update(task, completed=done)


class TimeLeft:
    """Estimates the time left: the mean time per unit of work so far, times the units left."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self.start(0)

    def start(self, total: int, done: int = 0) -> None:
        """Begin to measure, with ``done`` of ``total`` units done before."""
        self.total = total
        self.done = self._first = done
        self._started = self._reached = self._clock()

    def reach(self, done: int) -> None:
        """``done`` units are done now."""
        self.done = done
        self._reached = self._clock()

    @property
    def share(self) -> float | None:
        """Share of the work that is done, 0 to 1; ``None`` if the amount of work is unknown."""
        return self.done / self.total if self.total else None

    @property
    def seconds(self) -> float | None:
        """``None`` until a unit has been measured. Counts down between units."""
        if self.done <= self._first:
            return None
        per_unit = (self._reached - self._started) / (self.done - self._first)
        return max(0.0, per_unit * (self.total - self.done) - (self._clock() - self._reached))

    def __str__(self) -> str:
        """``12:30 left``."""
        return "--:-- left" if self.seconds is None else time_left(self.seconds)


def time_left(seconds: float) -> str:
    """``12:30 left``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"


@dataclass(frozen=True)
class ProgressLine:
    """Progress on one line of the terminal. If it is too narrow, the least important pieces are left out.

    ``share``: what the bar shows, 0 to 1; ``None`` for a moving bar.
    """

    share: float | None
    title: str = ""
    position: str = ""
    step: str = ""
    loss: str = ""
    speed: str = ""
    left: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        smallest, largest = _BAR_WIDTHS
        names = ["title", "position", "step", "bar", "loss", "speed", "left"]
        texts = {name: getattr(self, name) for name in names if name != "bar"}
        widths = {name: Text(text).cell_len + 1 for name, text in texts.items() if text}
        for name in _DROPPED_FIRST:
            if sum(widths.values()) + smallest > options.max_width:
                widths.pop(name, None)
        room = options.max_width - sum(widths.values())
        bar = ProgressBar(
            total=None if self.share is None else 1.0,
            completed=self.share or 0.0,
            width=max(1, min(largest, room)),
            pulse=self.share is None,
        )
        line = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        kept = [name for name in names if name == "bar" or name in widths]
        for _ in kept:
            line.add_column(no_wrap=True)
        line.add_row(*(bar if name == "bar" else Text(texts[name]) for name in kept))
        yield line


class _Printer:
    """The listener that :func:`show` returns.

    Rewrites its line instead of keeping rich's live display open, because nobody tells a listener that training failed.
    """

    def __init__(self, console: Console, clock: Clock):
        self._console = console
        self._left = TimeLeft(clock)
        self._current: tuple[int, str] | None = None

    def __call__(self, event: EpochDone) -> None:
        if (event.task, event.stage) != self._current:
            self._current = (event.task, event.stage)
            self._left.start(event.epochs, event.epoch)
        self._left.reach(event.epoch)
        finished = event.epoch == event.epochs
        line = ProgressLine(
            share=self._left.share,
            position=f"task {event.task + 1}",
            step=event.step,
            loss=f"loss {event.loss:.2f}",
            speed=event.speed,
            left="" if finished else str(self._left),
        )
        segments = self._console.render_lines(line, pad=False)[0]
        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        self._console.print(Segments(segments))
        if finished:
            self._console.line()
