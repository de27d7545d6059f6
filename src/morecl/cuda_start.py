"""CUDA started in a thread of a command that will need it, while torch is imported. Needs no torch.

Both take seconds in a new process. What is started is the driver, and on one card the context that torch uses, too.
"""

from __future__ import annotations

import ctypes
import threading

LIBRARY = "libcuda.so.1"  # of NVIDIA's driver


def begin(device: object) -> None:
    """Start CUDA for the setting ``device``; if it cannot be started, or is not asked for, torch will find out."""
    kind, _, index = str(device).partition(":")
    if kind in ("auto", "cuda") and (index or "0").isdecimal():
        threading.Thread(target=_start, args=(int(index or "0"),), name="cuda", daemon=True).start()


def _start(index: int) -> bool:
    """Without Python's lock; whether it worked."""
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
