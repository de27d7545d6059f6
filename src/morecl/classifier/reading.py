"""Reading images for a classifier: many at once, and a broken one is no reason to stop.

Images that would take too much of the memory wait on disk, in a file without a name: it is gone with the process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from morecl.cores import usable_cores
from morecl.data.cache import LEFT_FREE, cache_root
from morecl.data.decoding import Decoder
from morecl.data.pixels import PixelFile
from morecl.errors import InputError
from morecl.images import ImageArray, as_array, to_side
from morecl.pictures import AnyImages, InMemory, Pictures, some
from morecl.ram import available_bytes

HELD_SHARE = 0.5  # of the available memory that images may take
THREADS = 4  # that decode, at most: each image takes about 8 bytes per pixel meanwhile

Report = Callable[[int, int], None]  # images done, images in all


class Read(NamedTuple):
    """Images (n, S, S, 3), their positions in what was given, and what could not be read: (position, reason)."""

    images: AnyImages
    positions: NDArray[np.int64]
    problems: list[tuple[int, str]]


@dataclass(frozen=True)
class Decoded:
    """Images that were read before, to be given in place of paths: nothing is read again, and names stay.

    ``names`` of all of them (N), also of those that could not be read; the positions in ``found`` are among these.
    """

    names: Sequence[str]
    found: Read

    @classmethod
    def of(cls, images: AnyImages, names: Sequence[str]) -> Decoded:
        """Squares (N, S, S, 3) that could all be read."""
        return cls(names, Read(images, np.arange(len(names)), []))

    def __len__(self) -> int:
        return len(self.names)

    def part(self, chosen: Sequence[int]) -> Decoded:
        """Those at the positions ``chosen``; no image is copied."""
        images, positions, problems = self.found
        row_of = {position: row for row, position in enumerate(positions.tolist())}
        reasons = dict(problems)
        rows = np.array([row_of[i] for i in chosen if i in row_of], np.int64)
        places = np.array([place for place, i in enumerate(chosen) if i in row_of], np.int64)
        lost = [(place, reasons[i]) for place, i in enumerate(chosen) if i in reasons]
        pictures = images if isinstance(images, Pictures) else Pictures(InMemory(images))
        return Decoded([self.names[i] for i in chosen], Read(pictures.rows(rows), places, lost))


def name_of(image: Any) -> str | None:
    """The path of an image that is given by its path."""
    return str(image) if isinstance(image, str | Path) else None


def name_in(images: Any, index: int) -> str:
    """What to call the image at ``index``: its path, if it has one."""
    return images.names[index] if isinstance(images, Decoded) else name_of(images[index]) or f"image {index}"


def read(images: Sequence[Any] | NDArray[Any] | Decoded, side: int, report: Report | None = None) -> Read:
    """Paths, PIL images or arrays as squares of ``side`` pixels.

    Raises:
        TypeError, ValueError: an array of many images is not usable.
        InputError: they fit neither into memory nor onto the disk.
    """
    if isinstance(images, Decoded):
        if report:
            report(len(images), len(images))
        return images.found
    if hasattr(images, "shape"):
        array = to_side(as_array(images, side), side)
        return Read(array, np.arange(len(array)), [])
    shape = (len(images), side, side, 3)
    needed, available = len(images) * side * side * 3, available_bytes()
    room: ImageArray | PixelFile
    if available is None or needed <= HELD_SHARE * available:
        room = np.empty(shape, np.uint8)
    else:
        room = _on_disk(shape, needed)

    def one(index: int) -> str | None:
        square = decoder(images[index], side)
        if isinstance(square, str):
            return square
        if isinstance(room, PixelFile):
            try:
                room.write(index, np.ascontiguousarray(square[None]))
            except OSError as error:
                raise _no_room(shape, error) from error
        else:
            room[index] = square
        return None

    problems: list[tuple[int, str]] = []
    with Decoder() as decoder, ThreadPoolExecutor(min(usable_cores(), THREADS)) as pool:
        for index, problem in enumerate(pool.map(one, range(len(images)))):
            if problem:
                problems.append((index, problem))
            if report:
                report(index + 1, len(images))
    broken = {index for index, _ in problems}
    positions = np.array([index for index in range(len(images)) if index not in broken], np.int64)
    found = Pictures(room) if isinstance(room, PixelFile) else room
    return Read(some(found, positions) if broken else found, positions, problems)


def _on_disk(shape: tuple[int, ...], needed: int) -> PixelFile:
    """Room for images where decoded ones are kept, beside the cache's entries."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if needed + LEFT_FREE > free:
            raise OSError(f"{free / 1e9:.1f} GB are free")
        room = PixelFile(tempfile.TemporaryFile(dir=root, buffering=0), shape)  # noqa: SIM115 (closed with the last reader)
        room.allocate()
    except OSError as error:
        raise _no_room(shape, error) from error
    return room


def _no_room(shape: tuple[int, ...], error: OSError) -> InputError:
    count, side = shape[:2]
    return InputError(
        f"{count} images at {side} x {side} pixels need {count * side * side * 3 / 1e9:.1f} GB, more than "
        f"{HELD_SHARE:.0%} of the memory that is available, and the disk has no room for them ({cache_root()}: "
        f"{error.strerror or error}). Teach fewer at a time, or name a folder on a larger disk with MORECL_CACHE"
    )


def batches(images: Iterable[Any], size: int, side: int) -> Iterator[tuple[list[Any], Read]]:
    """``images`` in batches of ``size``; the next batch is read while the caller works on this one."""
    source = iter(images)
    with ThreadPoolExecutor(1) as ahead:
        batch = list(islice(source, size))
        pending = ahead.submit(read, batch, side)
        while batch:
            current, done = batch, pending.result()
            batch = list(islice(source, size))
            if batch:
                pending = ahead.submit(read, batch, side)
            yield current, done
