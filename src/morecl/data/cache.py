"""Decoded images on disk, so that they are decoded once and need not fit into memory.

Each folder of images and each side in pixels has one entry, a folder in :func:`cache_root`; so has each large array of
images in a compressed archive:

- ``images.u8``: uint8 (N, H, W, 3), one image after the other; unreadable files are black.
- ``index.json``: sealed by a checksum; says which files these are (path, size and time of the last change of each) and
  by which version they were decoded, which of them could not be read, and has the checksum of every image.

An entry is written under a temporary name and renamed, so a killed process leaves nothing that counts. If anything
differs, it is made anew. Images are checked when they are first read; one that was damaged is decoded from its file (an
archive must be read anew), and the entry is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import PIL
from filelock import FileLock, Timeout

from morecl.data.decoding import Keep, Problems, decode, decode_all
from morecl.data.pixels import PixelFile
from morecl.errors import InputError
from morecl.files import atomic_folder, sealed, write_json
from morecl.pictures import ImageArray, Rows
from morecl.progress import counting

VERSION = 1  # of the entries and of how images are decoded
IMAGES, INDEX = "images.u8", "index.json"
DEFAULT_GB = 100.0
LEFT_FREE = 1 << 30  # bytes of the disk that stay free
WAIT = 0.2  # seconds between two looks at another process's lock


class NoRoomError(Exception):
    """The images cannot be kept on disk; the message says why."""


def cache_root() -> Path:
    """``$MORECL_CACHE``, else ``~/.cache/morecl/decoded``."""
    root = Path(os.environ.get("MORECL_CACHE") or "~/.cache/morecl/decoded").expanduser()
    if root.exists() and not root.is_dir():
        raise InputError(f"the cache {root} is a file; name a folder with MORECL_CACHE.")
    return root


def cache_limit() -> int:
    """Bytes that all entries together may take: ``$MORECL_CACHE_GB``, else 100 GB."""
    text = os.environ.get("MORECL_CACHE_GB") or str(DEFAULT_GB)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise InputError(f"MORECL_CACHE_GB={text!r} is not a number of gigabytes; 0 keeps no decoded images.")
    return int(limit * 1e9)


@dataclass(frozen=True)
class Entry:
    """What is kept of one folder at one size, or of one array in an archive."""

    path: Path
    folder: str
    side: int
    images: int
    bytes: int
    used: float  # when last, seconds since 1970

    @property
    def name(self) -> str:
        return self.path.name

    def in_use(self) -> bool:
        """Whether a process reads it."""
        with contextlib.suppress(OSError), (self.path / IMAGES).open("rb") as file:
            return not _locked(file.fileno(), exclusive=True)
        return False

    def remove(self) -> bool:
        """Remove it unless it is in use. Returns whether it is gone."""
        with contextlib.suppress(OSError), (self.path / IMAGES).open("rb") as file:
            if not _locked(file.fileno(), exclusive=True):
                return False
            shutil.rmtree(self.path)
        return not self.path.exists()


def entries(root: Path) -> list[Entry]:
    """All entries, the most recently used first. Damaged ones have the folder ``?``."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if path.name.startswith(".") or not (path / IMAGES).is_file():
            continue
        with contextlib.suppress(OSError):
            index = _read_index(path) or {"folder": "?", "side": 0, "images": 0}
            stat = (path / IMAGES).stat()
            used = stat.st_atime_ns if not (path / INDEX).exists() else (path / INDEX).stat().st_mtime_ns
            size = sum(file.stat().st_size for file in path.iterdir())
            found.append(Entry(path, index["folder"], index["side"], index["images"], size, used / 1e9))
    return sorted(found, key=lambda entry: -entry.used)


def clear(root: Path, names: Sequence[str] = ()) -> tuple[list[Entry], list[Entry]]:
    """Remove all entries, or those named, unless they are in use, and what killed processes left.

    Returns:
        the entries that were removed, and those in use.
    """
    found = entries(root)
    if unknown := [name for name in names if name not in {entry.name for entry in found}]:
        known = ", ".join(entry.name for entry in found) or "none"
        raise InputError(f"there is no entry {', '.join(unknown)} in {root}; there are: {known}.")
    _sweep(root)
    chosen = [entry for entry in found if not names or entry.name in names]
    removed = {entry.name for entry in chosen if entry.remove()}
    return [e for e in chosen if e.name in removed], [e for e in chosen if e.name not in removed]


