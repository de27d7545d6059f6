"""How much the server accepts, and the exception for everything it refuses."""

from __future__ import annotations

import errno
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Each is an upper bound."""

    file_bytes: int = 32 * 2**20
    request_bytes: int = 256 * 2**20
    bytes_in_flight: int = 768 * 2**20  # of all requests that are being read or answered
    pixels: int = 50_000_000  # of one image, checked before it is decoded
    predict_images: int = 64  # in one request
    teach_images: int = 1000  # in one request
    queued_images: int = 512  # that wait for an answer
    queued_jobs: int = 8  # lessons that wait
    kept_jobs: int = 50  # finished lessons that can still be asked about
    field_bytes: int = 1000  # one text field of a form; a name has at most 200 characters
    decoders: int = 2  # images decoded at the same time; each takes up to 12 bytes per pixel
    silence: float = 30.0  # seconds without a byte of a request that is not complete


class RefusedError(Exception):
    """The request is refused with this HTTP status. ``retry_after``: seconds after which it may succeed."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def not_kept(error: OSError) -> RefusedError:
    """Uploads cannot be written to the server's temporary folder. NumPy gives no number where the disk is full."""
    if error.errno in (None, errno.ENOSPC, errno.EDQUOT):
        return RefusedError(507, "no room for uploads on the server's disk")
    return RefusedError(500, f"the server cannot keep uploads: {error.strerror}")
