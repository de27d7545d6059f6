"""One lesson: read images, hold some back, train on the others, measure on those that were held back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from morecl.classifier import capacity, duplicates, holding
from morecl.classifier.arguments import check_positive
from morecl.classifier.duplicates import Sorting
from morecl.classifier.names import check_name, two_classes
from morecl.classifier.plan import Plan, plan, within
from morecl.classifier.reading import Decoded, Read, Report, name_in, read
from morecl.classifier.results import Lesson
from morecl.data.folder import labelled_files
from morecl.errors import InputError, shortened
from morecl.files import expanded
from morecl.labels import composed
from morecl.methods import Learner
from morecl.pictures import AnyImages, some
from morecl.progress import EpochDone, Listener
from morecl.random import generator

if TYPE_CHECKING:
    from morecl.classifier.core import Classifier

PROBE = 4  # batches on which the speed is measured
RENAMED = (
    "If a class was renamed, rename its folder, too; if only the folder was renamed, `morecl rename` renames the class"
)

Action = Literal["learn", "add"]


class NothingNewError(InputError):
    """Of the images of ``classes``, none is left to learn, and ``why``.

    ``is_known``: each image was seen before in its class. To teach a folder again is then no mistake.
    ``skipped``: the images of the lesson that could not be read.
    """

    def __init__(self, classes: Sequence[str], why: str, is_known: bool, skipped: Sequence[str] = ()):
        super().__init__(f"nothing to learn of {shortened(classes)}: {why}")
        self.classes = tuple(classes)
        self.why = why
        self.is_known = is_known
        self.skipped = tuple(skipped)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.classes, self.why, self.is_known, self.skipped)


@dataclass(frozen=True)
class Material:
    """Images of a lesson: all that are new to the classifier, and which of them are held back."""

    images: AnyImages  # (N, S, S, 3)
    names: list[str]  # of the class of each
    prints: NDArray[np.uint64]  # fingerprints
    held: NDArray[np.bool_]
    duplicates: int
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    def names_of(self, chosen: NDArray[np.bool_]) -> list[str]:
        return [name for name, c in zip(self.names, chosen.tolist(), strict=True) if c]


def labelled(
    images: Any, labels: Sequence[str] | None, split: Literal["train", "test"] = "train"
) -> tuple[Any, list[str]]:
    """Images and the name of each one's class; without ``labels``, those of a folder with one sub-folder per class.

    ``split``: which are taken of a folder that has train/ and test/.
    """
    if labels is None:
        if not isinstance(images, str | PathLike):
            raise InputError(
                "labels are missing: give the name of each image's class, as many as there are images; or, instead of "
                "images and labels, the path of a folder with one sub-folder per class"
            )
        return labelled_files(expanded(images), split)
    if isinstance(images, str | PathLike):
        raise InputError("images must be a list; for one image give [image], for a folder of classes no labels")
    if isinstance(labels, str):
        raise InputError(f"labels must be a list with the name of each image's class, not the text {labels!r:.60}")
    if isinstance(images, Image.Image):
        raise InputError("images must be a list; for one image give [image]")
    images = list(images) if isinstance(images, Iterator) else images
    labels = list(labels) if isinstance(labels, Iterator) else labels
    if len(images) != len(labels):
        raise InputError(f"as many labels as images are needed: there are {len(images)} images, {len(labels)} labels")
    return images, [composed(label) if isinstance(label, str) else label for label in labels]


def teach(
    classifier: Classifier,
    action: Action,
    images: Any,
    labels: Sequence[str] | None,
    *,
    hold_back: bool,
    minutes: float | None,
    listener: Listener,
    reading: Report | None,
) -> Lesson:
    """:meth:`Classifier.learn` and :meth:`Classifier.add`."""
    started = time.monotonic()
    if minutes is not None:
        check_positive("minutes", minutes)
    material = _material(classifier, action, *labelled(images, labels), hold_back, reading)
    train, names = some(material.images, ~material.held), material.names_of(~material.held)
    new = list(dict.fromkeys(material.names))
    others = [name for name in classifier.classes if name not in new]
    before = classifier.accuracy(others)
    unknown_before = None
    if action == "learn" and classifier.classes:
        unknown_before = classifier.share_unknown(some(material.images, material.held))
    planned = plan(len(train), len({*classifier.classes, *new}))
    notes: list[str] = []
    with classifier._all_or_nothing():
        if minutes is not None:
            left = float(minutes) - (time.monotonic() - started) / 60
            planned, notes = _fitted_into(classifier.learner, planned, left, train, names)
        _configure(classifier.learner, planned)
        if action == "learn":
            classifier.learner.learn_task(train, names, listener)
        else:
            classifier.learner.add_examples(train, names, listener)
        _take_in(classifier, material)
        classifier._note(action)
        if action == "learn" and capacity.left(classifier.learner) == 0:
            notes.append(capacity.IS_FULL)
    return Lesson(
        action=action,
        classes={name: names.count(name) for name in new},
        held_back=int(material.held.sum()),
        duplicates=material.duplicates,
        skipped=material.skipped,
        accuracy=classifier.accuracy(new),
        accuracy_others=classifier.accuracy(others),
        accuracy_others_before=before,
        unknown_before=unknown_before,
        promise=classifier.promise(),
        epochs=planned.epochs,
        seconds=time.monotonic() - started,
        notes=(*material.notes, *notes),
    )


def taught(lessons: Sequence[Lesson]) -> tuple[str, str]:
    """Action and words for the version that these lessons, of a course, made."""
    new = [name for lesson in lessons if lesson.action == "learn" for name in lesson.classes]
    known = [name for lesson in lessons if lesson.action == "add" for name in lesson.classes]
    if not new:
        return "add", shortened(known)
    return "learn", shortened(new) + (f", and more images of {shortened(known)}" if known else "")


def count_new(classifier: Classifier, images: Any, labels: Sequence[str], reading: Report | None = None) -> int:
    """How many of these images of classes it knows :meth:`Classifier.add` would take in.

    Raises:
        NothingNewError: none.
    """
    return len(_material(classifier, "add", *labelled(images, labels), False, reading).names)


@dataclass(frozen=True)
class Part:
    """Images for :meth:`Classifier.learn` or :meth:`Classifier.add`, and the class of each."""

    action: Action
    images: Any
    names: list[str]


@dataclass(frozen=True)
class Course:
    """Images of classes it knows and of new ones as lessons: first those to ``add``, then those to ``learn``."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()  # on images that are in no part
    skipped: tuple[str, ...] = ()  # those of them that could not be read


