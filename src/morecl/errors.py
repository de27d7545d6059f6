"""The exceptions a user sees, and what their messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_SYNONYMS = {"learning_rate": "lr", "buffer_size": "memory_size"}


class InputError(ValueError):
    """Bad input. The message names what is wrong, where, and how to fix it. Exit code 2."""


class BusyError(InputError):
    """Another process is at work in a folder."""


class DamagedError(InputError):
    """A file of ours is not as it was saved."""


class NewerFormatError(InputError):
    """A file that a newer morecl wrote, in a format that this one does not know."""


class DivergedError(RuntimeError):
    """Training produced numbers that are not finite. ``learn_task`` undoes what it learned of the task."""


class RanksError(RuntimeError):
    """The processes of a run on several cards lost each other, or no longer have the same weights. Exit code 1."""


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Put ``where`` in front of the message of an :class:`InputError` that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """``unknown method 'mroe'; did you mean 'more'? (known: ...)``"""
    names = sorted(known)
    synonym = _SYNONYMS.get(name)
    near = [synonym] if synonym in names else difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InputError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}.")


def first_problem(error: ValidationError) -> str:
    """What is wrong first, and where: ``classes.0: Input should be a valid string``."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))  # empty if parts contradict each other: the message names them
    return (f"{where}: " if where else "") + first["msg"].removeprefix("Value error, ")


def first_line(error: BaseException) -> str:
    """What an error of a library says, or its kind if it says nothing: their messages go on for lines."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def few(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first ``most`` texts, and how many more there are: ``a, b and 3 more``; long ones ``a; b; and 3 more``."""
    more = len(texts) - most
    shown = separator.join(texts[:most])
    return shown if more <= 0 else f"{shown}{separator.rstrip(', ')} and {more:,} more"


def shortened(names: Sequence[object], most: int = 5) -> str:
    """``'a', 'b' and 3 more``."""
    return few(list(map(repr, names)), most)
