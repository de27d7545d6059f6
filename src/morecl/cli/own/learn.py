"""``morecl learn``: teach a model new classes, or show it more photos of those it knows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from morecl.cli import options
from morecl.cli.own.common import (
    class_table,
    full_disk_explained,
    kept,
    name_unreadable,
    out_of_memory_explained,
    percent,
    promise_lines,
    seconds_text,
)
from morecl.cli.terminal import counted, error_line, exit_interrupted, output_console, printable, say
from morecl.errors import DivergedError, InputError, shortened
from morecl.interrupts import sigterm_as_interrupt
from morecl.progress import Clock, EpochDone, ProgressLine, TimeLeft

if TYPE_CHECKING:  # these import torch
    from morecl.classifier import Classifier, Info, Lesson, ModelFolder
    from morecl.classifier.lesson import NothingNewError, Part
    from morecl.classifier.store import Version

PLAIN_INTERVAL = 30.0  # seconds between lines if the output is not a terminal
ROWS = 30  # classes that the table shows
SHORTEST = 0.01  # minutes of training, if reading has taken all that were given


def learn(
    model: Annotated[
        Path,
        typer.Argument(
            callback=options.expanded,
            metavar="MODEL",
            help="Folder of the model; made if it is not there.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path,
        typer.Argument(
            callback=options.expanded, metavar="FOLDER", help="Images, one sub-folder per class.", show_default=False
        ),
    ],
    more: Annotated[bool, typer.Option("--more", help="Also take in further images of classes it knows.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Train on all images and hold none back; nothing is then promised.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(help="Train for about this many minutes at most.")] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Versions to keep for `morecl undo`, from now on. [default: as before; at first 5]"),
    ] = None,
    device: options.Device = None,
    backbone: Annotated[
        str | None, typer.Option(help="New model only: auto, timm name, checkpoint file, or NAME@FILE. [default: auto]")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="New model only: see `morecl list methods`. [default: morerp]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="New model only: seed of everything random.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="New model only: a setting of the method.")
    ] = None,
) -> None:
    """Teach a model new classes from a folder of images.

    A new model is created if there is none. Part of each class is held back and never trained on: it sets the
    threshold for "unknown" and measures accuracy. Each call makes one version of the model. If it fails or is stopped,
    the model stays as it was. A folder with nothing new changes nothing and is no error.
    """
    from morecl.classifier.store import ModelFolder
    from morecl.data.folder import labelled_files

    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes must be more than 0, not {minutes:g}")
    choices = {"--backbone": backbone, "--method": method, "--seed": seed, "--set": set_ or None}
    choices = {key: value for key, value in choices.items() if value is not None}
    store = ModelFolder(model)
    is_new = not store.exists()
    _check_choices(store, is_new, choices)
    if is_new and more:
        raise InputError(f"there is no model in {model} yet; --more is for classes that a model knows")
    files, names = labelled_files(folder)
    console = output_console()
    teacher = _Teacher(store, folder, console, hold_back=not all_, minutes=minutes, keep=keep)
    try:
        explained = out_of_memory_explained("teach fewer images at a time")
        with sigterm_as_interrupt(), full_disk_explained(), explained, store.changing():
            if is_new != (not store.exists()):
                raise InputError(f"another process has just made {model}; repeat the command")
            classifier = _created(choices, device) if is_new else store.load(device=device)
            parts = teacher.parts(classifier, files, names, more)
            if parts:
                teacher.teach(classifier, parts)
            else:
                teacher.expect_nothing_new(classifier, files, names)
    except KeyboardInterrupt:
        exit_interrupted(escape(teacher.kept()))
    except DivergedError as error:
        raise DivergedError(f"{error}; {teacher.kept()}") from error


def _check_choices(store: ModelFolder, is_new: bool, choices: dict[str, Any]) -> None:
    """Options of a new model: refused for one that is there, a typo answered before torch is imported."""
    if choices and not is_new:
        plural = len(choices) > 1
        raise InputError(
            f"{', '.join(choices)} {'belong' if plural else 'belongs'} to a new model; {store.path} is there already "
            f"and keeps its own. Leave {'them' if plural else 'it'} out, or name another folder"
        )
    if "--method" in choices:
        options.known_method(choices["--method"])
    settings = options.settings_from(choices.get("--set"))
    for key in ("seed", "backbone", "device"):
        if key in settings:
            raise InputError(f"give {key} as --{key}")


def _created(choices: dict[str, Any], device: str | None) -> Classifier:
    from morecl.classifier import Classifier

    settings = options.settings_from(choices.get("--set"), device=device, seed=choices.get("--seed"))
    given = {key: choices[f"--{key}"] for key in ("method", "backbone") if f"--{key}" in choices}
    return Classifier.create(say=error_line, **given, **settings)


class _Teacher:
    """Gives the lessons of a command, shows their progress and results, and makes them one version."""

    def __init__(
        self,
        store: ModelFolder,
        folder: Path,
        console: Console,
        *,
        hold_back: bool,
        minutes: float | None,
        keep: int | None,
    ):
        self._store = store
        self._folder = folder
        self._console = console
        self._hold_back = hold_back
        self._minutes = minutes
        self._keep = keep
        self._before: list[Version] | None = None  # versions, once nobody else can add one
        self._started = 0.0
        self._told: list[str] = []  # notes that were shown before the first lesson

    def kept(self) -> str:
        """What a command that was stopped leaves."""
        return kept(self._store, self._before)

    def _versions(self) -> list[Version]:
        return self._store.versions() if self._store.exists() else []

    def parts(self, classifier: Classifier, files: list[Path], names: list[str], more: bool) -> Sequence[Part]:
        """These images as lessons; none if it knows all classes and is not asked for ``more``. The user is told which
        images are left out.

        Raises:
            InputError: a new class has nothing to learn.
        """
        from morecl.classifier.lesson import NothingNewError, course
        from morecl.classifier.names import two_classes

        self._before, self._started = self._versions(), time.monotonic()
        known = set(classifier.classes)
        taught = [name for name in dict.fromkeys(names) if name in known]
        if taught and not more and not known.issuperset(names):
            error_line(f"left alone, since it knows them: {shortened(taught)}; --more takes in further images of them")
        try:
            with _watching(self._console) as display:
                found = course(classifier, files, names, more=more, reading=display.reading)
        except NothingNewError as error:
            name_unreadable(error.skipped)
            raise
        name_unreadable(found.skipped)
        new = [name for name in dict.fromkeys(names) if name not in known]
        self._told = [*two_classes(new, classifier.classes), *found.notes]
        for note in self._told:
            error_line(f"{note}.")
        if self._minutes is not None and all(part.action == "add" for part in found.parts):
            error_line("--minutes limits the training of new classes, and there are none.")
        return found.parts

    def expect_nothing_new(self, classifier: Classifier, files: list[Path], names: list[str]) -> None:
        """Raise :class:`InputError` if there are further images of the classes, which it was not asked to take in."""
        from morecl.classifier.lesson import NothingNewError, count_new

        try:
            with _watching(self._console) as display:
                count = count_new(classifier, files, names, display.reading)
        except NothingNewError as error:
            self._say_nothing_new(error)
            return
        raise InputError(
            f"it knows every class in {self._folder}: {shortened(list(dict.fromkeys(names)))}; --more takes in "
            f"{counted(count, 'further image')} of them"
        )

    def _say_nothing_new(self, error: NothingNewError) -> None:
        if not error.is_known:
            name_unreadable(error.skipped)
            raise error
        version = self._store.versions()[-1].number
        text = f"nothing new in {self._folder}: {error.why}. {self._store.path} stays at version {version}"
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def teach(self, classifier: Classifier, parts: Sequence[Part]) -> None:
        """Teach them all, then save: if one fails, none was taught."""
        from morecl.classifier.lesson import NothingNewError, taught

        lessons: list[Lesson] = []
        measured: list[Info] = []
        try:
            with _watching(self._console) as display:
                for part in parts:
                    lessons.append(self._taught(classifier, part, display))
                    measured.append(classifier.info())
                display.saving()
                number = self._store.commit(classifier, *taught(lessons), keep=self._keep)
        except NothingNewError as error:
            self._say_nothing_new(error)
            return
        for lesson, info in zip(lessons, measured, strict=True):
            name_unreadable(lesson.skipped)
            notes = tuple(note for note in lesson.notes if note not in self._told)
            show_lesson(self._console, info, replace(lesson, notes=notes))
        took = seconds_text(self._seconds())
        where = escape(str(self._store.path))
        self._console.print(f"version {number} of {where}, {took}", soft_wrap=True, highlight=False)

    def _taught(self, classifier: Classifier, part: Part, display: LessonDisplay) -> Lesson:
        common: dict[str, Any] = {"listener": display.epoch, "reading": display.reading, "hold_back": self._hold_back}
        if part.action == "add":
            return classifier.add(part.images, part.names, **common)
        left = None if self._minutes is None else max(self._minutes - self._seconds() / 60, SHORTEST)
        return classifier.learn(part.images, part.names, minutes=left, **common)

    def _seconds(self) -> float:
        """Since the command began to look at the images."""
        return time.monotonic() - self._started


def show_lesson(console: Console, info: Info, lesson: Lesson) -> None:
    """What was learned, and how well; ``info``: of the classifier after the lesson."""
    of = {each.name: each for each in info.classes}
    is_new = lesson.action == "learn"
    heads = ("images learned", "held back", "accuracy") if is_new else ("images added", "held back in all", "accuracy")
    table = class_table("new class" if is_new else "class", *heads)
    for name, images in list(lesson.classes.items())[:ROWS]:
        table.add_row(Text(name), f"{images:,}", f"{of[name].held_back:,}", percent(of[name].accuracy))
    if (more := len(lesson.classes) - ROWS) > 0:
        table.add_row(Text(f"and {more} more", style="dim"))
    console.print(table)
    for line in _lines(lesson):
        say(console, printable(line))


def _lines(lesson: Lesson) -> Iterator[str]:
    words = "the new classes" if lesson.action == "learn" else "these classes"
    if lesson.accuracy is None:
        yield "Accuracy unknown: no image of them was held back."
    else:
        yield f"Accuracy on held-back images: {percent(lesson.accuracy)} on {words}"
        if lesson.accuracy_others is not None:
            yield (
                f"    {percent(lesson.accuracy_others)} on the other classes, "
                f"{percent(lesson.accuracy_others_before)} before"
            )
    if lesson.unknown_before is not None:
        yield f'Before they were taught, {percent(lesson.unknown_before)} of the new images were called "unknown".'
    yield from promise_lines(lesson.promise)
    if lesson.duplicates:
        yield f"Left out: {counted(lesson.duplicates, 'image')} that it had seen before, or twice in a class."
    for note in lesson.notes:
        yield f"Note: {note}."


@contextmanager
def _watching(console: Console, clock: Clock = time.monotonic) -> Iterator[LessonDisplay]:
    display = LessonDisplay(console, clock)
    if not console.is_terminal:
        yield display
        return
    with Live(console=console, get_renderable=display.line, refresh_per_second=4, transient=True):
        yield display


class LessonDisplay:
    """What a lesson shows while it works: a live line in a terminal, otherwise a line every half minute."""

    def __init__(self, console: Console, clock: Clock = time.monotonic):
        self._console = console
        self._clock = clock
        self._left = TimeLeft(clock)  # of this stage
        self._since_reading = TimeLeft(clock)  # until two epochs tell how long one takes
        self._stage = ""
        self._line = ProgressLine(None, position="starting")
        self._printed = clock()

    def reading(self, done: int, total: int) -> None:
        self._reach("reading", done, total)
        if done == total:
            self._since_reading.start(0)
            self._show(ProgressLine(None, "preparing to train"))
        else:
            self._show(self._progress(f"reading {done:,}/{total:,}"))

    def epoch(self, event: EpochDone) -> None:
        self._reach(event.stage or "training", event.epoch, event.epochs)
        if not event.stage:
            self._since_reading.total = event.epochs
            self._since_reading.reach(event.epoch)
        if event.epoch == event.epochs:
            self._show(ProgressLine(None, "finishing" if event.stage else "statistics"))
            return
        self._show(self._progress(event.stage or "training", event))

    def saving(self) -> None:
        self._show(ProgressLine(None, "saving"))

    def line(self) -> ProgressLine:
        return self._line

    def _reach(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            self._left.start(total, 0 if stage == "reading" else done)
        self._left.reach(done)

    def _progress(self, title: str, event: EpochDone | None = None) -> ProgressLine:
        left = self._since_reading if self._left.seconds is None and event and not event.stage else self._left
        return ProgressLine(
            share=self._left.share,
            title=title,
            step=event.step if event else "",
            loss=f"loss {event.loss:.2f}" if event else "",
            speed=event.speed if event else "",
            left=str(left),
        )

    def _show(self, line: ProgressLine) -> None:
        self._line = line
        if self._console.is_terminal or self._clock() - self._printed < PLAIN_INTERVAL:
            return
        self._printed = self._clock()
        pieces = (line.title, line.step, line.loss, line.speed, line.left)
        self._console.print("  ".join(piece for piece in pieces if piece), markup=False, highlight=False)
