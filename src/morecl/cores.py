"""How many cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that this process may run on (``taskset``, a batch system); all of the machine's where the system does
    not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
