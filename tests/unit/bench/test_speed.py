"""The benchmark of speed: what it measures, and what it shows."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest
import torch
from rich.console import Console
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from morecl.bench import speed
from morecl.bench.common import made_up_images
from morecl.bench.prediction import grown
from morecl.bench.speed import AtTasks, SpeedSize
from morecl.methods.more import More

SETTINGS = {"device": "cpu", "image_size": 8, "bottleneck": 4, "batch_size": 8, "memory_batch_size": 8}


def test_every_stage_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "first_step", lambda settings: 12.3)
    asked: list[tuple[int, int, bool]] = []
    predict = More.predict

    def seen(self: More, images: Any) -> object:
        asked.append((len(self.tasks), len(images), self.captured))
        return predict(self, images)

    monkeypatch.setattr(More, "predict", seen)
    phases: list[str] = []
    size = SpeedSize(tasks=(1, 3), images=8, epochs=1, memory=6, batch=4, repeats=2)
    found = speed.bench(SETTINGS, size, phases.append)
    assert phases == ["first step of a process", "matrix products", "training", "1 tasks", "3 tasks"]
    assert [row.tasks for row in found.at_tasks] == [1, 3]
    assert all(getattr(row, field.name) > 0 for row in found.at_tasks for field in fields(AtTasks))
    one_and_batch = [1] * 2 * (2 + 2) + [4] * (2 + 1)
    assert asked == [(tasks, count, False) for tasks in (1, 3) for count in one_and_batch]
    console = Console(width=160, record=True)
    found.show(console)
    shown = console.export_text()
    assert f"{1000 * found.at_tasks[1].latency:.2f}" in shown and "a further task adds" in shown
    assert found.first_step_seconds == 12.3 and "first training step after 12.3 s" in shown
    assert shown.count(f" {found.at_tasks[1].times_plain:.2f} ") >= 1 and "times timm" in shown
    assert found.as_dict()["schema"] == "morecl.bench/2"


def test_growth_is_the_slope_per_task() -> None:
    rows = [AtTasks(tasks, 0, 0, 0.5 + 0.25 * tasks, 0, 0, 0, 0, 0, 0) for tasks in (1, 5, 10)]
    assert speed.growth(rows, "latency") == pytest.approx(0.25)


def test_plain_passes_are_those_of_timms_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of all images per network, in the learner's batches; the time is a multiple of theirs."""
    learner = grown("more", More.Config.parse(SETTINGS | {"eval_batch_size": 3}), 4)
    passed: list[tuple[int, ...]] = []
    forward = VisionTransformer.forward

    def seen(self: VisionTransformer, x: Tensor) -> Tensor:
        passed.append(tuple(x.shape))
        return forward(self, x)

    monkeypatch.setattr(VisionTransformer, "forward", seen)
    monkeypatch.setattr(learner, "predict", lambda images: time.sleep(0.3))
    started = time.perf_counter()
    ratio = speed.against_timm(learner, made_up_images(7), repeats=1)
    whole = time.perf_counter() - started
    assert passed == [(count, 3, 8, 8) for _ in range(2 + 1) for _ in range(4) for count in (3, 3, 1)]
    assert 0.3 / (whole - 3 * 0.3) < ratio  # the plain passes took at most what was left


@pytest.mark.gpu
def test_on_a_gpu_one_image_is_answered_from_a_graph() -> None:
    size = SpeedSize(tasks=(5,), images=64, epochs=1, memory=20, batch=8, repeats=5)
    (row,) = speed.bench({"device": "cuda", "compile": "auto"}, size, lambda _: None).at_tasks
    assert row.latency < row.latency_uncaptured


def test_the_sustained_rate_is_that_of_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    now, products = [0.0], []

    def product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        products.append(a.shape)
        now[0] += 0.01 if now[0] < 0.99 else 0.02  # the clock of the card falls after a second

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    rate = speed.sustained_matrix_rate(torch.device("cpu"), torch.float32, seconds=2.0)
    assert rate == pytest.approx(2 * 1024**3 / 0.02)
    assert set(products) == {(1024, 1024)} and now[0] == pytest.approx(2.0, abs=0.2)
