"""What a run shows while it works."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from morecl.cli.display import folder_notes, watching
from morecl.evaluator import Step
from morecl.progress import EpochDone, counting

STEP = Step([50.0], [90.0], 50.0, None, None, None, None, None)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stream(list[None]):
    """A stream of as many tasks as it has items."""

    scored_on = "test"

    def __init__(self, tasks: int, name: str = "digits", y_test: tuple[int, ...] = (0, 1), train: int = 8):
        super().__init__([None] * tasks)
        self.dataset = SimpleNamespace(
            name=name,
            y_test=np.array(y_test),
            y_train=np.zeros(train),
            classes=("a", "b"),
            skipped=("broken.png",),
            chosen_side=False,
        )


def learner(epochs: int = 5, resize: int = 32) -> Any:
    backbone = SimpleNamespace(architecture="vit_x", name="vit_x@file", input=SimpleNamespace(resize=resize))
    config = SimpleNamespace(epochs=epochs, image_size=None)
    return SimpleNamespace(config=config, device="cpu", backbone=backbone)


def stream(*args: Any, **kwargs: Any) -> Any:
    return Stream(*args, **kwargs)


def test_without_a_terminal_a_line_is_printed_every_half_minute_within_a_task() -> None:
    out, clock = io.StringIO(), Clock()
    with watching(Console(file=out, width=120), "digits-5t more", clock) as watcher:
        watcher.started(learner(epochs=5), stream(2), 0)
        for epoch in range(1, 6):
            clock.now += 14.0
            watcher.epoch(EpochDone(0, epoch, 5, 0.5, 80.0))
        clock.now += 20.0
        watcher.epoch(EpochDone(0, 1, 3, 0.25, None, "back-update"))
        clock.now += 1.0
        watcher.task(0, STEP, 91.0)
        clock.now += 29.0
        watcher.epoch(EpochDone(1, 1, 5, 0.5, 80.0))
    assert out.getvalue().splitlines() == [
        "digits-5t more  task 1/2  epoch 3/5  loss 0.50  80 img/s  1:38 left",
        "digits-5t more  task 1/2  back-update 1/3  loss 0.25  0:50 left",
        "digits-5t more  task 1/2  accuracy on all seen 50.00 %  91 s",
    ]


def test_notes_come_first_and_not_again_when_a_run_is_resumed() -> None:
    task = "digits-5t more  task {}/2  accuracy on all seen 50.00 %  1 s"
    for done, lines in ((0, ["one note", task.format(1)]), (1, ["resuming after task 1 of 2", task.format(2)])):
        out = io.StringIO()
        with watching(Console(file=out, width=120), "digits-5t more", notes=["one note"]) as watcher:
            watcher.started(learner(), stream(2), done)
            watcher.task(done, STEP, 1.0)
        assert out.getvalue().splitlines() == lines


def live_line(width: int, event: EpochDone, title: str = "digits-5t more") -> str:
    """The live line in a terminal of ``width`` columns, 12 s after the start."""
    clock = Clock()
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard", record=True)
    with watching(console, title, clock) as watcher:
        watcher.started(learner(epochs=20), stream(5), 0)
        clock.now += 12.0
        watcher.epoch(EpochDone(1, 4, 20, 0.5, 182.4))
        watcher.epoch(event)
    return next(line.strip() for line in reversed(console.export_text().splitlines()) if line.strip())


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (120, "digits-5t more task 2/5 epoch 4/20 ━━━━━━━━━━ loss 0.50 182 img/s 0:38 left"),
        (80, "digits-5t more task 2/5 epoch 4/20 ━━━━━━━━━━ loss 0.50 182 img/s 0:38 left"),
        (60, "task 2/5 epoch 4/20 ━━━━━━━━━━ loss 0.50 182 img/s 0:38 left"),
        (50, "task 2/5 epoch 4/20 ━━━━━━━━━━ 182 img/s 0:38 left"),
        (44, "task 2/5 ━━━━━━━━━━ 182 img/s 0:38 left"),
        (28, "━━━━━━━━ 182 img/s 0:38 left"),
    ],
)
def test_a_narrow_terminal_keeps_bar_speed_and_time_left(width: int, expected: str) -> None:
    line = live_line(width, EpochDone(1, 4, 20, 0.5, 182.4))
    assert re.sub("[╸╺]", "━", line) == expected
    assert len(line) <= width


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_long_title_does_not_push_the_rest_out(width: int) -> None:
    line = live_line(width, EpochDone(1, 4, 20, 0.5, 1824.0), title="folder:some/where/" + "x" * 40)
    assert line.endswith("1824 img/s 0:38 left") and "━" in line and len(line) <= width


def test_a_stage_without_images_has_no_speed_and_does_not_move_the_bar() -> None:
    stage = live_line(80, EpochDone(1, 7, 30, 0.25, None, "back-update"))
    training = live_line(80, EpochDone(1, 4, 20, 0.5, 182.4))
    assert "task 2/5 back-update 7/30" in stage and "img/s" not in stage and stage.endswith("0:38 left")
    bars = [re.findall("[━╸╺]+", line) for line in (stage, training)]
    assert bars == [["━━╺━━━━━━━"]] * 2


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("title", ["folder:p[/q] more", "folder:[b]a[/b] more", "folder:heart:x more", "a\\[red] more"])
def test_a_title_is_shown_as_it_is(title: str, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None, record=True)
    with watching(console, title) as watcher:
        watcher.started(learner(), stream(1), 0)
        watcher.task(0, STEP, 12.0)
    assert f"{title}  task 1/1" in console.export_text()


def test_a_folders_run_says_what_is_held_out_and_the_size_of_its_images() -> None:
    assert folder_notes(learner(), stream(2, "folder:photos", (0, 1, 1, 1), train=16)) == [
        "held out for testing, never learned: 1 to 3 images per class (4 of 20)",
        "images are resized to 32 px for backbone vit_x; --backbone deit_small_patch16_224 keeps 224 px",
    ]
    assert folder_notes(learner(resize=248), stream(2, "folder:photos", (0, 1), train=8)) == [
        "held out for testing, never learned: 1 image per class (2 of 10)",
        "images are resized to 248 px for backbone vit_x",
    ]
    trial = stream(2, "folder:photos", (0, 0, 1, 1), train=8)
    trial.scored_on = "validation"
    assert folder_notes(learner(), trial)[0] == ("held out for validation, never learned: 2 images per class (4 of 12)")
    assert folder_notes(learner(), stream(2)) == []


@pytest.mark.parametrize(("done", "expected"), [(0, "held out for testing"), (1, "resuming after task 1 of 2")])
def test_notes_are_printed_at_the_start_and_unreadable_images_are_left_to_the_warning(done: int, expected: str) -> None:
    out = io.StringIO()
    with watching(Console(file=out, width=120), "title") as watcher:
        watcher.started(learner(), stream(2, "folder:photos"), done)
    assert out.getvalue().startswith(expected)
    assert ("images are resized" in out.getvalue()) == (done == 0)
    assert "unreadable" not in out.getvalue() and "broken" not in out.getvalue()


def test_decoding_is_shown_on_the_live_line() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None, record=True)
    with watching(console, "folder:p more", clock), counting("decoding images", 2000, visible=True) as count:
        clock.now += 10.0
        count(500)
    line = next(line.strip() for line in reversed(console.export_text().splitlines()) if line.strip())
    assert line.startswith("folder:p more decoding images 500/2,000 ━") and line.endswith("0:30 left")
