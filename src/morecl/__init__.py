"""Teach an image classifier new classes, task after task, without forgetting, and have it say "unknown".

>>> import morecl
>>> learner = morecl.create("more", epochs=5)
>>> learner.learn_task(images, labels, morecl.progress.show())  # without `show()`: silent
>>> learner.predict(images).labels

Importing morecl before torch sets ``OMP_WAIT_POLICY=PASSIVE`` and ``KMP_BLOCKTIME=0`` in ``os.environ``, unless you set
one of them, so that idle OpenMP threads sleep. By default they spin, which makes training several times slower as
soon as another process uses a core. If torch was imported first, export the variables yourself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from morecl.late import late_names

__version__ = "0.2.0"  # the only place: pyproject.toml reads it from here

# Read by OpenMP when torch loads it. The first is standard and enough for GNU's, the second is Intel's and LLVM's.
_SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
if not {*_SLEEPING_THREADS, "GOMP_SPINCOUNT"} & os.environ.keys():  # a user's choice wins
    os.environ.update(_SLEEPING_THREADS)

if TYPE_CHECKING:
    from morecl import progress
    from morecl.checkpoint import load
    from morecl.classifier import Classifier
    from morecl.errors import DivergedError, InputError
    from morecl.methods import METHODS, Learner, Prediction, create
    from morecl.records import Record, read_record

__all__ = [
    "METHODS",
    "Classifier",
    "DivergedError",
    "InputError",
    "Learner",
    "Prediction",
    "Record",
    "__version__",
    "create",
    "load",
    "progress",
    "read_record",
]

__getattr__ = late_names(
    __name__,
    {
        "checkpoint": ("load",),
        "classifier": ("Classifier",),
        "errors": ("DivergedError", "InputError"),
        "methods": ("METHODS", "Learner", "Prediction", "create"),
        "progress": (),
        "records": ("Record", "read_record"),
    },
)


def __dir__() -> list[str]:
    return __all__
