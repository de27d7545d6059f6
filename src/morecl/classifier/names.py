"""Names of classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from morecl.classifier.evaluation import UNKNOWN
from morecl.errors import InputError

LONGEST_NAME = 200


def check_name(name: Any) -> None:
    """Raise :class:`InputError` if this cannot be the name of a class."""
    if not isinstance(name, str):
        raise InputError(f"the name of a class must be text, not {name!r:.60}")
    if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        shown = repr(name) if len(name) <= 60 else f"{name[:60]!r}..."
        raise InputError(f"{shown} cannot name a class: 1 to {LONGEST_NAME} printable characters are needed")
    if name != name.strip():  # in a list nobody sees how it differs from the name without
        raise InputError(f"{name!r} cannot name a class: it begins or ends with a blank; rename it, or its folder")
    if name.lower() == UNKNOWN:
        raise InputError(f"{name!r} cannot name a class: it is the answer for what was never taught")


def shortened(names: Sequence[str], most: int = 5) -> str:
    """``'a', 'b' and 3 more``."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