class Origin(Protocol):
    """What the images of an entry are made from."""

    @property
    def place(self) -> Path:
        """A folder or a file."""

    @property
    def title(self) -> str:
        """With the side and a hash of the place, the name of the entry."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, 3)"""

    def key(self) -> str:
        """Changes when the images may have changed."""

    def fill(self, keep: Keep, progress: bool) -> Problems:
        """Pass all images to ``keep``."""

    def image(self, row: int) -> ImageArray | str:
        """One image made anew, or why that cannot be done."""

    def lost(self, row: int) -> str:
        """What an error says about an image that was damaged and could not be made anew."""


@dataclass(frozen=True)
class Files:
    """Image files under one folder, as squares of ``side`` pixels."""

    place: Path
    files: Sequence[Path]
    side: int

    @property
    def title(self) -> str:
        return self.place.resolve().name

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.files), self.side, self.side, 3

    def key(self) -> str:
        """Changes with every file's name, size or time of change, and with whatever decodes them."""
        digest = hashlib.sha256(json.dumps([VERSION, PIL.__version__, self.side]).encode())
        for file in self.files:
            stat = _stat(file)
            name = file.relative_to(self.place).as_posix().encode("utf-8", "surrogateescape")
            digest.update(b"%s\0%d\0%d\0" % (name, stat.st_size, stat.st_mtime_ns))
        return digest.hexdigest()

    def fill(self, keep: Keep, progress: bool) -> Problems:
        return decode_all(self.files, self.side, keep, progress=progress)

    def image(self, row: int) -> ImageArray | str:
        return decode(self.files[row], self.side)

    def lost(self, row: int) -> str:
        return f"{self.files[row]} is not the file they were made from any more"


class Decoded:
    """The images of an entry: a :class:`morecl.pictures.Source`. While it lives, nobody removes the entry."""

    def __init__(self, path: Path, origin: Origin, index: dict[str, Any]):
        """Raises OSError if the entry is not there, not complete, or just being removed."""
        self.shape = origin.shape
        self.problems: Problems = {int(number): why for number, why in index["problems"].items()}
        self._path, self._origin = path, origin
        self._pixels = PixelFile((path / IMAGES).open("rb", buffering=0), self.shape)
        self._checksums = np.array(index["crc32"], np.uint32)
        self._checked = np.zeros(self.shape[0], bool)
        handle = self._pixels.file.fileno()
        if os.fstat(handle).st_size != self._pixels.nbytes:
            raise OSError(f"{path / IMAGES} has another size")
        if not _locked(handle, exclusive=False):
            raise OSError(f"{path} is being removed")

    def read(self, rows: Rows, out: ImageArray) -> None:
        """See :class:`morecl.pictures.Source`. What a short file does not have is found by its checksum."""
        self._pixels.read(rows, out)
        for i in np.flatnonzero(~self._checked[rows]).tolist():
            self._check(int(rows[i]), out[i])

    def _check(self, row: int, image: ImageArray) -> None:
        if zlib.crc32(image.data) != self._checksums[row]:
            (self._path / INDEX).unlink(missing_ok=True)  # made anew when it is opened next
            again = self._origin.image(row)
            if isinstance(again, str) or zlib.crc32(again.tobytes()) != self._checksums[row]:
                raise InputError(
                    f"the decoded images in {self._path} were damaged, and {self._origin.lost(row)}; start again."
                )
            image[:] = again
        self._checked[row] = True


def decoded(folder: Path, files: Sequence[Path], side: int, *, progress: bool = False) -> Decoded:
    """The images in ``files``, all under ``folder``, from the cache; they are decoded first if they are not there.

    Raises:
        NoRoomError: the cache cannot take them.
    """
    return kept(Files(folder, files, side), progress=progress)


def kept(origin: Origin, *, progress: bool = False) -> Decoded:
    """The images of ``origin`` from the cache; they are put there first if they are not.

    If another process is doing that, this one waits for it.

    Raises:
        NoRoomError: the cache cannot take them.
    """
    root, side = cache_root(), origin.shape[1]
    place = f"{origin.place.resolve().as_posix()}\n{side}".encode("utf-8", "surrogateescape")
    name = re.sub(r"[^\w.-]+", "_", origin.title, flags=re.ASCII).lstrip(".") or "images"
    path = root / f"{name[:40]}-{side}-{hashlib.sha256(place).hexdigest()[:12]}"
    key = origin.key()
    if found := _opened(path, origin, key):
        return found
    needed = math.prod(origin.shape)
    if needed > cache_limit():
        raise NoRoomError(f"{needed / 1e9:.1f} GB, over the limit of {cache_limit() / 1e9:g} GB (MORECL_CACHE_GB)")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _turn(root, path.name, progress):
            return _opened(path, origin, key) or _made(path, origin, key, progress)
    except OSError as error:
        raise NoRoomError(f"{root}: {error.strerror or error}") from error


