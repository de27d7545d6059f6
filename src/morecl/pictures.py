"""Images that are read on demand, for data sets that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ImageArray = NDArray[np.uint8]
Rows = NDArray[np.int64]
CHUNK_BYTES = 32 << 20  # read at once when all images are wanted one after the other
HELD_BYTES = 256 << 20  # of an archive, or kept by `joint`: more images are not held in memory but read when needed


class Source(Protocol):
    """Where images come from. May be asked by several threads at once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, 3)"""

    def read(self, rows: Rows, out: ImageArray) -> None:
        """Put the images ``rows`` (n,) into ``out`` (n, H, W, 3), which is contiguous."""


class Pictures:
    """Images uint8 (N, H, W, 3) of a source, or some of them, in any order.

    Indexing with a slice, indices or a mask reads and gives an array. :meth:`rows` takes the same and reads nothing.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, source: Source, rows: Rows | None = None):
        self._source = source
        self._rows = np.arange(source.shape[0]) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self._source.shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes that they would take in memory."""
        return int(np.prod(self.shape, dtype=np.int64))

    def rows(self, index: Any) -> Pictures:
        """The images ``index`` (a slice, indices or a mask), not read yet."""
        return Pictures(self._source, self._rows[index])

    def read(self, index: Any, out: ImageArray) -> None:
        """Put the images ``index`` into ``out`` (n, H, W, 3), which is contiguous."""
        self._source.read(self._rows[index], out)

    def chunks(self) -> Iterator[ImageArray]:
        """All images in arrays of some 32 MiB."""
        step = max(1, CHUNK_BYTES // max(1, self.nbytes // max(1, len(self))))
        yield from (self[start : start + step] for start in range(0, len(self), step))

    def __getitem__(self, index: Any) -> ImageArray:
        if isinstance(index, tuple):
            found = self[index[0]]
            return found[(slice(None),) * (found.ndim - 3) + index[1:]]
        rows = self._rows[index]
        out = np.empty((rows.size, *self._source.shape[1:]), np.uint8)
        self._source.read(np.atleast_1d(rows), out)
        return out.reshape(*rows.shape, *out.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("images that are read when they are asked for cannot become an array without a copy")
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)


AnyImages = ImageArray | Pictures


def some(images: AnyImages, index: Any) -> AnyImages:
    """The images ``index``: a copy of those of an array; others are not read yet."""
    return images.rows(index) if isinstance(images, Pictures) else images[index]


def chunks(images: AnyImages) -> Iterator[ImageArray]:
    """All images, in pieces if they are not in memory."""
    if isinstance(images, Pictures):
        yield from images.chunks()
    else:
        yield np.ascontiguousarray(images)


def joined(parts: Sequence[AnyImages]) -> Pictures:
    """The images of all ``parts``, one after the other, none of them copied or read yet."""
    pieces: list[AnyImages] = []
    for piece in (piece for part in parts for piece in _pieces(part)):
        last = pieces[-1] if pieces else None
        if isinstance(piece, Pictures) and isinstance(last, Pictures) and piece._source is last._source:
            pieces[-1] = Pictures(last._source, np.concatenate([last._rows, piece._rows]))
        else:
            pieces.append(piece)
    return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], Pictures) else Pictures(_Joined(pieces))


def changed(
    images: Pictures, change: Callable[[ImageArray], ImageArray], shape: tuple[int, ...] | None = None
) -> Pictures:
    """``change(images)``, made when they are read. ``shape``: of a changed image, (H, W, 3), if it differs."""
    return Pictures(_Changed(images, change, shape or images.shape[1:]))


class InMemory:
    """A source that is an array (N, H, W, 3)."""

    def __init__(self, array: ImageArray):
        self._array = array
        self.shape = array.shape

    def read(self, rows: Rows, out: ImageArray) -> None:
        np.take(self._array, rows, 0, out)


class _Joined:
    def __init__(self, parts: Sequence[AnyImages]):
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.shape = (int(self._ends[-1]), *parts[0].shape[1:])

    def read(self, rows: Rows, out: ImageArray) -> None:
        of_part = np.searchsorted(self._ends, rows, side="right")
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(of_part == number)
            if len(mine):
                inner = rows[mine] - (self._ends[number] - len(part))
                if len(mine) == len(rows) and isinstance(part, Pictures):
                    part.read(inner, out)
                else:
                    out[mine] = part[inner]


def _pieces(images: AnyImages) -> Sequence[AnyImages]:
    """What ``images`` were joined from, if they are all of it: joining again and again makes no deeper nest."""
    source = images._source if isinstance(images, Pictures) else None
    if not isinstance(source, _Joined) or not isinstance(images, Pictures):
        return [images]
    return source.parts if np.array_equal(images._rows, np.arange(source.shape[0])) else [images]


class _Changed:
    def __init__(self, images: Pictures, change: Callable[[ImageArray], ImageArray], shape: tuple[int, ...]):
        self._images, self._change = images, change
        self.shape = len(images), *shape

    def read(self, rows: Rows, out: ImageArray) -> None:
        out[:] = self._change(self._images[rows])
