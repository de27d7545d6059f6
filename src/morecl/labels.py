"""Labels as a user gives them and as JSON: text, numbers, true/false, ``None``, or tuples of these."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_PLAIN = (str, int, float, bool)


def encode(label: Hashable) -> Any:
    """``label`` as JSON: a tuple as ``{"tuple": [...]}``, everything else as itself.

    Raises:
        TypeError: a label of this type cannot be saved.
    """
    if isinstance(label, tuple):
        return {"tuple": [encode(part) for part in label]}
    if label is None or type(label) in _PLAIN:
        return label
    raise TypeError(
        f"cannot save the label {label!r} of type {type(label).__name__}; "
        "labels that are saved must be text, numbers, true/false, None or tuples of these"
    )


def decode(value: Any) -> Hashable:
    """The label that :func:`encode` made ``value`` from."""
    if isinstance(value, dict):
        return tuple(decode(part) for part in value["tuple"])
    if value is None or type(value) in _PLAIN:
        return value
    raise ValueError(f"{value!r} is not a label")
