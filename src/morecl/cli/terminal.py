"""The consoles and exit codes that all commands share."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
PLAIN_WIDTH = 120  # columns when the output is not a terminal


def output_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def error_console() -> Console:
    return Console(stderr=True, soft_wrap=True)


def exit_interrupted(hint: str) -> NoReturn:
    """End the process after ctrl-C. ``hint`` says how to continue; rich markup is escaped by the caller."""
    error_console().print(f"stopped; {hint}")
    raise SystemExit(INTERRUPTED) from None
