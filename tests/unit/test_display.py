"""What the terminal shows while a run goes on."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from morecl.display import watching
from morecl.evaluator import Step
from morecl.progress import EpochDone


class Stream(list[None]):
    dataset = SimpleNamespace(skipped=())


def test_stages_are_named_but_only_a_tasks_own_epochs_move_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float | None, str | None]] = []
    monkeypatch.setattr(
        Progress, "update", lambda self, row, completed=None, detail=None, **_: seen.append((completed, detail))
    )
    learner: Any = SimpleNamespace(config=SimpleNamespace(epochs=5), device="cpu")
    stream: Any = Stream([None] * 3)
    out = io.StringIO()
    with watching(Console(file=out, width=100), "title") as watcher:
        watcher.started(learner, stream, 1)
        watcher.epoch(EpochDone(1, 2, 5, 0.5, 80.0))
        watcher.epoch(EpochDone(1, 7, 30, 0.25, 90.0, "balanced"))
        watcher.task(1, Step([50.0], [90.0], 50.0, None, None, None, None, None), 12.0)
    assert seen == [
        (5, "on cpu"),
        (7, "task 2/3 epoch 2/5 loss 0.50 80 img/s"),
        (None, "task 2/3 balanced 7/30 loss 0.25 90 img/s"),
        (10, None),
    ]
    assert "task 2/3  accuracy on all seen 50.00 %" in out.getvalue()