def course(
    classifier: Classifier, images: Any, names: Sequence[str], *, more: bool, reading: Report | None = None
) -> Course:
    """Divide images into lessons so that each has something to learn; classes it knows are left alone unless ``more``.

    A lesson finds pictures in several classes among its own images. If there are known and new classes, they are found
    here and are in neither lesson, also if the known classes are left alone. What was read for that is not read again.

    Raises:
        InputError: a new class cannot be learned, because of its name, because no image of it is left, or because it
            seems to be one that was renamed.
    """
    known = set(classifier.classes)
    old = [i for i, name in enumerate(names) if name in known]
    new = [i for i, name in enumerate(names) if name not in known]
    if not new:
        return Course((Part("add", images, list(names)),) if more else ())
    if not old:
        return Course((Part("learn", images, list(names)),))
    again = {names[i] for i in old}
    given = set(names) if more else set(names) - known
    for name in set(names) - known:
        check_name(name)
    looked = _Looked.at(classifier, images, names, reading)
    if empty := [name for name in looked.empty() if name not in known]:
        raise looked.nothing_new(empty, "learn", given)
    looked.refuse_renamed(known)
    disputed = set(looked.found.positions[looked.sorting.disputed].tolist())
    notes = looked.sorting.of(given, looked.readable).notes_of_contradictory(looked.readable, looked.name)
    learn = looked.part("learn", [i for i in new if i not in disputed])
    if not more:
        return Course((learn,), tuple(notes))
    if again.issubset(looked.empty()):
        of_again = looked.sorting.of(again, looked.readable)
        why = looked.why_empty(again, of_again.notes_of_mistaught(looked.readable, looked.name))
        notes.append(f"nothing new of {shortened(sorted(again))}: {why}")
        return Course((learn,), tuple(notes), looked.skipped(again))
    return Course((looked.part("add", [i for i in old if i not in disputed]), learn), tuple(notes))


