"""Locking a folder so that one process at a time works in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from morecl.errors import InputError

LOCK = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Create ``folder`` if needed and keep other processes out of it. The system drops the lock of a killed process.

    The lock file stays: if it were removed, a process that had opened it before could lock the removed file while
    another locks a new one. It goes only with a folder that was created here and stayed empty.

    Raises:
        InputError: another process is at work in ``folder``.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        message = f"another process is at work in {folder}; wait for it, or choose another folder"
        raise InputError(message) from error
    try:
        yield
    finally:
        if created:
            _remove_if_empty(folder, created)
        lock.release()


def _remove_if_empty(folder: Path, created: list[Path]) -> None:
    """If ``folder`` holds nothing but the lock file, remove ``created``, innermost first, as far as they are empty."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in created:
                path.rmdir()
