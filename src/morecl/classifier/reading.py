"""Reading images for a classifier: many at once, and a broken one is no reason to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from morecl.errors import InputError
from morecl.images import ImageArray, as_array, to_side
from morecl.ram import available_bytes

Report = Callable[[int, int], None]  # images done, images in all


class Read(NamedTuple):
    """Images (n, S, S, 3), their positions in what was given, and what could not be read: (position, reason)."""

    images: ImageArray
    positions: NDArray[np.int64]
    problems: list[tuple[int, str]]


def name_of(image: Any) -> str | None:
    """The path of an image that is given by its path."""
    return str(image) if isinstance(image, str | Path) else None


def read(images: Sequence[Any] | NDArray[Any], side: int, report: Report | None = None) -> Read:
    """Paths, PIL images or arrays as squares of ``side`` pixels.

    Raises:
        TypeError, ValueError: an array of many images is not usable.
        InputError: they do not fit into memory.
    """
    if hasattr(images, "shape"):
        array = to_side(as_array(images, side), side)
        return Read(array, np.arange(len(array)), [])
    needed, available = len(images) * side * side * 3, available_bytes()
    if available is not None and needed > available:
        raise InputError(
            f"{len(images)} images at {side} x {side} pixels need {needed / 1e9:.1f} GB of memory, "
            f"{available / 1e9:.1f} GB are available; teach fewer at a time"
        )
    room = np.empty((len(images), side, side, 3), np.uint8)

    def one(index: int) -> str | None:
        try:
            room[index] = to_side(as_array([images[index]], side), side)[0]
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
            return _reason(error)
        return None

    problems: list[tuple[int, str]] = []
    with ThreadPoolExecutor() as pool:
        for index, problem in enumerate(pool.map(one, range(len(images)))):
            if problem:
                problems.append((index, problem))
            if report:
                report(index + 1, len(images))
    broken = {index for index, _ in problems}
    positions = np.array([index for index in range(len(images)) if index not in broken], np.int64)
    return Read(room[positions] if broken else room, positions, problems)


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


def _reason(error: Exception) -> str:
    """Why an image cannot be read, without its path."""
    cause = error.__cause__ or error
    if isinstance(cause, Image.DecompressionBombError):
        return "too many pixels"
    if isinstance(cause, UnidentifiedImageError):
        return "not an image, or of an unknown kind"
    if isinstance(cause, FileNotFoundError):
        return "does not exist"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    text = str(cause).removeprefix("image 0").lstrip(": ")
    return text or type(cause).__name__
