"""Images of one shape in a file, one after the other: written and read by several threads at once.

``pread`` and not a mapping: a mapping of the file would count as memory of the process and as address space
(``ulimit -v``), and a file cut short would kill it.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import weakref
from io import FileIO
from pathlib import Path

import numpy as np

from morecl.errors import InputError
from morecl.pictures import ImageArray, Rows


class PixelFile:
    """Images uint8 (N, H, W, 3) from byte ``offset`` of ``file`` on: a :class:`morecl.pictures.Source`.

    Closes ``file`` when nobody needs it any more.
    """

    def __init__(self, file: FileIO, shape: tuple[int, ...], offset: int = 0):
        self.shape = shape
        self.offset = offset
        self.file = file
        weakref.finalize(self, file.close)
        self._image = math.prod(shape[1:])  # bytes
        self._turn = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self._image

    def allocate(self) -> None:
        """Reserve the space now: a disk that is full is noticed before anything is decoded."""
        handle = self.file.fileno()
        os.truncate(handle, self.nbytes)
        if hasattr(os, "posix_fallocate") and self.nbytes:
            try:
                os.posix_fallocate(handle, 0, self.nbytes)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot reserve
                    raise

    def write(self, start: int, images: ImageArray) -> None:
        """Put ``images`` (n, H, W, 3), contiguous, at the rows from ``start`` on."""
        data, offset, done = images.data.cast("B"), self.offset + start * self._image, 0
        while done < len(data):
            if hasattr(os, "pwrite"):
                done += os.pwrite(self.file.fileno(), data[done:], offset + done)
            else:
                with self._turn:
                    self.file.seek(offset + done)
                    done += self.file.write(data[done:]) or 0

    def read(self, rows: Rows, out: ImageArray) -> None:
        """See :class:`morecl.pictures.Source`. Neighbouring images are read at once.

        What is missing at the end of the file leaves ``out`` as it is.
        """
        ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        start = 0
        for end in ends if len(rows) else ():
            self._pread(out[start:end].data.cast("B"), self.offset + int(rows[start]) * self._image)
            start = end

    def _pread(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            if hasattr(os, "preadv"):
                count = os.preadv(self.file.fileno(), [buffer[done:]], offset + done)
            else:
                with self._turn:
                    self.file.seek(offset + done)
                    count = self.file.readinto(buffer[done:]) or 0
            if not count:
                return
            done += count


class FilePart:
    """Images uint8 (N, H, W, 3) from byte ``offset`` of the file ``path`` on, which must stay as it is.

    It may be renamed, replaced or removed: this keeps the file that was opened. If that is written to, reading fails.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...]):
        self.shape = shape
        self._path = path
        self._pixels = PixelFile(path.open("rb", buffering=0), shape, offset)
        self._before = self._stamp()
        if self._before[0] < offset + self._pixels.nbytes:
            raise InputError(f"{path} is shorter than the images in it; replace it.")

    def read(self, rows: Rows, out: ImageArray) -> None:
        """See :class:`morecl.pictures.Source`."""
        self._pixels.read(rows, out)
        if self._stamp() != self._before:
            raise InputError(f"{self._path} was changed while images were read from it; start again.")

    def _stamp(self) -> tuple[int, int]:
        stat = os.fstat(self._pixels.file.fileno())
        return stat.st_size, stat.st_mtime_ns