@dataclass(frozen=True)
class _Looked:
    """Images that were read and sorted out."""

    source: Any
    names: Sequence[str]  # the class of each image of ``source``
    found: Read
    prints: NDArray[np.uint64]  # of those that could be read, as are the positions in ``sorting``
    sorting: Sorting

    @classmethod
    def at(cls, classifier: Classifier, source: Any, names: Sequence[str], reading: Report | None) -> _Looked:
        found = read(source, classifier.side, reading)
        prints = holding.fingerprints(found.images)
        readable = [names[i] for i in found.positions.tolist()]
        return cls(source, names, found, prints, duplicates.sort_out(prints, readable, _taught(classifier)))

    @property
    def readable(self) -> list[str]:
        return [self.names[i] for i in self.found.positions.tolist()]

    def name(self, position: int) -> str:
        return name_in(self.source, int(self.found.positions[position]))

    def part(self, action: Action, chosen: Sequence[int]) -> Part:
        """The images at the positions ``chosen`` in ``source`` as a lesson that need not read them again."""
        given = [name_in(self.source, i) for i in range(len(self.names))]
        return Part(action, Decoded(given, self.found).part(chosen), [self.names[i] for i in chosen])

    def empty(self) -> list[str]:
        """Classes of which no image is left to learn."""
        readable = self.readable
        left = {readable[i] for i in self.sorting.fresh.tolist()}
        return [name for name in dict.fromkeys(self.names) if name not in left]

    def skipped(self, classes: Collection[str]) -> tuple[str, ...]:
        """The images of ``classes`` that could not be read, and why."""
        found = [(i, reason) for i, reason in self.found.problems if self.names[i] in classes]
        return tuple(f"{name_in(self.source, i)}: {reason}" for i, reason in found)

    def why_empty(self, classes: Collection[str], notes: Sequence[str] = ()) -> str:
        """Why no image of ``classes`` is left to learn."""
        own, lost = self.sorting.of(classes, self.readable), self.skipped(classes)
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        unreadable = f"({lost[0]}{more})" if lost else ""
        reasons = ["was seen before"] if own.duplicates else []
        reasons += ["is in several classes"] if own.contradictory else []
        if not reasons:
            return f"no image could be read {unreadable}"
        reasons += [f"could not be read {unreadable}"] if lost else []
        return ". ".join([f"every image {', or '.join(reasons)}", *notes])

    def refuse_renamed(self, known: Collection[str]) -> None:
        """Raise :class:`InputError` if of a new class more images were taught under another one than are new.

        It is most likely that class: it would be learned a second time, from what little is new.
        """
        readable = self.readable
        fresh = Counter(readable[i] for i in self.sorting.fresh.tolist())
        taught = Counter((readable[i], before) for i, before in self.sorting.mistaught)
        for (name, before), count in taught.most_common():
            if name not in known and count > fresh[name]:
                notes = self.sorting.of([name], readable).notes_of_mistaught(readable, self.name)
                raise InputError(
                    f"{name!r} would be a new class, but more of its images were taught as {before!r} ({count:,}) than "
                    f"are new ({fresh[name]:,}). {'. '.join([RENAMED, *notes])}"
                )

    def nothing_new(self, classes: Sequence[str], action: Action, given: Collection[str]) -> NothingNewError:
        """The error for ``classes`` of which nothing is left to learn; ``given``: all classes of the lesson."""
        own, skipped = self.sorting.of(classes, self.readable), self.skipped(given)
        notes = own.notes(self.readable, self.name)
        if action == "learn" and own.mistaught:
            notes.insert(0, RENAMED)
        is_known = action == "add" and not (skipped or own.contradictory or own.mistaught)
        return NothingNewError(classes, self.why_empty(classes, notes), is_known, skipped)


