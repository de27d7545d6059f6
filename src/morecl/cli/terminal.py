"""The consoles and exit codes that all commands share."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console

from morecl.labels import ESCAPED as ESCAPED
from morecl.labels import printable as printable

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141  # what a program that SIGPIPE ends returns
PLAIN_WIDTH = 120  # columns when the output is not a terminal


class OutputConsole(Console):
    """A console that ends the process with ``CLOSED_PIPE``, not with 1, when nobody reads on."""

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True  # what is still to be shown on the way out
        exit_closed_pipe()


def output_console() -> Console:
    return OutputConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def error_console() -> Console:
    return Console(stderr=True, soft_wrap=True)


def exit_interrupted(hint: str) -> NoReturn:
    """End the process after ctrl-C. ``hint`` says how to continue; rich markup is escaped by the caller."""
    error_console().print(f"stopped; {hint}")
    raise SystemExit(INTERRUPTED) from None


def exit_closed_pipe() -> NoReturn:
    """End the process after `| head` has closed the pipe that stdout is."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing it at exit would fail again
    raise SystemExit(CLOSED_PIPE) from None
