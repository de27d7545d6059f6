"""What long work tells about itself while it runs: methods report, the command line draws, others may listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochDone:
    """One pass over a task's data is done.

    ``stage`` names what a method does besides (a teacher, balancing, back-update): it has epochs of its own and does
    not count as progress of the task. Empty for the training of the task itself.
    """

    task: int
    epoch: int  # 1-based
    epochs: int
    loss: float
    images_per_second: float
    stage: str = ""


Listener = Callable[[EpochDone], None]


def silent(event: EpochDone) -> None:
    """Listen to nothing."""
