"""What all commands share: consoles, how sentences and tables are printed, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from morecl.labels import ESCAPED as ESCAPED
from morecl.labels import printable as printable

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141  # what a program that SIGPIPE ends returns
PLAIN_WIDTH = 120  # columns when the output is not a terminal
GLUE = "\ue000"  # in place of a space at which no line ends; never part of a text


class OutputConsole(Console):
    """A console that ends the process with ``CLOSED_PIPE``, not with 1, when nobody reads on."""

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True  # what is still to be shown on the way out
        exit_closed_pipe()


def output_console() -> Console:
    return OutputConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def error_console() -> Console:
    return Console(stderr=True, soft_wrap=True)


def error_line(text: str) -> None:
    error_console().print(f"[yellow]{escape(printable(text))}[/yellow]", emoji=False, highlight=False)


def say(console: Console, text: str) -> None:
    """Print a sentence; no line ends between a number and its %. Rich would break at a no-break space, too."""
    lines = Text(text.replace(" %", f"{GLUE}%")).wrap(console, console.width)
    shown = "\n".join(line.plain for line in lines).replace(GLUE, " ")
    console.print(shown, markup=False, emoji=False, highlight=False, soft_wrap=True)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 image``, ``2,000 images``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def needed_width(table: Table) -> int:
    """Columns that ``table`` takes if only the cells of folded columns are wrapped; rich cuts some tables that it wraps
    further.
    """
    total = 3 * len(table.columns) - 1  # edges and gaps
    for column in table.columns:
        cells = [] if column.overflow == "fold" else column.cells
        total += max([column.min_width or 0, cell_len(str(column.header)), *(cell_len(str(cell)) for cell in cells)])
    return total


def print_entry(console: Console, title: str, details: Sequence[str], *, whole: bool = False) -> None:
    """A row of a table that a narrow terminal has no room for: its title, and under it all else.

    ``whole``: the title is one line, however long it is, so that it can be copied.
    """
    console.print(Text(title, style="bold"), emoji=False, soft_wrap=whole)
    console.print(Padding(Text(", ".join(details)), (0, 0, 0, 2)))


def exit_interrupted(hint: str) -> NoReturn:
    """End the process after ctrl-C. ``hint`` says how to continue; rich markup is escaped by the caller."""
    error_console().print(f"stopped; {hint}")
    raise SystemExit(INTERRUPTED) from None


def exit_closed_pipe() -> NoReturn:
    """End the process after `| head` has closed the pipe that stdout is."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing it at exit would fail again
    raise SystemExit(CLOSED_PIPE) from None
