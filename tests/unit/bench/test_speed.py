"""The benchmark of speed: what it measures, and what it shows."""

from __future__ import annotations

from dataclasses import fields

import pytest
from rich.console import Console

from morecl.bench import speed
from morecl.bench.speed import AtTasks, SpeedSize
from morecl.methods.more import More

SETTINGS = {"device": "cpu", "image_size": 8, "bottleneck": 4, "batch_size": 8, "memory_batch_size": 8}


def test_every_stage_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []
    predict = More.predict

    def seen(self: More, images: object) -> object:
        asked.append((len(self.tasks), self.captured))
        return predict(self, images)

    monkeypatch.setattr(More, "predict", seen)
    phases: list[str] = []
    size = SpeedSize(tasks=(1, 3), images=8, epochs=1, memory=6, batch=4, repeats=2)
    found = speed.bench(SETTINGS, size, phases.append)
    assert phases == ["matrix products", "training", "1 tasks", "3 tasks"]
    assert [row.tasks for row in found.at_tasks] == [1, 3]
    assert all(getattr(row, field.name) > 0 for row in found.at_tasks for field in fields(AtTasks))
    assert asked == [(tasks, False) for tasks in (1, 3) for _ in range(2 * (2 + 2))]
    console = Console(width=160, record=True)
    found.show(console)
    shown = console.export_text()
    assert f"{1000 * found.at_tasks[1].latency:.2f}" in shown and "a further task adds" in shown
    assert found.as_dict()["schema"] == "morecl.bench/2"


def test_growth_is_the_slope_per_task() -> None:
    rows = [AtTasks(tasks, 0, 0, 0.5 + 0.25 * tasks, 0, 0, 0, 0, 0) for tasks in (1, 5, 10)]
    assert speed.growth(rows, "latency") == pytest.approx(0.25)


@pytest.mark.gpu
def test_on_a_gpu_one_image_is_answered_from_a_graph() -> None:
    size = SpeedSize(tasks=(5,), images=64, epochs=1, memory=20, batch=8, repeats=5)
    (row,) = speed.bench({"device": "cuda", "compile": "auto"}, size, lambda _: None).at_tasks
    assert row.latency < row.latency_uncaptured
