"""Class labels: how names are spelled, which labels can be saved, and how they are written as JSON."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

DEEPEST = 32  # tuples inside one another


@dataclass(frozen=True, repr=False)
class Forgotten:
    """Stands in ``learner.classes`` for the class of a column that was forgotten. Equal to no label of a user's."""

    column: int

    def __repr__(self) -> str:
        return f"<forgotten class {self.column}>"


def composed(name: str) -> str:
    """``name`` in Unicode's NFC form. macOS may write an accent as a character of its own; the name is the same."""
    return unicodedata.normalize("NFC", name)


def same_types(label: Hashable, other: Hashable) -> bool:
    """Whether two labels that are equal are so for a reader, too: Python has ``1 == 1.0 == True``."""
    if isinstance(label, tuple) and isinstance(other, tuple):
        return all(map(same_types, label, other))
    return type(label) is type(other)


def encode(label: Hashable, depth: int = 0) -> Any:
    """``label`` as JSON: text, numbers, true/false and null stay as they are, a tuple becomes ``{"tuple": [...]}``.

    A :class:`Forgotten` becomes ``{"forgotten": column}``; it is never part of a tuple.

    Raises:
        TypeError: the label is of a type that cannot be saved.
        ValueError: it is NaN or infinite, which JSON does not know, or nested more than ``DEEPEST`` deep.
    """
    if isinstance(label, tuple):
        if depth == DEEPEST:
            raise ValueError(f"cannot save a label of more than {DEEPEST} tuples inside one another")
        return {"tuple": [encode(part, depth + 1) for part in label]}
    if isinstance(label, Forgotten) and depth == 0:
        return {"forgotten": label.column}
    if isinstance(label, float) and not math.isfinite(label):
        raise ValueError(f"cannot save the label {label!r}; numbers must be finite")
    if label is None or type(label) in (str, int, float, bool):
        return label
    raise TypeError(
        f"cannot save the label {label!r} of type {type(label).__name__}; "
        "labels that are saved must be text, numbers, true/false or tuples of these"
    )


def decode(value: Any, depth: int = 0) -> Hashable:
    """The label that :func:`encode` turned into ``value``.

    Raises:
        ValueError: ``value`` is not an encoded label.
    """
    if isinstance(value, dict) and value.keys() == {"tuple"} and isinstance(value["tuple"], list) and depth < DEEPEST:
        return tuple(decode(part, depth + 1) for part in value["tuple"])
    if isinstance(value, dict) and value.keys() == {"forgotten"} and depth == 0:
        column = value["forgotten"]
        if type(column) is int and column >= 0:
            return Forgotten(column)
    if value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value)):
        return value
    raise ValueError(f"{value!r:.60} is not a label")


JOINERS = "\u200c\u200d"  # they part and join letters: Persian and Indic words need them, and emoji of several people
SPACES = " \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"


def is_shown(sign: str) -> bool:
    """Whether a character may stand in a name: it is printed, is a space of any width, or a joiner.

    macOS has a narrow space in the names of screenshots.
    """
    return sign.isprintable() or sign in SPACES or sign in JOINERS
