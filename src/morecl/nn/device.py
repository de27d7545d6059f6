"""The device, its memory, the precision, and whether code is compiled."""

from __future__ import annotations

import errno
import os
import shutil

import torch

from morecl.errors import InputError, first_line

# In torch's RuntimeErrors: its CPU allocator on Linux and on Windows, C++, cuBLAS.
_PHRASES = ("can't allocate memory", "not enough memory", "std::bad_alloc", "ALLOC_FAILED")


def resolve_device(name: str) -> torch.device:
    """The device ``name``; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    there = ", ".join(f"{kind}:{index}" if index else kind for kind, n in counts.items() for index in range(n))
    try:
        device = torch.device(name)
        missing = (device.index or 0) >= counts.get(device.type, 0)
    except RuntimeError:
        missing = True
    if missing:
        raise InputError(f"device {name!r} cannot be used here: there is only {there}")
    try:
        torch.empty(0, device=device)
    except RuntimeError as error:
        raise InputError(f"device {name!r} cannot be used here: {first_line(error)}") from error
    return device


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; ``auto`` is bfloat16 on GPUs that support it, else float32."""
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if name == "bf16" else torch.float32


def resolve_compile(name: str, device: torch.device) -> bool:
    """Whether networks use compiled code: :mod:`morecl.nn.fused` if possible, otherwise ``torch.compile``.

    Both need a C compiler on first use, which slim containers lack; ``auto`` then runs without compiled code.
    """
    able = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    if name == "on" and not able:
        raise InputError("compile=on needs a C compiler: install gcc or clang, or set the environment variable CC")
    return name == "on" or (name == "auto" and device.type == "cuda" and able)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation failed. The system, NumPy, and torch on CPU and GPU differ in how."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)
