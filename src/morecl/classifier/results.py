"""What a classifier returns. Plain data, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NOTHING_UNKNOWN = "; nothing is called unknown"


@dataclass(frozen=True)
class Choice:
    """A class and the confidence in it, 0 to 1."""

    label: str
    confidence: float


@dataclass(frozen=True)
class Answer:
    """The answer for one image. ``label`` is ``None`` if the image is unknown; ``top`` always says what comes nearest.

    An image that could not be read has an ``error`` and nothing else.
    """

    path: str | None  # or any other name of the image; ``None`` for an image without one
    label: str | None
    confidence: float | None  # in the first of ``top``
    ood_score: float | None  # higher = less known
    threshold: float | None  # unknown above this; ``None``: nothing is called unknown
    unknown: bool
    top: tuple[Choice, ...] = ()
    task: int | None = None  # of the first of ``top``, 1-based
    error: str | None = None
    seen: bool = False  # this very picture was in a lesson; found out only by an evaluation

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``error`` and ``seen`` only where there is one."""
        value = asdict(self)
        value["top"] = list(value["top"])
        if self.error is None:
            del value["error"]
        if not self.seen:
            del value["seen"]
        return value


@dataclass(frozen=True)
class Promise:
    """What the threshold promises: of new images like those held back, at most ``share`` is called unknown.

    ``share`` is ``None`` if nothing can be promised, and ``why`` says why.
    """

    accept: float  # what was asked for: the share of known images to accept
    threshold: float | None
    share: float | None
    images: int  # held back
    why: str = ""

    @property
    def cause(self) -> str:
        """``why``, where it was said already that nothing is called unknown."""
        return self.why.removesuffix(NOTHING_UNKNOWN)


@dataclass(frozen=True)
class Lesson:
    """What was learned by one call, and how well, measured on images that were held back from training."""

    action: str  # "learn" or "add"
    classes: Mapping[str, int]  # name -> images trained on
    held_back: int  # images of these classes
    duplicates: int  # left out, because the same picture was taught before or comes twice in its class
    skipped: tuple[str, ...]  # files that could not be read
    accuracy: float | None  # in percent, on held-back images of these classes; ``None`` if there are none
    accuracy_others: float | None  # of the classes known before
    accuracy_others_before: float | None  # the same before this lesson
    unknown_before: float | None  # percent of the new classes' held-back images called unknown before this lesson
    promise: Promise
    epochs: int
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClassInfo:
    """A class, what is kept of it, and its accuracy in percent on held-back images."""

    name: str
    task: int  # 1-based
    images: int  # trained on
    held_back: int
    remembered: int  # in the replay memory
    accuracy: float | None


@dataclass(frozen=True)
class Info:
    """A classifier in numbers."""

    method: str
    backbone: str
    image_size: int
    tasks: int
    classes: tuple[ClassInfo, ...]
    accuracy: float | None  # percent, all held-back images
    temperature: float
    promise: Promise
    capacity: Mapping[str, float] = field(default_factory=dict)  # percent of each layer that finished tasks have taken
    tasks_left: int | None = None  # about how many more will fit; ``None``: no limit known
    curve: tuple[Mapping[str, Any], ...] = ()  # after each lesson: action, classes, accuracy


@dataclass(frozen=True)
class ClassResult:
    """Answers on the images of one class."""

    name: str
    known: bool  # whether it was taught
    images: int
    right: int  # answered with its name; 0 if it was never taught
    unknown: int  # called unknown

    @property
    def accuracy(self) -> float | None:
        """Percent right, an image called unknown counting as wrong; ``None`` for a class that was never taught."""
        return 100 * self.right / self.images if self.known and self.images else None

    @property
    def rejected(self) -> float:
        """Percent called unknown."""
        return 100 * self.unknown / self.images if self.images else 0.0


@dataclass(frozen=True)
class Bin:
    """Answers of similar confidence: how many, their mean confidence, and the share that was right."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Evaluation:
    """A classifier measured on labelled images. Shares are percentages."""

    classes: tuple[ClassResult, ...]
    confusion: Mapping[str, Mapping[str, int]]  # true class -> answer ("unknown" included) -> images
    accuracy: float | None  # of images of known classes, an image called unknown counting as wrong
    accuracy_forced: float | None  # the same if nothing may be called unknown
    known_rejected: float | None  # images of known classes that were called unknown
    unknown_rejected: float | None  # images of classes never taught that were called unknown
    auc: float | None  # known against never taught, by OOD score
    roc: tuple[tuple[float, float], ...]  # known images that a threshold calls unknown, unknown ones that it does
    reliability: tuple[Bin, ...]  # of images of known classes
    calibration_error: float | None  # expected calibration error
    mean_confidence: float | None
    promise: Promise
    unreadable: tuple[str, ...] = ()
    seen: int = 0  # pictures that were in its lessons: on these it is better than on new ones
    accuracy_new: float | None = None  # as ``accuracy``, without these pictures

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Without ``roc``, which has a point for each image."""
        value = {"images": self.images, **asdict(self)}
        del value["roc"]
        value["classes"] = [
            {**asdict(each), "accuracy": each.accuracy, "rejected": each.rejected} for each in self.classes
        ]
        return value

    @property
    def images(self) -> int:
        """All that could be read."""
        return sum(each.images for each in self.classes)

    @property
    def caveat(self) -> str:
        """What a reader must know if some pictures were in its lessons, else nothing."""
        if not self.seen:
            return ""
        some = f"{self.seen:,} of {self.images:,} images {'was' if self.seen == 1 else 'were'}"
        new = "" if self.accuracy_new is None else f"; without them, known classes are {self.accuracy_new:.1f} % right"
        return f"Not all new: {some} in its lessons, so the figures are better than on new images{new}."
