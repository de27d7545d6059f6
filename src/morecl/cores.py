"""How many cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those that this process is not kept off (``taskset``, a batch system); of the whole machine where the system does
    not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
