"""A classifier for one's own images: a learner, the images held back from it, and what was measured on them.

>>> classifier = morecl.Classifier.create()
>>> classifier.learn("photos")            # one sub-folder of images per class
>>> classifier.predict(["new.jpg"])[0]    # label, confidence, unknown, ...
>>> classifier.save("model")

Every call that changes the classifier is all or nothing: if it fails or is interrupted, nothing has changed. Several
threads may ask it at once, but none while another changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from morecl.catalogue import METHODS
from morecl.classifier import calibration, capacity, conformal
from morecl.classifier.arguments import check_count, check_list
from morecl.classifier.backbones import AUTO, choose_backbone
from morecl.classifier.evaluation import evaluate
from morecl.classifier.holding import HeldBack, Seen
from morecl.classifier.lesson import labelled, teach
from morecl.classifier.names import check_name, check_texts
from morecl.classifier.nearest import Near, most_like
from morecl.classifier.plan import PLANNED
from morecl.classifier.reading import Report, batches, name_of, read
from morecl.classifier.results import Answer, Choice, ClassInfo, Evaluation, Info, Lesson, Promise
from morecl.errors import InputError, unknown_name
from morecl.files import check_target, expanded
from morecl.images import as_array
from morecl.labels import Forgotten, composed
from morecl.methods import Learner, method_class
from morecl.pictures import AnyImages
from morecl.progress import Listener, silent

METHOD = "morerp"
TOP = 5
ARGUMENTS = ("backbone", "seed", "device")  # settings that :meth:`Classifier.create` has arguments for
# Settings that differ from the papers' because a user may have few images.
FEW_PHOTOS: Mapping[str, Mapping[str, Any]] = {
    "more": {"shrink_below": 20.0},
    "morerp": {"shrink_below": 20.0},
    "ranpac": {"projection": 2000},  # 10,000 take 400 MB and a minute for every lesson
}


@dataclass(frozen=True)
class Measured:
    """What the held-back images say about the present learner: (N,) each, and the temperature."""

    ood_scores: NDArray[np.float64]
    right: NDArray[np.bool_]
    temperature: float


class Classifier:
    """See the module's text. ``learner`` does the work; everything else is measured on held-back images."""

    def __init__(
        self,
        learner: Learner,
        *,
        held: HeldBack | None = None,
        seen: Seen | None = None,
        images: Sequence[int] = (),
        curve: Sequence[Mapping[str, Any]] = (),
        measured: Measured | None = None,
    ):
        """For :meth:`create` and :meth:`open`; the rest is what an earlier classifier had."""
        self.learner = learner
        self.side = learner.backbone.input.resize
        self.held = held or HeldBack.none(self.side)
        self.seen = seen or Seen.nothing()  # all pictures taken in
        self.images = list(images)  # trained on, of each column
        self.curve = [dict(point) for point in curve]
        self.measured = measured or Measured(np.empty(0), np.empty(0, bool), 1.0)
        self.newest_in: dict[Path, int] = {}  # model's folder -> its newest version when this was opened or saved there
        self._remembered: tuple[int, torch.Tensor] | None = None

    @classmethod
    def create(
        cls,
        *,
        method: str = METHOD,
        backbone: str = AUTO,
        seed: int = 0,
        device: str = "auto",
        say: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ) -> Self:
        """A classifier that knows nothing yet.

        Args:
            backbone: ``auto``, or see :mod:`morecl.nn.backbone`. It stays with the classifier.
            say: told which backbone ``auto`` takes, and what a model of this method cannot do.
            settings: of the method.
        """
        chosen = method_class(method)
        if not METHODS[chosen.name].useful:
            raise InputError(
                f"method {method!r} is a reference for experiments (`morecl run`) and of no use as a model: it "
                f"forgets, or mixes up classes. `morecl list methods` has others; the default is {METHOD!r}"
            )
        for key in settings:
            if key in PLANNED:
                raise InputError(f"{key} is chosen from the number of images in each lesson")
            if key not in chosen.Config.model_fields:
                raise unknown_name("setting", key, chosen.Config.model_fields.keys() - {*PLANNED, *ARGUMENTS})
        chosen.Config.refuse_idle(method, settings)
        chosen.Config.parse(settings).refuse_switched_off(settings, further=True)
        settings = {**FEW_PHOTOS.get(method, {}), "seed": seed, "device": device, **settings}
        name, loaded = choose_backbone(backbone, chosen.Config.parse(settings), say)
        made = cls(chosen(chosen.Config.parse(settings | {"backbone": name}), loaded))
        if missing := made._missing():
            say(f"Note: a model of {method!r} cannot {missing}; {METHOD!r} can.")
        return made

    @classmethod
    def open(cls, folder: str | Path, *, version: int | None = None, device: str | None = None) -> Classifier:
        """The classifier saved in ``folder``: its newest version, or the one asked for."""
        from morecl.classifier.store import ModelFolder

        return ModelFolder(folder).load(version, device=device)

    def save(self, folder: str | Path, action: str = "saved", what: str = "", *, keep: int | None = None) -> int:
        """Add this classifier to ``folder`` as a new version, which is in use from then on. Returns its number.

        It is refused if the model was changed there since this classifier was opened or last saved. To go back to an
        older version on purpose, open that one anew and save it.

        Args:
            keep: versions to keep, this one included, now and after later changes; the oldest are removed. ``None``: as
                many as were kept so far, at first five.
        """
        from morecl.classifier.store import ModelFolder

        return ModelFolder(folder).save(self, action, what, keep)

    # ---- what it knows ----------------------------------------------------------------------------------------

    @property
    def classes(self) -> list[str]:
        """Names of the classes it can answer with, in the order they were learned."""
        return [str(name) for name in self.learner.classes if not isinstance(name, Forgotten)]

    @property
    def temperature(self) -> float:
        return self.measured.temperature

    def promise(self, accept: float = conformal.ACCEPT) -> Promise:
        """The threshold above which an image is called unknown, and what it promises."""
        held = self.held.counts(len(self.learner.classes))
        missing = sum(not held[self.column(name)] for name in self.classes)
        return conformal.promise(self.measured.ood_scores, accept, missing=missing)

    def accuracy(self, names: Iterable[str] | None = None) -> float | None:
        """Percent of held-back images (of the classes ``names``) answered rightly; ``None`` if there are none."""
        if isinstance(names, str):
            raise TypeError(f"names must be a list; for one class give [{names!r}]")
        columns = [self.column(name) for name in (self.classes if names is None else names)]
        chosen = np.isin(self.held.columns, columns)
        return float(100 * self.measured.right[chosen].mean()) if chosen.any() else None

    def share_unknown(self, images: AnyImages) -> float | None:
        """Percent of ``images`` that it calls unknown."""
        threshold = self.promise().threshold
        if threshold is None or not len(images):
            return None
        return float(100 * (self._scores(images)[1] > threshold).mean())

    # ---- teaching ---------------------------------------------------------------------------------------------

    def learn(
        self,
        images: Any,
        labels: Sequence[str] | None = None,
        *,
        hold_back: bool = True,
        minutes: float | None = None,
        listener: Listener = silent,
        reading: Report | None = None,
    ) -> Lesson:
        """Learn new classes; one is enough.

        Args:
            images: paths, PIL images or arrays; or, without ``labels``, a folder with one sub-folder per class.
            hold_back: ``False`` trains on all images; nothing is then measured on the new classes, or promised.
            minutes: train no longer than this, as far as can be told in advance.
            listener: called after each epoch; an exception it raises stops the lesson, and nothing has changed.
            reading: called after each image that was read.
        """
        return teach(
            self, "learn", images, labels, hold_back=hold_back, minutes=minutes, listener=listener, reading=reading
        )

    def add(
        self,
        images: Any,
        labels: Sequence[str] | None = None,
        *,
        hold_back: bool = True,
        listener: Listener = silent,
        reading: Report | None = None,
    ) -> Lesson:
        """Take in more images of classes it knows. Features never change; see ``Learner.add_examples``."""
        return teach(self, "add", images, labels, hold_back=hold_back, minutes=None, listener=listener, reading=reading)

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        column = self.column(old)
        check_name(new)
        new = composed(new)
        if new in self.classes:
            raise InputError(f"there already is a class {new!r}")
        self.learner.rename(self.learner.classes[column], new)

    def forget(self, name: str) -> None:
        """Answer with this class no more; its images are dropped.

        The scores of all others stay. The threshold for "unknown" and the confidence are set anew, from fewer held-back
        images; see :meth:`promise`.
        """
        column = self.column(name)
        if len(self.classes) == 1:
            raise InputError(f"{name!r} is the only class; delete the model instead")
        with self._all_or_nothing():
            self.learner.forget(self.learner.classes[column])
            self.images[column] = 0
            self.held = self.held.without(column)
            self.seen = self.seen.without(column)
            self._note("forget")

    # ---- answers ----------------------------------------------------------------------------------------------

    def predict(
        self, images: Sequence[Any] | NDArray[Any], *, top: int = TOP, accept: float = conformal.ACCEPT
    ) -> list[Answer]:
        """An answer for each image: paths, PIL images, arrays, or one array of many images."""
        check_list(images)
        return list(self.answers(images, top=top, accept=accept))

    def answers(
        self, images: Iterable[Any], *, top: int = TOP, accept: float = conformal.ACCEPT, compare: bool = False
    ) -> Iterator[Answer]:
        """As :meth:`predict`, one after the other, in bounded memory however many there are.

        ``compare``: also find out which of the pictures were in its lessons.
        """
        if not self.classes:
            raise InputError("nothing has been learned yet")
        if hasattr(images, "detach") or (isinstance(images, np.ndarray) and images.dtype.kind in "biuf"):
            images = as_array(images, self.side)  # refuses one image, whose rows would be taken for grey images
        check_count("top", top, 1)
        threshold = self.promise(accept).threshold
        task_of = self.learner.task_of_column()
        answerable = np.array([self.column(name) for name in self.classes])
        for batch, found in batches(images, self.learner.eval_batch_size, self.side):
            answers: list[Answer | None] = [None] * len(batch)
            for index, reason in found.problems:
                answers[index] = Answer(name_of(batch[index]), None, None, None, threshold, False, error=reason)
            scores, ood = self._scores(found.images)
            sure = calibration.softmax(scores[:, answerable], self.temperature) if len(scores) else scores
            seen = self.seen.has(found.images) if compare else np.zeros(len(found.images), bool)
            for row, index in enumerate(found.positions.tolist()):
                best = np.argsort(-sure[row], kind="stable")[:top]
                choices = tuple(Choice(self.classes[c], float(sure[row, c])) for c in best)
                unknown = threshold is not None and bool(ood[row] > threshold)
                answers[index] = Answer(
                    path=name_of(batch[index]),
                    label=None if unknown else choices[0].label,
                    confidence=choices[0].confidence,
                    ood_score=float(ood[row]),
                    threshold=threshold,
                    unknown=unknown,
                    top=choices,
                    task=int(task_of[answerable[best[0]]]) + 1,
                    seen=bool(seen[row]),
                )
            yield from (answer for answer in answers if answer is not None)

    def evaluate(
        self, images: Any, labels: Sequence[str] | None = None, *, accept: float = conformal.ACCEPT
    ) -> Evaluation:
        """Measure it on labelled images, given as in :meth:`learn`. Classes it was never taught should be unknown.

        Of a folder with train/ and test/ those in test/ are taken.
        """
        source, names = labelled(images, labels, "test")
        check_texts(names)
        answers = self.answers(source, top=1, accept=accept, compare=True)
        return evaluate(answers, names, self.classes, self.promise(accept))

    def info(self) -> Info:
        """What it knows, in figures."""
        task_of, held = self.learner.task_of_column(), self.held.counts(len(self.learner.classes))
        remembered = np.bincount(self.learner.memory.columns, minlength=len(self.learner.classes))
        columns = {name: self.column(name) for name in self.classes}
        used = capacity.taken(self.learner)
        return Info(
            method=self.learner.name,
            backbone=self.learner.backbone.architecture or Path(self.learner.backbone.name).name,  # no folder
            image_size=self.learner.backbone.input.size,
            tasks=len(self.learner.task_sizes),
            classes=tuple(
                ClassInfo(
                    name=name,
                    task=int(task_of[c]) + 1,
                    images=self.images[c],
                    held_back=int(held[c]),
                    remembered=int(remembered[c]),
                    accuracy=self.accuracy([name]),
                )
                for name, c in columns.items()
            ),
            accuracy=self.accuracy(),
            temperature=self.temperature,
            promise=self.promise(),
            capacity=used,
            tasks_left=capacity.tasks_left(used, len(self.learner.task_sizes)),
            curve=tuple(self.curve),
        )

    def remembered(self, name: str, count: int = 8) -> list[NDArray[np.uint8]]:
        """Up to ``count`` pictures of a class that it keeps, (H, W, 3) each."""
        check_count("count", count, 0)
        column = self.column(name)
        memory = self.learner.memory
        own = [memory.images[i] for i in np.flatnonzero(memory.columns == column)[:count]]
        more = self.held.images[self.held.columns == column][: max(0, count - len(own))]
        return [*own, *more]

    def nearest(self, images: Sequence[Any], count: int = 5) -> list[list[Near]]:
        """For each image the remembered pictures most like it: class, picture, cosine similarity of features."""
        check_list(images)
        check_count("count", count, 0)
        memory = self.learner.memory
        if not len(memory):
            return [[] for _ in images]
        if self._remembered is None or self._remembered[0] != len(self.curve):
            stored = torch.from_numpy(self.learner.features(memory.images))
            self._remembered = len(self.curve), torch.nn.functional.normalize(stored)
        return most_like(self.learner, self._remembered[1], read(images, self.side), len(images), count)

    def export(self, path: str | Path, *, accept: float = conformal.ACCEPT) -> None:
        """Write the whole prediction as an ONNX file (extra ``export``)."""
        from morecl.export import export

        check_target(expanded(path), "model.onnx", "path")
        export(self.learner, path, threshold=self.promise(accept).threshold, temperature=self.temperature)

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _missing(self) -> str:
        """What a model of this method cannot do, in words."""
        from morecl.export import can_export

        learner = self.learner
        able = {
            "learn with --more": learner.can_add_examples,
            "forget classes": learner.can_forget,
            "be exported": can_export(learner),
        }
        *first, last = [what for what, can in able.items() if not can] or [""]
        return f"{', '.join(first)}{',' if len(first) > 1 else ''} or {last}" if first else last

    def column(self, name: str) -> int:
        """The column of a class in the learner's scores."""
        spelled = composed(str(name))
        if spelled not in self.learner.classes:
            raise unknown_name("class", str(name), self.classes)
        return self.learner.classes.index(spelled)

    def _scores(self, images: AnyImages) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Scores (N, C) and OOD scores (N,) of squares (N, S, S, 3)."""
        learner = self.learner
        scores, ood = [np.empty((0, len(learner.classes)))], [np.empty(0)]
        for start in range(0, len(images), learner.eval_batch_size):
            output = learner.output(images[start : start + learner.eval_batch_size])
            scores.append(output.scores.double().cpu().numpy())
            ood.append((-output.known).double().cpu().numpy())
        return np.concatenate(scores), np.concatenate(ood)

    def _measure(self) -> Measured:
        scores, ood = self._scores(self.held.images)
        if not len(scores):
            return Measured(ood, np.empty(0, bool), 1.0)
        answerable = np.array([self.column(name) for name in self.classes])
        place = {column: i for i, column in enumerate(answerable.tolist())}
        own = np.array([place[column] for column in self.held.columns.tolist()])
        chosen = scores[:, answerable]
        return Measured(ood, chosen.argmax(1) == own, calibration.fit_temperature(chosen, own))

    def _note(self, action: str) -> None:
        """Measure anew and remember the accuracy after ``action``."""
        self.measured = self._measure()
        self.curve.append({"action": action, "classes": len(self.classes), "accuracy": self.accuracy()})

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put everything back if something fails inside."""
        before = self.learner.snapshot()
        own = self.held, self.seen, list(self.images), list(self.curve), self.measured
        try:
            yield
        except BaseException:
            self.learner.go_back(before)
            self.held, self.seen, self.images, self.curve, self.measured = own
            raise
