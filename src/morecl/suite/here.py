"""Runs on this machine: some at a time, spread over the cards there are.

With ``jobs`` > 1 each process gets cores // jobs threads (``OMP_NUM_THREADS``, unless the environment sets it) and one
card, the one with the fewest runs (``CUDA_VISIBLE_DEVICES``; of those that the environment names, if it does). A run
with a device that is not ``auto`` or ``cuda`` uses that device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile

from morecl.cores import usable_cores
from morecl.errors import InputError
from morecl.run import SHARED
from morecl.suite import child
from morecl.suite.plan import PlannedRun
from morecl.suite.run import Outcome

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Here:
    """See the module's text. ``count_cards``: how many cards this process can use."""

    poll_seconds = 0.2
    is_here = True

    def __init__(self, jobs: int = 1, count_cards: Callable[[], int] | None = None):
        if jobs < 1:
            raise InputError(f"--jobs is 1 or more, not {jobs}")
        self.title = f"{jobs} at once"
        self._jobs = jobs
        self._environment = child.environment_for(max(1, usable_cores() // jobs) if jobs > 1 else None)
        self._count_cards = count_cards or _count_cards
        self._running: list[LocalJob] = []
        self._all_movable = True  # no run that was started has chosen its device

    def has_room(self) -> bool:
        self._running = [job for job in self._running if not job.ended()]
        return len(self._running) < self._jobs

    def start(self, run: PlannedRun) -> LocalJob:
        movable = run.request.resolve().config.device in ("auto", "cuda")
        self._all_movable &= movable
        card = self._card() if movable else None
        environment = dict(self._environment)
        if card is not None:
            environment[VISIBLE] = card
        if self._jobs > (len(self._cards) if card is not None and self._all_movable else 1):
            environment[SHARED] = "1"  # else each has a card of its own
        job = LocalJob(run, environment, card)
        self._running.append(job)
        return job

    def stop(self) -> None:
        child.stop([job.child for job in self._running])

    @cached_property
    def _cards(self) -> Sequence[str]:
        """Found only if a run may need one: counting them imports torch."""
        return visible_cards(os.environ, self._count_cards)

    def _card(self) -> str | None:
        """The card with the fewest runs, for one that may use any; ``None``: leave it to the run."""
        if self._jobs == 1 or len(self._cards) < 2:
            return None
        used = [job.card for job in self._running]
        return min(self._cards, key=used.count)


class LocalJob:
    """A run in a process of this machine."""

    def __init__(self, run: PlannedRun, environment: Mapping[str, str], card: str | None):
        self.run = run
        self.card = card
        self._begin = child.opened_log(run)
        self.child = child.Child(run, environment)

    def ended(self) -> bool:
        return self.child.process.poll() is not None

    def progress(self) -> str:
        return child.last_line(self.run, self._begin) or "starting"

    def outcome(self) -> Outcome:
        return Outcome.of(self.run, child.result(self.run, self.child.process.returncode, self._begin))


def visible_cards(environment: Mapping[str, str], count: Callable[[], int]) -> Sequence[str]:
    """The cards as ``CUDA_VISIBLE_DEVICES`` names them. Like CUDA, it stops at the first that is not there."""
    given = environment.get(VISIBLE)
    if given is None:
        return [str(card) for card in range(count())]
    named = takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in given.split(",")))
    return list(named)[: count()]


def _count_cards() -> int:
    import torch

    return torch.cuda.device_count()
