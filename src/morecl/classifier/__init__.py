"""A classifier for one's own images: learn, predict, say "unknown". See :mod:`morecl.classifier.core`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch takes seconds to import
    from morecl.classifier.core import Classifier
    from morecl.classifier.results import Answer, Choice, Evaluation, Info, Lesson, Promise
    from morecl.classifier.store import ModelFolder, Version

__all__ = ["Answer", "Choice", "Classifier", "Evaluation", "Info", "Lesson", "ModelFolder", "Promise", "Version"]

_HOMES = {
    "core": ("Classifier",),
    "results": ("Answer", "Choice", "Evaluation", "Info", "Lesson", "Promise"),
    "store": ("ModelFolder", "Version"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"morecl.classifier.{home}"), name)
    raise AttributeError(f"module 'morecl.classifier' has no attribute {name!r}")
