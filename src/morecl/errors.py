"""The exceptions that reach a user, and the one way to say that a name is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_OTHER_WORDS = {"learning_rate": "lr", "buffer_size": "memory_size"}


class InputError(ValueError):
    """Something the user gave is wrong; the message names the thing, the place and the way out. Exit code 2."""


class DivergedError(RuntimeError):
    """Training produced numbers that are not finite. ``learn_task`` leaves the learner as it was before the task."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """``unknown method 'mroe'; did you mean 'more'? (known: ...)``"""
    names = sorted(known)
    other = _OTHER_WORDS.get(name)
    near = [other] if other in names else difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InputError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}.")
