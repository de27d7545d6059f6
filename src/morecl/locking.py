"""A folder that one process has to itself, until it is done or dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from morecl.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    def _lock(file: IO[str]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

else:

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


LOCK = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep others out of it meanwhile. The system drops the claim of a process that is killed.

    Raises:
        InputError: another process has claimed it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with path.open("a", encoding="utf-8") as file:
        try:
            _lock(file)
        except OSError as error:
            message = f"another process is at work in {folder}; wait for it, or choose another folder"
            raise InputError(message) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
