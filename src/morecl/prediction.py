"""Predictions, and reading any number of images in bounded memory."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from morecl.errors import few
from morecl.images import ImageArray, as_array

CHUNK = 512  # images held at once, rounded to whole batches
_NAMED_IN_WARNING = 5

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Prediction:
    """Answers for N images. ``ood_score``: higher = less known, everywhere in this package.

    An image that was skipped (``predict(..., on_error="skip")``) has the label ``None``, the task -1, and NaN for
    confidence and OOD score.
    """

    labels: list[Any]
    confidence: NDArray[np.float64]
    ood_score: NDArray[np.float64]
    task: NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """``count`` consecutive images; those that could be read are in ``images`` (n, H, W, 3)."""

    first: int  # number of the first image
    count: int
    images: ImageArray
    readable: NDArray[np.int64]  # (n,) positions within the chunk


def chunks(images: Any, batch: int, side: int, on_error: OnError = "raise") -> Iterator[Chunk]:
    """``images`` in chunks of whole batches, at least one chunk; files are opened chunk by chunk.

    Args:
        images: what :func:`morecl.images.as_array` takes, or an iterator of paths, PIL images or single arrays.
            Images of different sizes are brought to one size within their chunk.
        on_error: ``"skip"`` leaves out images of a list or an iterator that cannot be read, with a warning.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    size = batch * max(1, CHUNK // batch)
    skipped: list[str] = []
    first = 0
    for piece in _pieces(images, size):
        array, readable = _read(piece, first, side, skipped if on_error == "skip" else None)
        yield Chunk(first, len(piece), array, readable)
        first += len(piece)
    if skipped:
        _warn(skipped, first)


def _pieces(images: Any, size: int) -> Iterator[Any]:
    """At least one piece, and what cannot be cut as it is: whoever reads it then refuses it."""
    if isinstance(images, Iterator):
        yield list(itertools.islice(images, size))
        while piece := list(itertools.islice(images, size)):
            yield piece
    elif (isinstance(images, Sequence) and not isinstance(images, str | bytes)) or _has_rows(images):
        yield from (images[start : start + size] for start in range(0, max(1, len(images)), size))
    else:
        yield images


def _has_rows(images: Any) -> bool:
    """Whether this is an array or a tensor of one dimension or more."""
    return hasattr(images, "shape") and len(images.shape) > 0


def _read(piece: Any, first: int, side: int, skipped: list[str] | None) -> tuple[ImageArray, NDArray[np.int64]]:
    """A piece as an array, and the positions of its rows. What cannot be read is added to ``skipped``, or raised."""
    try:
        return as_array(piece, side), np.arange(len(piece))
    except (TypeError, ValueError):
        if not isinstance(piece, list | tuple):
            raise
    good: list[Any] = []
    readable = []
    for index, image in enumerate(piece):
        try:
            good.append(as_array([image], side)[0])
            readable.append(index)
        except (TypeError, ValueError) as error:
            message = f"image {first + index}: {str(error).removeprefix('image 0').lstrip(': ')}"
            if skipped is None:
                raise type(error)(message) from error
            skipped.append(message)
    return as_array(good, side), np.array(readable, np.int64)


def _warn(skipped: Sequence[str], total: int) -> None:
    from morecl.data.folder import SkippedImagesWarning

    named = few(skipped, _NAMED_IN_WARNING, "; ")
    message = f"{len(skipped)} of {total} images could not be read and were skipped: {named}"
    warnings.warn(message, SkippedImagesWarning, stacklevel=2)
