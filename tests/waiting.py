"""Waiting for something that happens elsewhere: in another thread, process or page."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """The value of ``condition``, once it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
    return value
