"""Image files as arrays of one size, by several threads.

Threads and not processes: Pillow decodes and resizes without holding Python's lock. On two cores two threads make
JPEGs of 256 px 1.4 times as fast and photos 1.7 times; processes would reach twice the speed, but take a second each to
start and would have to import the user's script again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from morecl.cores import usable_cores
from morecl.errors import InputError
from morecl.images import ImageArray, open_image, square, why_unreadable
from morecl.pictures import Rows
from morecl.progress import counting

BLOCK_BYTES = 4 << 20  # of the images that a thread decodes before it hands them on

Keep = Callable[[int, ImageArray], None]  # number of the first image, images (n, side, side, 3)
Problems = dict[int, str]  # number of a file that cannot be read -> why not


class LargerError(Exception):
    """An image has more pixels than its caller wants to decode."""


def decode(file: str | Path, side: int, most: int | None = None) -> ImageArray | str:
    """The image in ``file``, (side, side, 3), or why it cannot be read.

    Raises:
        LargerError: it has more than ``most`` pixels. Nothing was decoded.
    """

    def check(pixels: int) -> None:
        if most is not None and pixels > most:
            raise LargerError

    try:
        return square(open_image(file, check), side)
    except (MemoryError, LargerError):
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
        return why_unreadable(error)


def decode_all(files: Sequence[Path], side: int, keep: Keep, *, progress: bool = False) -> Problems:
    """Decode all ``files`` and pass them to ``keep``, in blocks and from several threads; unreadable ones are black."""
    size = max(1, BLOCK_BYTES // (3 * side * side))
    problems: Problems = {}

    def block(start: int) -> int:
        some = files[start : start + size]
        images = np.zeros((len(some), side, side, 3), np.uint8)
        for i, file in enumerate(some):
            image = decode(file, side)
            if isinstance(image, str):
                problems[start + i] = image
            else:
                images[i] = image
        keep(start, images)
        return start + len(some)

    with counting("decoding images", len(files), visible=progress) as count, ThreadPoolExecutor(usable_cores()) as pool:
        try:
            for done in pool.map(block, range(0, len(files), size)):
                count(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or leaving the block would wait for all that is left
            raise
    return dict(sorted(problems.items()))


class Streamed:
    """A source of images that are decoded whenever they are asked for."""

    def __init__(self, files: Sequence[Path], side: int):
        self._files, self._side = files, side
        self.shape = (len(files), side, side, 3)

    def read(self, rows: Rows, out: ImageArray) -> None:
        def one(i: int) -> None:
            file = self._files[rows[i]]
            image = decode(file, self._side)
            if isinstance(image, str):
                raise InputError(f"{file} could be read before and now cannot ({image}); start again without it.")
            out[i] = image

        list(self._pool.map(one, range(len(rows))))

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(usable_cores(), thread_name_prefix="morecl-decode")
