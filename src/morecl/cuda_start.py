"""CUDA started in a thread of a command that will need it, while torch is imported. Needs no torch.

Both take seconds in a new process. Starts the driver, and the context of one card, which torch then uses.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import threading
from contextlib import suppress

LIBRARY = "libcuda.so.1"  # of NVIDIA's driver


def begin(device: object) -> None:
    """Start CUDA for the setting ``device``; if it cannot be started, or is not asked for, torch will find out.

    The process does not end in the middle of it: the driver has exit handlers of its own.
    """
    kind, _, index = str(device).partition(":")
    if kind in ("auto", "cuda") and (index or "0").isdecimal() and not _is_for_cpus():
        threading.Thread(target=_start, args=(int(index or "0"),), name="cuda").start()


def _is_for_cpus() -> bool:
    """Whether the installed torch says that it cannot use a card."""
    with suppress(importlib.metadata.PackageNotFoundError):  # built by hand
        return importlib.metadata.version("torch").endswith("+cpu")
    return False


def _start(index: int) -> bool:
    """Whether it worked. Python's other threads go on: ctypes lets go of the lock."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    card = ctypes.c_int()
    context = ctypes.c_void_p()  # kept as long as the process
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(card), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card) == 0
    )
