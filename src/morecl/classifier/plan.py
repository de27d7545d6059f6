"""How long to train: from the number of images, and from a budget of minutes if there is one."""

from __future__ import annotations

import math
from dataclasses import dataclass

WORK = 8000  # images to train on in all, repetitions counted, if there are few
FEWEST_EPOCHS, MOST_EPOCHS = 5, 40
BATCHES = 8  # at least so many steps an epoch, if batches of 8 allow it
BATCH_SIZES = (8, 64)
PER_CLASS = 20  # remembered images of a class ...
MEMORY = (200, 2000)  # ... within these bounds for all of them
PLANNED = ("epochs", "batch_size", "memory_batch_size", "memory_size")  # settings that each lesson chooses


@dataclass(frozen=True)
class Plan:
    """Settings of one lesson."""

    epochs: int
    batch_size: int
    memory_size: int

    def settings(self) -> dict[str, int]:
        """For :meth:`morecl.methods.base.Learner.configure`."""
        return {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "memory_batch_size": self.batch_size,
            "memory_size": self.memory_size,
        }


def plan(images: int, classes: int) -> Plan:
    """A plan for ``images`` to train on; ``classes``: known ones and new ones together."""
    epochs = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(WORK / max(1, images))))
    batch = min(BATCH_SIZES[1], max(BATCH_SIZES[0], images // BATCHES))
    return Plan(epochs, batch, min(MEMORY[1], max(MEMORY[0], PER_CLASS * classes)))


def within(wanted: Plan, images: int, minutes: float, images_per_second: float, overhead: float) -> Plan:
    """``wanted`` with as many epochs as fit into ``minutes``, at least one and at most ``MOST_EPOCHS``.

    Args:
        images_per_second: of training, as measured.
        overhead: seconds of everything else.
    """
    room = max(0.0, 60 * minutes - overhead) * images_per_second / max(1, images)
    return Plan(max(1, math.floor(min(room, MOST_EPOCHS))), wanted.batch_size, wanted.memory_size)
