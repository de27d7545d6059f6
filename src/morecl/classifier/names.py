"""Names of classes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from morecl.classifier.evaluation import UNKNOWN
from morecl.errors import InputError
from morecl.labels import JOINERS, SPACES, is_shown

LONGEST_NAME = 200


def check_texts(names: Iterable[Any]) -> None:
    """Raise :class:`InputError` unless all are text: no number is the name of a class."""
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise InputError(f"the name of a class must be text, not {wrong[0]!r:.60}")


def check_name(name: Any) -> None:
    """Raise :class:`InputError` if this cannot be the name of a class."""
    check_texts([name])
    shown = repr(name) if len(name) <= 60 else f"{name[:60]!r}..."
    if not name.strip(SPACES + JOINERS) or len(name) > LONGEST_NAME:
        raise InputError(f"{shown} cannot name a class: 1 to {LONGEST_NAME} characters are needed")
    if wrong := next((sign for sign in name if not is_shown(sign)), None):
        what = unicodedata.name(wrong, "which is not printed")
        raise InputError(f"{shown} cannot name a class: it holds U+{ord(wrong):04X} ({what})")
    if name[0] in JOINERS:
        raise InputError(f"{shown} cannot name a class: it begins with an invisible joiner")
    if name != name.strip(SPACES):  # in a list nobody sees how it differs from the name without
        raise InputError(f"{name!r} cannot name a class: it begins or ends with a blank; rename it, or its folder")
    if name.lower() == UNKNOWN:
        raise InputError(f"{name!r} cannot name a class: it is the answer for what was never taught")


def look_alikes(names: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each of ``names`` that differs only in small and capital letters, kinds of spaces or joiners from one of them
    before it, or from one of those that are ``known``; and that one.
    """

    def seen(name: str) -> str:
        without = name.translate(dict.fromkeys(map(ord, JOINERS)))
        return " ".join(without.split()).casefold()

    spelled = {seen(name): name for name in known}
    for name in names:
        if (other := spelled.setdefault(seen(name), name)) != name:
            yield name, other


def two_classes(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """A note for each of the classes ``names`` that may be meant to be another one."""
    return [
        f"{name!r} and {other!r} are two classes, though they look alike. If they are one, undo "
        "the lesson, or start a new model, and teach the images in one folder"
        for name, other in look_alikes(names, known)
    ]
