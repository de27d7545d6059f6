"""The model in use and everything that requests ask of it."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from morecl import __version__
from morecl.classifier import Classifier, ModelFolder, Version, changes
from morecl.classifier.store import MODEL
from morecl.errors import BusyError, InputError
from morecl.images import ImageArray
from morecl.serve.batching import Batcher
from morecl.serve.jobs import COMMAND, Jobs
from morecl.serve.limits import Limits, RefusedError
from morecl.serve.metrics import Metrics
from morecl.serve.private import private_folder
from morecl.serve.teaching import BUSY, require_model, without_path

THUMBNAIL = 96  # pixels
SMALL = 64  # pixels up to which a thumbnail is kept exactly


class Question(NamedTuple):
    """What is asked about an image; images of equal questions are answered as one batch."""

    top: int
    accept: float
    nearest: int


@dataclass
class Loaded:
    """One version in memory."""

    version: Version
    versions: list[Version]
    classifier: Classifier
    signature: object  # of the file that named it
    thumbnails: dict[tuple[str, int], list[str]] = field(default_factory=dict)


class Service:
    """A model's folder, served. ``load`` must be called once before anything can be answered.

    Args:
        command: of the process that learns; tests use another one.
    """

    def __init__(
        self,
        model: Path,
        *,
        device: str | None = None,
        limits: Limits | None = None,
        command: Sequence[str] = COMMAND,
    ):
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.folder = ModelFolder(model)
        self.problem: str | None = None  # why a newer version on disk is not in use
        self._device = device
        self._loaded: Loaded | None = None
        self._loading = threading.Lock()
        self._refused: object = None  # signature of a version that could not be loaded
        self._resources = ExitStack()
        uploads = self._resources.enter_context(private_folder())
        self.decoders = ThreadPoolExecutor(self.limits.decoders, thread_name_prefix="decoder")
        self._resources.callback(self.decoders.shutdown)
        self.batcher: Batcher[Question, dict[str, Any]] = Batcher(self._answer, room=self.limits.queued_images)
        self._resources.callback(self.batcher.close)
        self.jobs = Jobs(
            self.folder.path.resolve(),
            uploads,
            refresh=self.refresh,
            newest=self._newest,
            ended=lambda state: self.metrics.jobs.labels(state).inc(),
            device=device,
            limits=self.limits,
            command=command,
        )
        self._resources.callback(self.jobs.close)
        self.metrics.waiting.set_function(lambda: self.batcher.waiting)
        self.metrics.jobs_waiting.set_function(lambda: self.jobs.waiting)

    def close(self) -> None:
        """Stop lessons, answer what waits, remove all uploads."""
        self._resources.close()

    # ---- the version in use -----------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the newest version; it answers from then on."""
        with self._loading:
            if self._loaded is None:
                self._use(self._read())

    def refresh(self) -> None:
        """Load the newest version if it is not the one in use, then switch to it in one step.

        Raises:
            InputError: it cannot be loaded, for whatever reason. The version in use goes on, ``problem`` says why, and
                the same version is not tried again.
        """
        with self._loading:
            signature = self._signature()
            if self._loaded is None or signature in (None, self._loaded.signature, self._refused):
                return
            try:
                loaded = self._read()
            except Exception as error:  # also of the device, such as too little memory for two versions
                problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
                self.problem = without_path(problem, self.folder.path)
                self._refused = signature
                raise InputError(self.problem) from error
            self._use(loaded)

    @property
    def current(self) -> Loaded:
        """The version that answers."""
        if self._loaded is None:
            raise RefusedError(503, "the model is being loaded", retry_after=2)
        return self._loaded

    def undo(self, version: int | None = None) -> Version:
        """Go back to the version before, on disk and here. ``version``: the newest, as far as the user knows."""
        with self._changing():
            newest = self.folder.versions()[-1].number
            if version not in (None, newest):
                raise RefusedError(409, f"version {version} is not the newest; {newest} is")
            self.folder.undo()
        return self.current.version

    def rename(self, old: str, new: str) -> str:
        """Give a class another name, on disk and here; what to tell the user."""
        with self._changing():
            return changes.rename(self.folder, self._class_of_newest(old), old, new)

    def forget(self, name: str, *, confirmed: bool) -> str:
        """Forget a class for good, on disk and here; what to tell the user."""
        if not confirmed:
            classifier = self.current.classifier
            self._require_class(name, classifier)
            what = f"forgetting {name!r} cannot be undone and removes {changes.to_be_removed(self.folder)}"
            warning = changes.end_of_unknown(classifier, name)
            raise RefusedError(400, f"{what}{f', and {warning}' if warning else ''}; confirm it with confirm=true")
        with self._changing():
            classifier = self._class_of_newest(name)
            said, promise = changes.forget(self.folder, classifier, name), classifier.promise()
            return f"{said}; {promise.why}" if promise.threshold is None else said

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep lessons and other processes from changing the model; what was changed is then in use here.

        What goes wrong inside is a conflict with what the model is. If the changed model cannot be loaded, the error
        says that it was changed all the same.
        """
        _ = self.current  # refuses until the model is loaded
        if not self.jobs.changing.acquire(blocking=False):
            raise RefusedError(
                409, "a lesson is under way, or another change of the model; wait for its end, or cancel the lesson"
            )
        try:
            try:
                require_model(self.folder)
                with self.folder.changing():
                    yield
            except BusyError as error:
                raise RefusedError(409, BUSY) from error
            except InputError as error:
                raise RefusedError(409, without_path(str(error), self.folder.path)) from error
            except OSError as error:  # a full disk, most likely
                raise RefusedError(500, f"the model's folder cannot be used: {error.strerror or error}") from error
            try:
                self.refresh()
            except InputError as error:
                raise RefusedError(500, f"saved, but the new version cannot be loaded: {error}") from error
        finally:
            self.jobs.changing.release()

    def _class_of_newest(self, name: str) -> Classifier:
        """The newest version, loaded anew because it is to be changed, if it has the class ``name``."""
        classifier = self.folder.load(device=self._device)
        self._require_class(name, classifier)
        return classifier

    @staticmethod
    def _require_class(name: str, classifier: Classifier) -> None:
        try:
            classifier.column(name)
        except InputError as error:
            raise RefusedError(404, str(error)) from error

    def _newest(self) -> int:
        """Number of the newest version on disk; 0 if that cannot be told."""
        with suppress(InputError):
            return self.folder.versions()[-1].number
        return 0

    def _signature(self) -> object:
        """Differs after each change of the model: its file is replaced, never written to."""
        with suppress(OSError):
            found = (self.folder.path / MODEL).stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None

    def _read(self) -> Loaded:
        signature = self._signature()
        versions, classifier = self.folder.load_newest(device=self._device)
        if pictures := classifier.remembered(classifier.classes[0], 1):
            classifier.nearest(pictures, 1)  # computes the features of all pictures now, not at the first request
        return Loaded(versions[-1], versions, classifier, signature)

    def _use(self, loaded: Loaded) -> None:
        self._loaded, self.problem = loaded, None
        self.metrics.version.set(loaded.version.number)
        self.metrics.classes.set(len(loaded.classifier.classes))

    # ---- answers ----------------------------------------------------------------------------------------------

    def _answer(self, images: Sequence[ImageArray], question: Question) -> list[dict[str, Any]]:
        """One answer for each image, all from the same version.

        Runs only in the batcher's thread: a learner can compute one thing at a time.
        """
        loaded = self.current
        self.metrics.batches.observe(len(images))
        found = loaded.classifier.predict(images, top=question.top, accept=question.accept)
        answers = [{**answer.as_dict(), "version": loaded.version.number} for answer in found]
        for answer in found:
            self.metrics.images.labels("unknown" if answer.unknown else "known").inc()
        if question.nearest:
            pictures = self._nearest(loaded, images, question.nearest)
            for value, near in zip(answers, pictures, strict=True):
                value["nearest"] = near
        return answers

    @staticmethod
    def _nearest(loaded: Loaded, images: Sequence[ImageArray], count: int) -> list[list[dict[str, Any]]]:
        """Remembered pictures most like each image."""
        return [
            [{"label": label, "similarity": round(near, 4), "image": data_url(image)} for label, image, near in row]
            for row in loaded.classifier.nearest(images, count)
        ]

    def info(self) -> dict[str, Any]:
        loaded = self.current
        return {
            "model": self.folder.path.resolve().name,
            "version": loaded.version.model_dump(),
            "versions": [version.model_dump() for version in loaded.versions],
            **asdict(loaded.classifier.info()),
            "ends_of_unknown": self._ends_of_unknown(loaded.classifier),
            "problem": self.problem,
            "limits": asdict(self.limits),
            "morecl": __version__,
        }

    def _ends_of_unknown(self, classifier: Classifier) -> dict[str, str]:
        """Class -> the warning, for those without which nothing can be called unknown."""
        found = {name: changes.end_of_unknown(classifier, name) for name in classifier.classes}
        return {name: warning for name, warning in found.items() if warning}

    def pictures(self, name: str, count: int) -> list[str]:
        """Pictures of a class that the model keeps, as data URLs."""
        loaded = self.current
        key = name, count
        if key not in loaded.thumbnails:
            try:
                images = loaded.classifier.remembered(name, count)
            except InputError:
                raise RefusedError(404, f"there is no class {name!r:.60}") from None
            loaded.thumbnails[key] = [data_url(image) for image in images]
        return loaded.thumbnails[key]


def data_url(image: ImageArray) -> str:
    """A thumbnail of (H, W, 3) that a page can show without another request."""
    picture = Image.fromarray(image)
    target = io.BytesIO()
    if max(picture.size) <= SMALL:
        kind = "png"
        picture.save(target, "PNG")
    else:
        kind = "jpeg"
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        picture.save(target, "JPEG", quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(target.getvalue()).decode()}"
