"""Callbacks for following a run, such as from the progress display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from morecl.progress import Listener, silent

if TYPE_CHECKING:  # torch takes seconds to import
    from morecl.data import TaskStream
    from morecl.evaluator import Step
    from morecl.methods import Learner


@dataclass(frozen=True)
class Watcher:
    """Callbacks of a run; each is optional.

    Attributes:
        started: called with the learner, the stream and the number of tasks already done, before any training.
            ``stream.dataset`` says how many images are learned and tested, and the side in pixels they are stored at
            (``side``).
        epoch: called after each epoch.
        task: called after each task with its index, its measurements and the seconds since the run began.
    """

    started: Callable[[Learner, TaskStream, int], None] = lambda learner, stream, done: None
    epoch: Listener = silent
    task: Callable[[int, Step, float], None] = lambda index, step, seconds: None
