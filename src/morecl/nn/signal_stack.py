"""A stack of its own for the signal handlers of a thread (sigaltstack on Linux).

While oneDNN multiplies matrices of float32 with AVX-512, the stack pointer of the thread is in a buffer on the heap. A
signal that arrives then would overwrite some kilobytes in front of it, such as other tensors, with what the system
saves for the handler. Python's handlers run on the alternative stack if the thread has one.

torch's own threads get none: the system delivers a signal to the main thread, unless that one blocks it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

SIZE = 2**16  # with AVX-512 and AMX the system saves some 11 kB
_DISABLED = 2  # SS_DISABLE


class _Stack(ctypes.Structure):
    """``stack_t`` of Linux."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


class _Own:
    """The stack made for this thread, in use until the thread ends."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(SIZE)
        self._start = ctypes.addressof(self._buffer)
        self._sigaltstack = _sigaltstack()
        self._now, self._off = ctypes.pointer(_Stack()), ctypes.pointer(_Stack(None, _DISABLED, 0))
        _call(_Stack(self._start, 0, SIZE), None)

    def __del__(self) -> None:
        """A signal may still reach the thread when the buffer is gone. Uses no globals: at exit they may be gone."""
        self._sigaltstack(None, self._now)
        if self._now.contents.start == self._start:  # else another one took its place, or this is a forked process
            self._sigaltstack(self._off, None)


class _OfThread(threading.local):
    looked = False
    own: _Own | None = None


_of_thread = _OfThread()


def ensure() -> None:
    """Give this thread an alternative stack, unless it has one (faulthandler makes one, too). Looked at once."""
    if _of_thread.looked:
        return
    if sys.platform == "linux" and not present():
        _of_thread.own = _Own()
    _of_thread.looked = True


def present() -> bool:
    """Whether this thread has an alternative stack. On Linux alone."""
    now = _Stack()
    _call(None, now)
    return not now.flags & _DISABLED


def _call(new: _Stack | None, old: _Stack | None) -> None:
    pointers = [None if stack is None else ctypes.byref(stack) for stack in (new, old)]
    if _sigaltstack()(*pointers):
        raise OSError(ctypes.get_errno(), "sigaltstack failed")


def _sigaltstack() -> Callable[..., int]:
    return ctypes.CDLL(None, use_errno=True).sigaltstack
