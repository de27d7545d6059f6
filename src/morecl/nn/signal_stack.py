"""A stack of its own for the signal handlers of a thread (sigaltstack on Linux).

While oneDNN multiplies matrices of float32 with AVX-512, the stack pointer of the thread is in a buffer on the heap. A
signal that arrives then would overwrite some kilobytes in front of it, such as other tensors, with what the system
saves for the handler. Python's handlers run on the alternative stack if the thread has one.
"""

from __future__ import annotations

import ctypes
import sys
import threading

SIZE = 2**16  # with AVX-512 and AMX the system saves some 11 kB
_DISABLED = 2  # SS_DISABLE


class _Stack(ctypes.Structure):
    """``stack_t`` of Linux."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


class _OfThread(threading.local):
    looked = False
    buffer: ctypes.Array[ctypes.c_char] | None = None  # lives as long as the thread


_of_thread = _OfThread()


def ensure() -> None:
    """Give this thread an alternative stack, unless it has one (faulthandler makes one, too). Looked at once."""
    if _of_thread.looked:
        return
    _of_thread.looked = True
    if sys.platform != "linux" or present():
        return
    buffer = ctypes.create_string_buffer(SIZE)
    _call(_Stack(ctypes.addressof(buffer), 0, SIZE), None)
    _of_thread.buffer = buffer


def present() -> bool:
    """Whether this thread has an alternative stack. On Linux alone."""
    now = _Stack()
    _call(None, now)
    return not now.flags & _DISABLED


def _call(new: _Stack | None, old: _Stack | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    pointers = [None if stack is None else ctypes.byref(stack) for stack in (new, old)]
    if libc.sigaltstack(*pointers):
        raise OSError(ctypes.get_errno(), "sigaltstack failed")
