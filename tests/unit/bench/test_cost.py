"""The cost benchmark: what it counts, and what it prints."""

from __future__ import annotations

import gc
import io
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import tiny
from morecl.bench import common, cost
from morecl.bench.cost import AfterTask, Costs, CostSize, MethodCost, Passes
from morecl.errors import InputError
from morecl.methods import METHODS

# 16 images in batches of 8; the memory holds 12 and gives 8 to each batch
SIZE = CostSize(tasks=3, images=16, repeats=1, settings={**tiny.SETTINGS, "epochs": 1})


def measured(method: str, size: CostSize = SIZE, **settings: Any) -> MethodCost:
    return cost.measure([method], settings, size, lambda _: None).methods[-1]


EXPECTED = {
    "finetune": Passes(16, 0),
    "single": Passes(16, 0),
    "joint": Passes(3 * 16, 0),  # everything seen so far
    "agem": Passes(16 + 2 * 8, 0),  # a memory batch with each of the two
    "derpp": Passes(16 + 2 * 2 * 8, 0),  # two of them
    "more": Passes(16 + 2 * 8, 16 + 2 * 2 * 12),  # statistics; memory and as much of the task in both earlier networks
    "pass": Passes(4 * 16, 4 * 16 + 16),  # four rotations; their features by the old network, and the means at the end
    "owm": Passes(16, 16),  # the layers' inputs
    "ncm": Passes(0, 16),
    # Two batches with 8 images of the memory each; one and a half memory batches for hindsight; two anchors in 100
    # steps, each through two networks. The mean of the features; the four earlier anchors, which take one pass with
    # gradients and two without in each step. Missing to batches of 8: 4 for hindsight, 6 for new anchors, 4 for others.
    "hal": Passes(16 + 2 * 8 + 12 + 2 * 4 + 400, 16 + 2 * 2 * 4, 4 + 200 * 6 + 2 * 4 + 2 * 2 * 4 / 3),
}


@pytest.fixture(scope="module")
def all_costs() -> dict[str, MethodCost]:
    reported: list[str] = []
    costs = cost.measure(list(EXPECTED), {}, SIZE, reported.append)
    assert [text.split(",")[0] for text in reported] == ["finetune", *EXPECTED]
    return {found.method: found for found in costs.methods}


@pytest.mark.parametrize("method", EXPECTED)
def test_passes_are_counted(all_costs: dict[str, MethodCost], method: str) -> None:
    found, expected = all_costs[method], EXPECTED[method]
    assert found.image_passes == replace(expected, filling=pytest.approx(expected.filling))
    images = expected.with_gradient + expected.without_gradient / 3
    assert found.passes == pytest.approx((images + expected.filling) / 16)
    assert found.overhead == pytest.approx(found.seconds / found.finetune_seconds / found.passes)
    assert found.image_overhead == pytest.approx(found.overhead * (images + expected.filling) / images)


def test_passes_are_per_epoch() -> None:
    finetune, turned = cost.measure(["pass"], {"epochs": 2}, SIZE, lambda _: None).methods
    assert (finetune.image_passes, finetune.passes) == (Passes(32, 0), 1)
    assert turned.passes == pytest.approx(4 + 80 / 3 / 32)


def test_agems_reference_batch_is_no_larger_than_the_memory() -> None:
    assert measured("agem", memory_batch_size=256).image_passes == Passes(16 + 2 * 12, 0)


def test_joint_needs_more_passes_with_every_task() -> None:
    for tasks in (2, 4):
        assert measured("joint", CostSize(tasks, 16, 1, SIZE.settings)).passes == tasks


def test_counting_ends() -> None:
    learner = tiny.create("finetune")
    learner.checked_images = 0
    images, labels = tiny.task([0, 1], ["a", "b"], 4)
    with cost.counting(learner.network) as passes:
        learner.learn_task(images, labels)
        learner.predict(images[:3])
    assert passes == Passes(8, 3)
    learner.predict(images)
    assert passes == Passes(8, 3)
    with pytest.raises(ZeroDivisionError), cost.counting(learner.network) as stopped:
        _ = 1 / 0
    learner.predict(images)
    assert stopped == Passes(0, 0)


def test_the_last_task_starts_from_the_same_state_every_time() -> None:
    stream = cost._Stream("derpp", METHODS["derpp"].Config.parse(tiny.settings_for("derpp")), SIZE, batch=8)
    stream.run()
    before = tiny.snapshot(stream.learner)
    for _ in range(2):
        assert stream.again() > 0
        tiny.assert_same(tiny.snapshot(stream.learner), before)


def test_memory_kept_by_a_method(all_costs: dict[str, MethodCost]) -> None:
    joint, finetune = all_costs["joint"], all_costs["finetune"]
    head = 2 * (tiny.DIM + 1) * 4  # two classes
    assert finetune.growth("kept") == head
    assert joint.growth("kept") == head + 16 * (32 * 32 * 3 + 8)  # every image and its class
    assert [task.allocated for task in joint.after_task] == [None] * 3  # a CPU does not count its memory
    assert joint.growth("allocated") is None