def _material(
    classifier: Classifier, action: Action, source: Any, names: list[str], hold_back: bool, reading: Report | None
) -> Material:
    """Read the images, leave out those seen before or in several classes, and choose which are held back."""
    _check_names(classifier, action, names)
    looked = _Looked.at(classifier, source, names, reading)
    given, readable, sorting = set(names), looked.readable, looked.sorting
    taken = [readable[i] for i in sorting.fresh.tolist()]
    empty = looked.empty()
    if empty and (action == "learn" or not taken):  # of classes it knows, some may have nothing new
        raise looked.nothing_new(empty, action, given)
    if action == "learn":
        looked.refuse_renamed(classifier.classes)
    held = np.zeros(len(taken), bool)
    if hold_back:
        seed, lesson = classifier.learner.config.seed, len(classifier.curve)
        held[holding.choose(taken, seed, lesson, known=action == "add")] = True
    images, prints = some(looked.found.images, sorting.fresh), looked.prints[sorting.fresh]
    known = classifier.classes
    notes = two_classes([name for name in dict.fromkeys(taken) if name not in known], known)
    notes += sorting.notes(readable, looked.name)
    return Material(images, taken, prints, held, sorting.duplicates, looked.skipped(given), tuple(notes))


def _taught(classifier: Classifier) -> dict[int, str]:
    """Fingerprint of each picture it has taken in -> the class under which."""
    names = [str(label) for label in classifier.learner.classes]
    seen = classifier.seen
    return {p: names[column] for p, column in zip(seen.prints.tolist(), seen.columns.tolist(), strict=True)}


def _check_names(classifier: Classifier, action: Action, names: Sequence[str]) -> None:
    if not names:
        raise InputError("there are no images to learn")
    given = list(dict.fromkeys(names))
    for name in given:
        check_name(name)
    known = [name for name in given if name in classifier.classes]
    if action == "learn" and known:
        raise InputError(f"already learned: {shortened(known)}; `add` (--more) takes in further images of them")
    if action == "add" and len(known) < len(given):
        new = [name for name in given if name not in known]
        raise InputError(f"not learned yet: {shortened(new)}; learn new classes first")


def _configure(learner: Learner, planned: Plan) -> None:
    """Set what the method has of the plan and what takes effect."""
    config, settings = learner.config, planned.settings()
    effective = config.choose(config.model_dump() | settings)
    learner.configure(**{key: value for key, value in settings.items() if key in effective})


def _take_in(classifier: Classifier, material: Material) -> None:
    """Count the images that were trained on, and keep those that were held back."""
    columns = np.array([classifier.column(name) for name in material.names], np.int64)
    classifier.images += [0] * (len(classifier.learner.classes) - len(classifier.images))
    for column in columns[~material.held].tolist():
        classifier.images[column] += 1
    draw = generator(classifier.learner.config.seed, "kept back", len(classifier.curve))
    classifier.held = classifier.held.with_more(some(material.images, material.held), columns[material.held], draw)
    classifier.seen = classifier.seen.with_more(material.prints, columns)


def _fitted_into(
    learner: Learner, wanted: Plan, minutes: float, images: AnyImages, names: Sequence[str]
) -> tuple[Plan, list[str]]:
    """``wanted`` with as many epochs as fit into ``minutes``, and notes. The speed is measured on a few batches."""
    count = min(len(images), PROBE * wanted.batch_size)
    chosen = np.linspace(0, len(images) - 1, count).astype(int)
    events: list[EpochDone] = []
    before = learner.snapshot()
    started = time.monotonic()
    try:
        _configure(learner, replace(wanted, epochs=1))
        learner.learn_task(images[chosen], [names[i] for i in chosen], events.append)
    finally:
        learner.go_back(before)
    took = time.monotonic() - started
    speed = next((e.images_per_second for e in events if not e.stage and e.images_per_second), count / took)
    rest = max(0.0, took - count / speed)  # statistics, earlier heads; grows less than the number of images
    planned = within(wanted, len(images), minutes - took / 60, speed, 2 * rest)
    shortest = (took + len(images) / speed + 2 * rest) / 60
    if planned.epochs == 1 and shortest > minutes:
        about = f"{max(1, round(60 * shortest))} s" if shortest < 1 else f"{shortest:.1f} minutes"
        return planned, [f"even one pass over the images takes longer than asked: about {about}"]
    return planned, []
