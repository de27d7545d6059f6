"""Image files as arrays of one size, by several threads.

Threads and not processes: Pillow decodes and resizes without holding Python's lock. On two cores two threads make
JPEGs of 256 px 1.4 times as fast and photos 1.7 times; processes would reach twice the speed, but take a second each to
start and would have to import the user's script again.

An image takes about 8 bytes per pixel while it is decoded, so large ones are decoded one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from morecl.cores import usable_cores
from morecl.errors import InputError
from morecl.images import ImageArray, as_array, open_image, square, to_side, why_unreadable
from morecl.pictures import Rows
from morecl.progress import counting

BLOCK_BYTES = 4 << 20  # of the images that a thread decodes before it hands them on
LARGE = 16_000_000  # pixels; images with more are decoded one after the other

Keep = Callable[[int, ImageArray], None]  # number of the first image, images (n, side, side, 3)
Problems = dict[int, str]  # number of a file that cannot be read -> why not


class LargerError(Exception):
    """An image has more pixels than its caller wants to decode."""


class Decoder:
    """Decodes images for several threads; those of more than :data:`LARGE` pixels one after the other.

    One thread of its own decodes these, because each thread keeps some of the memory that it has used.
    """

    def __init__(self) -> None:
        self._alone = ThreadPoolExecutor(1, thread_name_prefix="morecl-decode-large")

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._alone.shutdown()

    def __call__(self, image: Any, side: int) -> ImageArray | str:
        """A path, a PIL image or an array as (side, side, 3), or why it cannot be read."""
        if isinstance(image, str | Path):
            try:
                return decode(image, side, LARGE)
            except LargerError:
                return self._alone.submit(decode, image, side).result()
        if isinstance(image, Image.Image) and image.width * image.height > LARGE:
            return self._alone.submit(_squared, image, side).result()
        return _squared(image, side)


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


def _squared(image: Any, side: int) -> ImageArray | str:
    """As :func:`decode`, of a PIL image or an array."""
    try:
        return to_side(as_array([image], side), side)[0]
    except MemoryError:
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
            image = decoder(file, side)
            if isinstance(image, str):
                problems[start + i] = image
            else:
                images[i] = image
        keep(start, images)
        return start + len(some)

    with (
        counting("decoding images", len(files), visible=progress) as count,
        Decoder() as decoder,
        ThreadPoolExecutor(usable_cores()) as pool,
    ):
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
        self._files, self._side, self._decoder = files, side, Decoder()
        self.shape = (len(files), side, side, 3)

    def read(self, rows: Rows, out: ImageArray) -> None:
        def one(i: int) -> None:
            file = self._files[rows[i]]
            image = self._decoder(file, self._side)
            if isinstance(image, str):
                raise InputError(f"{file} could be read before and now cannot ({image}); start again without it.")
            out[i] = image

        list(self._pool.map(one, range(len(rows))))

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(usable_cores(), thread_name_prefix="morecl-decode")
