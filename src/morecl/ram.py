"""How much main memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_PAGES = Path("/proc/self/statm")
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_bytes() -> int | None:
    """The tightest of the limits found here: free memory and swap, the container's, ``ulimit -v``; ``None`` if none.

    An upper bound: other processes may take memory at the same time.
    """
    known = [limit for limit in (_of_machine(), _of_container(), _of_process()) if limit is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        return sum(int(rows[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, LookupError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_container() -> int | None:
    for file in _CONTAINER_LIMITS:
        try:
            return int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
    return None


def _of_process() -> int | None:
    """What is left of the address space under ``ulimit -v``."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        taken = int(_OWN_PAGES.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        taken = 0
    return max(0, limit - taken)
