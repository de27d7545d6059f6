"""Listeners, and the line that shows progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import morecl
import tiny
from morecl import progress
from morecl.progress import EpochDone, TimeLeft, show, silent


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_the_mean_time_per_unit_times_the_units_left() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    assert left.share is None and str(left) == "--:-- left"
    clock.now = 100.0
    left.start(total=10, done=4)
    assert left.share == 0.4 and left.seconds is None
    clock.now = 160.0
    left.reach(6)
    assert left.seconds == pytest.approx(30.0 * 4)
    clock.now = 170.0
    assert left.seconds == pytest.approx(30.0 * 4 - 10)
    clock.now = 999.0
    assert left.seconds == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "0:07 left"), (59.6, "1:00 left"), (750, "12:30 left"), (3723, "1:02:03 left")]
)
def test_time_left_as_text(seconds: float, text: str) -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.start(2)
    clock.now = seconds
    left.reach(1)
    assert str(left) == text


def terminal(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=True, color_system=None), out


def test_show_rewrites_one_line_per_task_and_stage() -> None:
    console, out = terminal()
    clock = Clock()
    listener = show(console, clock)
    for event in (
        EpochDone(0, 1, 3, 0.5, 80.0),
        EpochDone(0, 2, 3, 0.25, 90.0),
        EpochDone(0, 3, 3, 0.125, 100.0),
        EpochDone(0, 1, 1, 0.25, None, "back-update"),
    ):
        listener(event)
        clock.now += 4.0
    lines = out.getvalue().split("\n")
    assert [line.count("\r") for line in lines] == [3, 1, 0]
    first, second, third = lines[0].split("\r")[1:]
    assert first.removeprefix("\x1b[2K").startswith("task 1 epoch 1/3 ") and "loss 0.50 80 img/s --:-- left" in first
    assert "loss 0.25 90 img/s 0:04 left" in second
    assert "loss 0.12 100 img/s" in third and "left" not in third
    assert "task 1 back-update 1/1" in lines[1] and "img/s" not in lines[1]


def test_show_is_silent_without_a_terminal() -> None:
    out = io.StringIO()
    listener = show(Console(file=out))
    assert listener is silent
    listener(EpochDone(0, 1, 3, 0.5, 80.0))
    assert out.getvalue() == ""


def test_show_is_a_listener_of_learn_task() -> None:
    console, out = terminal()
    learner = tiny.create("more", epochs=2)
    learner.learn_task(*tiny.task((0, 1), ("a", "b"), 4), morecl.progress.show(console))
    assert "task 1 epoch 2/2" in out.getvalue()


def test_only_stages_on_images_report_a_speed() -> None:
    events: list[EpochDone] = []
    learner = tiny.create("more", epochs=1)
    for kinds, labels in (((0, 1), ("a", "b")), ((2, 3), ("c", "d"))):
        learner.learn_task(*tiny.task(kinds, labels, 4), events.append)
    speeds = {event.stage: event.images_per_second for event in events}
    assert speeds.keys() == {"", "back-update"}
    assert speeds["back-update"] is None and speeds[""] is not None and speeds[""] > 0


def test_counts_go_to_the_open_display() -> None:
    seen: list[tuple[str, int, int]] = []
    with progress.shown_by(lambda *count: seen.append(count)):
        with progress.counting("decoding images", 5, visible=True) as count:
            count(3)
        with progress.counting("decoding images", 5, visible=False) as count:
            count(4)
    assert seen == [("decoding images", 0, 5), ("decoding images", 3, 5)]


def test_counts_without_a_terminal_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.counting("decoding images", 5, visible=True) as count:
        count(5)
    assert capsys.readouterr() == ("", "")
