"""The private folder of a running server, in which the images of lessons wait. Nothing in it outlives the server."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from morecl.errors import InputError
from morecl.locking import LOCK, claimed

PREFIX = "morecl-serve-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder that only this user can read, removed at the end; those of killed servers are removed now."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        remove_if_abandoned(old)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name, claimed(Path(name)):
        yield Path(name)


def remove_if_abandoned(folder: Path) -> None:
    """Remove the folder of a server that is no more: nobody holds its lock. Others' folders are left alone."""
    with suppress(OSError, InputError):
        mine = not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid()
        named = folder.name.startswith(PREFIX)
        if not mine or not named or folder.is_symlink() or not (folder / LOCK).is_file():
            return
        with claimed(folder):
            shutil.rmtree(folder, ignore_errors=True)
