"""The process that learns: ``python -m morecl.serve.teaching``, started by :mod:`morecl.serve.jobs`.

It reads one line of JSON from stdin (:class:`Order`), teaches a copy of the model loaded from disk, commits the new
version, and writes one line of JSON per event to stdout. Stdin stays open as long as the server lives: when it ends, so
does this process, and the model on disk is whole whenever that happens.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from morecl.errors import BusyError, DivergedError, InputError
from morecl.serve.private import remove_if_abandoned

if TYPE_CHECKING:  # torch takes seconds to import; the watch over stdin begins before that
    from morecl.classifier import Classifier, Lesson, ModelFolder
    from morecl.classifier.reading import Decoded
    from morecl.progress import Listener

NICENESS = 10
ENDING = 20  # looks whether the server is gone, after its end of the pipe is
PATIENCE, POLL = 600.0, 1.0  # seconds to wait for another process that changes the model; between two looks
BUSY = "the model is being changed by another process; try again later"  # names neither folder nor process
GONE = "nothing of the model is left in its folder: moved, removed, or not mounted"
TRAINED = 0.9  # share of the work that training is; heads, statistics and measuring are the rest

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Order:
    """What to teach. ``images``: a file of squares, uint8 (N, S, S, 3); ``names``: N classes; ``files``: what the user
    calls each image.
    """

    model: str
    images: str
    names: list[str]
    files: list[str]
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
        teach(order, say)
    except (InputError, DivergedError) as error:
        say({"error": without_path(str(error), order.model)})
        return 2
    except OSError as error:
        say({"error": f"the lesson failed: {error.strerror or error}"})
        return 2
    except MemoryError:
        say({"error": "not enough memory for this lesson; teach fewer images at a time"})
        return 2
    return 0


def teach(order: Order, say: Say) -> None:
    """Teach and commit. ``say`` gets ``{step, share, left}`` on the way and ``{version, lessons}`` at the end; or, if
    each image was seen before in its class, which is no mistake, the version as it was and a ``note``.

    One of these also has ``from``, the number of the version that is taught: from then on nobody else can add one.
    """
    import numpy as np

    from morecl.classifier import ModelFolder
    from morecl.classifier.lesson import NothingNewError, taught
    from morecl.classifier.reading import Decoded

    folder = ModelFolder(order.model)
    require_model(folder)
    with _changing(folder, say):
        versions = folder.versions()
        say({"step": "loading the model", "from": versions[-1].number})
        classifier = folder.load(device=order.device)
        images = Decoded.of(np.load(order.images, allow_pickle=False), order.files)
        try:
            lessons = lesson(classifier, images, order.names, order.more, say)
        except NothingNewError as error:
            if not error.is_known:
                raise
            say({"version": versions[-1].number, "note": f"Nothing new: {error.why}"})
            return
        say({"step": "saving", "share": 0.97})
        try:
            number = folder.commit(classifier, *taught(lessons))
        except OSError as error:  # a full disk, most likely
            raise InputError(f"the lesson cannot be saved: {error.strerror or error}") from error
    say({"version": number, "lessons": [asdict(one) for one in lessons]})


def require_model(folder: ModelFolder) -> None:
    """Raise :class:`InputError` if the model is gone. The folder's own message is for whoever makes a new one."""
    from morecl.classifier.store import MODEL, VERSIONS

    if not (folder.path / MODEL).is_file() and not (folder.path / VERSIONS).is_dir():
        raise InputError(GONE)


@contextmanager
def _changing(folder: ModelFolder, say: Say) -> Iterator[None]:
    """:meth:`ModelFolder.changing`, after waiting for another process that changes the model.

    Raises:
        InputError: it still does after ``PATIENCE`` seconds.
    """
    started, told = time.monotonic(), False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder.changing())
                break
            except BusyError as error:
                if time.monotonic() - started >= PATIENCE:
                    raise InputError(BUSY) from error
            if not told:
                say({"step": "waiting for another process that changes the model"})
                told = True
            time.sleep(POLL)
        yield


def lesson(classifier: Classifier, images: Decoded, names: list[str], more: bool, say: Say) -> list[Lesson]:
    """Further images of classes it knows first, if ``more``; then new classes."""
    from morecl.classifier.lesson import Course, Part, course

    found = course(classifier, images, names, more=True) if more else Course((Part("learn", images, names),))
    lessons: list[Lesson] = []
    for number, part in enumerate(found.parts):
        listener = _listener(say, number / len(found.parts), (number + 1) / len(found.parts))
        teach = classifier.learn if part.action == "learn" else classifier.add
        lessons.append(teach(part.images, part.names, listener=listener))
    lessons[0] = replace(lessons[0], notes=(*found.notes, *lessons[0].notes))
    return lessons


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


def without_path(text: str, model: str | Path) -> str:
    """``text`` without the path of the model's folder, which is nothing to whoever asks the server."""
    for path in {str(model), str(Path(model).resolve())}:
        text = re.sub(rf"(`morecl \w+ ){re.escape(shlex.quote(path))}(?![^\s`])", r"\1MODEL", text)
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}/", "the model's ", text)
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", "the model", text)
    return text


def _end_with_the_server(uploads: Path) -> None:
    """Wait until stdin ends, which means that the server is gone; remove the uploads and stop.

    Those of lessons that wait are beside them, in the server's private folder, which goes once nobody holds its lock:
    the pipe may be closed a moment before.
    """
    with suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    shutil.rmtree(uploads, ignore_errors=True)
    for _ in range(ENDING):
        remove_if_abandoned(uploads.parent)
        if not uploads.parent.exists():
            break
        time.sleep(0.05)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
