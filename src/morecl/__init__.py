"""Teach an image classifier new classes, task after task, without forgetting, and have it say "unknown".

>>> import morecl
>>> learner = morecl.create("more", epochs=5)
>>> learner.learn_task(images, labels)
>>> learner.predict(images).labels
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"  # the only place: pyproject.toml reads it from here

if TYPE_CHECKING:
    from morecl.checkpoint import load
    from morecl.errors import DivergedError, InputError
    from morecl.methods import METHODS, Learner, Prediction, create
    from morecl.records import Record, read_record

__all__ = [
    "METHODS",
    "DivergedError",
    "InputError",
    "Learner",
    "Prediction",
    "Record",
    "__version__",
    "create",
    "load",
    "read_record",
]

_HOMES = {
    "checkpoint": ("load",),
    "errors": ("DivergedError", "InputError"),
    "methods": ("METHODS", "Learner", "Prediction", "create"),
    "records": ("Record", "read_record"),
}


def __getattr__(name: str) -> Any:
    """torch takes seconds to import: what needs it is loaded when it is first asked for."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"morecl.{home}"), name)
    raise AttributeError(f"module 'morecl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