def _made(path: Path, origin: Origin, key: str, progress: bool) -> Decoded:
    count, side = origin.shape[:2]
    _sweep(path.parent, own=path.name)
    _make_room(path, math.prod(origin.shape))
    checksums = np.zeros(count, np.uint32)
    with atomic_folder(path) as temporary:
        with (temporary / IMAGES).open("wb", buffering=0) as file:
            pixels = PixelFile(file, origin.shape)
            pixels.allocate()

            def keep(start: int, images: ImageArray) -> None:
                checksums[start : start + len(images)] = [zlib.crc32(image.data) for image in images]
                pixels.write(start, images)

            problems = origin.fill(keep, progress)
        index = {
            "version": VERSION,
            "key": key,
            "folder": str(origin.place.resolve()).encode("utf-8", "replace").decode(),
            "side": side,
            "images": count,
            "problems": {str(number): why for number, why in problems.items()},
            "crc32": checksums.tolist(),
        }
        write_json(temporary / INDEX, sealed(index))
    return Decoded(path, origin, index)


def _opened(path: Path, origin: Origin, key: str) -> Decoded | None:
    """The entry, if it is complete and made from these images by this version."""
    with contextlib.suppress(OSError):
        index = _read_index(path)
        if index is not None and index["key"] == key and len(index["crc32"]) == origin.shape[0]:
            found = Decoded(path, origin, index)
            if any(not isinstance(origin.image(number), str) for number in found.problems):
                return None  # a file can be read now: other rights, another plug-in of Pillow
            os.utime(path / INDEX)  # used now
            return found
    return None


def _read_index(path: Path) -> dict[str, Any] | None:
    """``None`` if there is none, or a damaged one, or one of another version."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or index != sealed(index) or index.get("version") != VERSION:
        return None
    return index


def _stat(file: Path) -> os.stat_result:
    """Of the file, or of the link if that leads nowhere."""
    try:
        return file.stat()
    except OSError:
        return file.lstat()


def _make_room(path: Path, needed: int) -> None:
    """Remove what was used least recently until ``needed`` bytes are free within the limit and on the disk.

    First of all goes what is in ``path`` itself, which is to be replaced.
    """
    others = [entry for entry in entries(path.parent) if entry.path != path or not entry.remove()]
    limit = cache_limit()

    def missing() -> int:
        taken = sum(entry.bytes for entry in others)
        return max(taken + needed - limit, needed + LEFT_FREE - shutil.disk_usage(path.parent).free)

    for entry in reversed(others.copy()):
        if missing() > 0 and entry.remove():
            others.remove(entry)
    if missing() > 0:
        free = shutil.disk_usage(path.parent).free
        raise NoRoomError(
            f"{needed / 1e9:.1f} GB; {path.parent} has {free / 1e9:.1f} GB free, and other images in use there take "
            f"{sum(entry.bytes for entry in others) / 1e9:.1f} of {limit / 1e9:g} GB (MORECL_CACHE_GB)"
        )


def _sweep(root: Path, own: str | None = None) -> None:
    """Remove what killed processes left. ``own``: the entry whose lock this process holds."""
    for left in root.glob(".*.tmp") if root.is_dir() else ():
        name = left.name[1:].rpartition(".tmp")[0].rpartition(".")[0]
        if name == own:
            shutil.rmtree(left, ignore_errors=True)
            continue
        with contextlib.suppress(Timeout, OSError), FileLock(_lock_file(root, name), timeout=0):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _turn(root: Path, name: str, progress: bool) -> Iterator[None]:
    """Make the entry ``name`` alone; wait for a process that is making it."""
    lock = FileLock(_lock_file(root, name))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with counting("waiting for another process that decodes these images", 0, visible=progress):
            lock.acquire(poll_interval=WAIT)
    try:
        yield
    finally:
        lock.release()


def _lock_file(root: Path, name: str) -> Path:
    return root / f".{name}.lock"


def _locked(handle: int, *, exclusive: bool) -> bool:
    """Lock an open file until it is closed, if nobody holds it otherwise. Where there are no such locks: yes, since
    Windows removes no file that is open."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
