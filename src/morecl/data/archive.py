"""Images in an ``.npz`` file that are too many to be held in memory.

A member that is not compressed is read where it is. A compressed one is unpacked once, into the cache of decoded
images (:mod:`morecl.data.cache`).
"""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from morecl import pictures
from morecl.data.cache import VERSION, NoRoomError, kept
from morecl.data.decoding import Keep, Problems
from morecl.data.pixels import FilePart
from morecl.pictures import ImageArray, InMemory, Pictures
from morecl.progress import counting

READ_BYTES = 4 << 20  # at once
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member: the lengths of its name and of what else precedes its bytes


def images_in(archive: zipfile.ZipFile, path: Path, key: str, *, progress: bool = False) -> Pictures | None:
    """The images ``key``, uint8 (N, H, W, 3), of the archive ``path``; ``None`` if an array of them can be held.

    Everything is read once, so that damage is found now. If the cache has no room, they are held in memory after all.

    Raises:
        zipfile.BadZipFile, zlib.error, ValueError, EOFError: the member is damaged, or not an array.
    """
    name = f"{key}.npy"
    if name not in archive.namelist():
        return None
    with archive.open(name) as file:
        found = _header(file)
        if found is None:
            return None
        start, shape = file.tell(), found
    member = Member(path, archive.getinfo(name), start, shape)
    if member.info.compress_type == zipfile.ZIP_STORED:
        for _ in member.blocks(archive, progress):
            pass
        return Pictures(FilePart(path, _offset(path, member.info) + start, shape))
    try:
        return Pictures(kept(member, progress=progress))
    except NoRoomError:
        held = np.empty(shape, np.uint8)
        member.fill(lambda first, images: np.copyto(held[first:][: len(images)], images), progress)
        return Pictures(InMemory(held))


def _header(file: IO[bytes]) -> tuple[int, ...] | None:
    """The shape of the array in ``file``, which is then at its first byte; ``None`` if it is to be read as a whole."""
    readers: dict[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype[np.generic]]]]
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(file)
    if version not in readers:
        return None
    shape, by_column, dtype = readers[version](file)
    many = len(shape) == 4 and shape[3] == 3 and math.prod(shape) > pictures.HELD_BYTES
    return shape if many and dtype == np.uint8 and not by_column else None


@dataclass(frozen=True)
class Member:
    """Images in an archive, one member of it: a :class:`morecl.data.cache.Origin`."""

    place: Path
    info: zipfile.ZipInfo
    start: int  # of the first image, in bytes of the member
    shape: tuple[int, ...]

    @property
    def title(self) -> str:
        """The member first: of a long name only the beginning is used."""
        return f"{Path(self.info.filename).stem}-{self.place.stem}"

    def key(self) -> str:
        """Changes with the archive's size or time of change, and with what the member is."""
        stat = self.place.stat()
        text = f"{VERSION} {stat.st_size} {stat.st_mtime_ns} {self.info.filename} {self.info.CRC} {self.shape}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def fill(self, keep: Keep, progress: bool) -> Problems:
        first = 0
        with zipfile.ZipFile(self.place) as archive:
            for images in self.blocks(archive, progress):
                keep(first, images)
                first += len(images)
        return {}

    def image(self, row: int) -> str:
        """Finding one image would take unpacking all before it."""
        return "it is in an archive"

    def lost(self, row: int) -> str:
        return f"{self.place} must be unpacked again"

    def blocks(self, archive: zipfile.ZipFile, progress: bool) -> Iterator[ImageArray]:
        """All images, some at a time. At the end the checksum of the member has been compared."""
        each = math.prod(self.shape[1:])
        with archive.open(self.info) as file, counting("reading images", self.shape[0], visible=progress) as count:
            file.read(self.start)
            for first in range(0, self.shape[0], max(1, READ_BYTES // each)):
                number = min(max(1, READ_BYTES // each), self.shape[0] - first)
                data = file.read(number * each)
                if len(data) < number * each:
                    raise EOFError(f"it ends after {first + len(data) // each} of {self.shape[0]} images")
                yield np.frombuffer(data, np.uint8).reshape(number, *self.shape[1:])
                count(first + number)
            file.read(1)  # the end


def _offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where in ``path`` the bytes of a member begin."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name, more = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + int(name) + int(more)
