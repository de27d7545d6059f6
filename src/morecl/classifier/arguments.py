"""What a caller from Python may give by mistake: refused in plain words, before anything is computed."""

from __future__ import annotations

from numbers import Integral, Real
from pathlib import Path
from typing import Any

from morecl.errors import InputError


def check_count(name: str, value: Any, least: int) -> None:
    """Raise :class:`InputError` if ``value`` is no whole number, ``least`` or more. NumPy's are; ``True`` is none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InputError(f"{name} must be a whole number, {least} or more, not {value!r:.60}")


def check_number(what: str, value: Any) -> None:
    """Raise :class:`InputError` if ``value`` is no number."""
    if not isinstance(value, Real):
        raise InputError(f"{what} must be a number, such as 0.95, not {value!r:.60}")


def check_positive(name: str, value: Any) -> None:
    """Raise :class:`InputError` if ``value`` is no number above 0. NumPy's are numbers; ``True`` is none."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise InputError(f"{name} must be a number above 0, not {value!r:.60}")


def check_list(images: Any) -> None:
    """Raise :class:`TypeError` if it is one image: a path's characters would be taken for paths."""
    from PIL import Image

    if isinstance(images, str | Path | Image.Image):
        raise TypeError("images must be a list; for one image give [image]")