def test_settings_apply_to_the_methods_that_have_them() -> None:
    costs = cost.measure(["ncm", "pass"], {"kd_weight": 3.0, "epochs": 1}, SIZE, lambda _: None)
    of = {c.method: c.settings for c in costs.methods}
    assert of["pass"]["kd_weight"] == 3.0 and of["pass"]["batch_size"] == 8
    assert "kd_weight" not in of["finetune"] and "bottleneck" not in of["ncm"]
    with pytest.raises(InputError, match="unknown setting 'kd_wait'; did you mean 'kd_weight'"):
        cost.measure(["pass"], {"kd_wait": 3.0}, SIZE, lambda _: None)


def test_method_names() -> None:
    assert cost.method_names("all") == list(METHODS)
    assert cost.method_names("more, ncm,more") == ["more", "ncm"]
    with pytest.raises(InputError, match="unknown method 'mroe'; did you mean 'more'"):
        cost.method_names("ncm,mroe")


def row(method: str, overhead: float, **memory: int | None) -> MethodCost:
    empty = dict.fromkeys(("kept_on_device", "allocated", "allocated_asked", "peak"))
    tasks = [
        AfterTask(**{"kept": 10_000 * k, **{n: v and v * k for n, v in {**empty, **memory}.items()}}) for k in (1, 3)
    ]
    return MethodCost(method, {}, Passes(6, 3), 1.75, 2.0, 1.0, overhead, 2 * overhead, tasks)


def table(*rows: MethodCost) -> str:
    console = Console(file=io.StringIO(), width=120)
    place = {"device": "here", "precision": "float32", "compiled": False, "backbone": "vit", "image_size": 32}
    Costs(**place, versions={}, tasks=2, images=16, methods=list(rows)).show(console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_marks_methods_above_the_limit() -> None:
    text = table(row("finetune", 1.0), row("hal", 1.51), row("gd", 1.5))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["hal"] == ["hal", "1.75", "2.00", "1.51", "!", "3.02", "20.0", "kB"]
    assert lines["gd"] == ["gd", "1.75", "2.00", "1.50", "3.00", "20.0", "kB"]
    assert "! above 1.5: hal\n" in text
    assert "above" not in table(row("finetune", 1.0))


def test_the_table_on_a_device_that_counts_its_memory() -> None:
    text = table(row("more", 1.0, kept_on_device=2_000, allocated=3_000, allocated_asked=4_000, peak=5_000))
    (line,) = (line for line in text.splitlines() if line.strip().startswith("more"))
    assert line.split()[5:] == ["20.0", "kB", "4.0", "kB", "6.0", "kB", "8.0", "kB", "5.0", "kB", "15.0", "kB"]


@pytest.mark.parametrize("method", ["agem", "joint", "more", "pass"])
def test_passes_of_compiled_code_are_counted_with_a_plain_learner(method: str) -> None:
    stream = cost._Stream(method, cost._configs([method], {}, SIZE)[method], SIZE, batch=8)
    stream.run()
    found = stream.passes()
    stream.learner.compiled = True  # pretends to be compiled, so its passes are counted separately
    assert stream.passes() == found
    assert stream.passes() is not found


def test_earlier_methods_are_freed_before_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []

    def count(_: torch.device) -> int:
        gc.collect()
        alive.append(sum(type(thing) is cost._Stream for thing in gc.get_objects()))
        return 0

    monkeypatch.setattr(cost, "_allocated", count)
    cost.measure(["ncm", "csc"], {}, SIZE, lambda _: None)
    assert alive == [1, 2, 2, 2]  # the reference, then the reference and one method at a time


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["finetune", "more"])
def test_memory_on_the_gpu(method: str) -> None:
    found = measured(method, device="cuda")
    assert found.image_passes.with_gradient == {"finetune": 16, "more": 32}[method]
    for name in ("kept_on_device", "allocated", "allocated_asked", "peak"):
        assert found.growth(name) is not None
    assert all(task.peak > task.allocated >= task.kept_on_device for task in found.after_task)  # type: ignore[operator]
    # tensors take blocks of 512 bytes, and half of MORE's precision matrix (147 kB) is not saved; cuBLAS would keep
    # 65 MiB for each stream on which a step was captured
    assert found.growth("allocated") < found.growth("kept_on_device") + 250_000  # type: ignore[operator]


def test_works_take_turns() -> None:
    order: list[str] = []
    works = [lambda: order.append("a"), lambda: (order.append("b"), time.sleep(0.01))]
    short, long = common.in_turn(works, torch.device("cpu"), 3)
    assert order == ["a", "b"] * 5  # two warm-up runs
    assert 0 < short < long and long >= 0.01
