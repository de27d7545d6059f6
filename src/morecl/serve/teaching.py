"""The process that learns: ``python -m morecl.serve.teaching``, started by :mod:`morecl.serve.jobs`.

It reads one line of JSON from stdin (:class:`Order`), teaches a copy of the model loaded from disk, commits the new
version, and writes one line of JSON per event to stdout. Stdin stays open as long as the server lives: when it ends, so
does this process, and the model on disk is whole whenever that happens.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from morecl.errors import DivergedError, InputError

if TYPE_CHECKING:  # torch takes seconds to import; the watch over stdin begins before that
    from morecl.classifier import Classifier, Lesson
    from morecl.images import ImageArray
    from morecl.progress import Listener

NICENESS = 10
TRAINED = 0.9  # share of the work that training is; heads, statistics and measuring are the rest

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Order:
    """What to teach. ``images``: a file of squares, uint8 (N, S, S, 3); ``names``: N classes."""

    model: str
    images: str
    names: list[str]
    more: bool
    device: str | None


def main() -> int:
    order = Order(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_the_server, args=(Path(order.images).parent,), daemon=True).start()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints must not come between the events
    with suppress(AttributeError, OSError):
        os.nice(NICENESS)

    def say(event: dict[str, Any]) -> None:
        events.write(json.dumps(event, allow_nan=False) + "\n")
        events.flush()

    try:
        say({"step": "loading the model"})
        teach(order, say)
    except (InputError, DivergedError) as error:
        say({"error": str(error)})
        return 2
    except MemoryError:
        say({"error": "not enough memory for this lesson; teach fewer images at a time"})
        return 2
    return 0


def teach(order: Order, say: Say) -> None:
    """Teach and commit. ``say`` gets ``{step, share, left}`` on the way and ``{version, lessons}`` at the end."""
    import numpy as np

    from morecl.classifier import ModelFolder

    folder = ModelFolder(order.model)
    with folder.changing():
        classifier = folder.load(device=order.device)
        images = np.load(order.images, allow_pickle=False)
        lessons = lesson(classifier, images, order.names, order.more, say)
        say({"step": "saving", "share": 0.97})
        action = "learn" if any(one.action == "learn" for one in lessons) else "add"
        number = folder.commit(classifier, action, listed([name for one in lessons for name in one.classes]))
    say({"version": number, "lessons": [asdict(one) for one in lessons]})


def lesson(classifier: Classifier, images: ImageArray, names: list[str], more: bool, say: Say) -> list[Lesson]:
    """Further images of classes it knows first, if ``more``; then new classes."""
    from morecl.classifier.lesson import Course, course

    everything = list(range(len(names)))
    found = course(classifier, images, names, more=True) if more else Course([], everything)
    lessons: list[Lesson] = []
    if found.add:
        listener = _listener(say, 0.0, 0.5 if found.learn else 1.0)
        lessons.append(classifier.add(images[found.add], [names[i] for i in found.add], listener=listener))
    if found.learn:
        listener = _listener(say, 0.5 if found.add else 0.0, 1.0)
        lessons.append(classifier.learn(images[found.learn], [names[i] for i in found.learn], listener=listener))
    lessons[0] = replace(lessons[0], notes=(*found.notes, *lessons[0].notes))
    return lessons


def listed(names: list[str], most: int = 5) -> str:
    """``cat, dog``; of many the first few and a count."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _listener(say: Say, first: float, last: float) -> Listener:
    """Tells ``say`` how far training is; the lesson begins at the share ``first`` and ends at ``last``."""
    from morecl.progress import EpochDone, TimeLeft

    left = TimeLeft()
    current: list[str] = []

    def listen(event: EpochDone) -> None:
        if current != [event.stage]:
            current[:] = [event.stage]
            left.start(event.epochs, event.epoch)
        left.reach(event.epoch)
        part = TRAINED + 0.05 if event.stage else TRAINED * event.epoch / event.epochs
        seconds = None if event.stage else left.seconds
        step = f"training, {event.step}" if not event.stage else event.step
        say({"step": step, "share": first + (last - first) * part, "left": seconds})

    return listen


def _end_with_the_server(uploads: Path) -> None:
    """Wait until stdin ends, which means that the server is gone; remove the uploads and stop at once."""
    with suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    shutil.rmtree(uploads, ignore_errors=True)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
