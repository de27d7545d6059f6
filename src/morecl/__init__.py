"""Teach an image classifier new classes, task after task, without forgetting, and have it say "unknown".

>>> import morecl
>>> learner = morecl.create("more", epochs=5)
>>> learner.learn_task(images, labels)
>>> learner.predict(images).labels
"""

__version__ = "0.1.0"

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
