"""A classifier for one's own images: learn, predict, say "unknown". See :mod:`morecl.classifier.core`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from morecl.late import late_names

if TYPE_CHECKING:  # torch takes seconds to import
    from morecl.classifier.core import Classifier
    from morecl.classifier.results import Answer, Choice, Evaluation, Info, Lesson, Promise
    from morecl.classifier.store import ModelFolder, Version

__all__ = ["Answer", "Choice", "Classifier", "Evaluation", "Info", "Lesson", "ModelFolder", "Promise", "Version"]

__getattr__ = late_names(
    __name__,
    {
        "core": ("Classifier",),
        "results": ("Answer", "Choice", "Evaluation", "Info", "Lesson", "Promise"),
        "store": ("ModelFolder", "Version"),
    },
)
