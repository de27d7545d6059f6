"""What the commands for one's own images share: arguments, and how figures are written."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from morecl.cli import options
from morecl.cli.terminal import counted, error_line
from morecl.errors import InputError, first_line

if TYPE_CHECKING:
    from morecl.classifier import ModelFolder
    from morecl.classifier.results import Promise
    from morecl.classifier.store import Version

NAMED = 5  # unreadable images that are named one by one
NAME_WIDTH, NUMBER_WIDTH = 6, 4  # columns of a table, at least

Model = Annotated[
    Path, typer.Argument(callback=options.expanded, metavar="MODEL", help="Folder of the model.", show_default=False)
]
Accept = Annotated[float, typer.Option(help="Share of known images to accept, 0 to 1; the rest may be called unknown.")]


def existing(path: Path) -> ModelFolder:
    """The model in ``path``, which must be there. Imports no torch, so a typo is answered at once."""
    from morecl.classifier import ModelFolder

    folder = ModelFolder(path)
    folder.versions()
    return folder


def kept(store: ModelFolder, before: list[Version] | None) -> str:
    """What a command that was stopped leaves; ``before``: the versions when it began, if it got so far."""
    now = store.versions() if store.exists() else []
    if before is None or now == before:
        return "nothing has changed"
    return f"version {now[-1].number} of {store.path} was saved already"


def check_accept(accept: float) -> None:
    if not 0 < accept < 1:
        raise InputError(f"--accept must lie between 0 and 1, such as 0.95, not {accept:g}")


def percent(value: float | None, digits: int = 1) -> str:
    """``93.1 %``; a dash for nothing."""
    return "-" if value is None else f"{value:.{digits}f} %"


def share(value: float) -> str:
    """A share 0 to 1 in percent, without zeros at its end: ``5 %``, ``0.1 %``."""
    return f"{100 * value:.4g} %"


def size(count: int) -> str:
    """Bytes: ``12.3 MB``."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def seconds_text(seconds: float) -> str:
    """``12 s``, ``3.4 minutes``."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


@contextmanager
def out_of_memory_explained(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into an :class:`InputError` with ``advice``."""
    try:
        yield
    except InputError:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        from morecl.nn.device import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        raise InputError(f"not enough memory: {advice}. The error was: {first_line(error)}") from error


@contextmanager
def full_disk_explained() -> Iterator[None]:
    """Say what a full disk has left, which is the model as it was: a new version counts once all of it is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(
            f"{where}{error.strerror}. Nothing has changed; make room on the disk and repeat the command"
        ) from error


def promise_lines(promise: Promise, command: str = "predict") -> list[str]:
    """What the threshold promises, what it does not, and what is possible where it cannot be set.

    ``command``: the one whose ``--accept`` would set it.
    """
    if promise.threshold is None:
        from morecl.classifier.conformal import fewest

        way = "Teach it more images."
        if possible := best_accept(promise.images):
            way = f"Possible: `morecl {command} --accept {possible:g}`, or more images."
        needed = f"{fewest(promise.accept):,} held back are needed, a fifth of each class with 5 or more."
        return [f'No image is called "unknown": {promise.cause}.', f"{way} {needed}"]
    basis = f"{promise.threshold:.4g}, from {counted(promise.images, 'held-back image')}"
    if promise.share is None:
        return [f'Threshold for "unknown": {basis}; {promise.why}.']
    return [
        f"Promise: of new images of the classes it knows, like those held back, at most {share(promise.share)} are "
        f'called "unknown" (threshold {basis}).',
        "Not promised: how many images of other classes are caught; `morecl evaluate` measures it.",
    ]


def best_accept(images: int) -> float | None:
    """The largest --accept, in steps of 0.01, for which this many held-back images suffice; ``None``: there is none."""
    steps = 100 * images // (images + 1)
    return steps / 100 if steps >= 50 else None


def name_unreadable(problems: Sequence[str], say: Callable[[str], None] | None = None) -> None:
    """A line on stderr for each unreadable image, at most ``NAMED``, then how many more there are."""
    say = say or error_line
    for problem in problems[:NAMED]:
        say(f"not readable: {problem}")
    if (more := len(problems) - NAMED) > 0:
        say(f"not readable: {counted(more, 'more image')}")


def class_table(name: str, *heads: str) -> Table:
    """A table with a row per class: its name, then numbers. In a narrow terminal the heads are wrapped first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, style="bold", overflow="fold", min_width=NAME_WIDTH)
    for head in heads:
        table.add_column(head, justify="right", min_width=max(NUMBER_WIDTH, *map(len, head.split())))
    return table
