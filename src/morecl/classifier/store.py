"""A model as a folder with a history of versions.

    MODEL/model.json       which versions there are, oldest first; the last is in use. No number is given twice. And
                           how many are kept, whoever adds the next one
    MODEL/versions/3/      one version, complete (see morecl.classifier.version_files)
    MODEL/.lock            held by whoever changes the model

A new version is written under a temporary name and renamed, then ``model.json`` is replaced: whatever kills the process
leaves the old model or the new one. Versions that ``model.json`` does not name, and what has a temporary name, are
leftovers and removed by the next change; what a user puts beside them stays. Versions that share a backbone share its
file (a hard link), where the file system can.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from morecl import __version__
from morecl.classifier import version_files
from morecl.classifier.arguments import check_count
from morecl.classifier.version_files import FORMAT, read_sealed
from morecl.errors import InputError, NewerFormatError
from morecl.files import atomic_folder, check_utf8, expanded, is_trace, sealed, write_json
from morecl.locking import belongs_to_claim, claimed

if TYPE_CHECKING:  # these import torch
    from morecl.classifier.core import Classifier

MODEL, VERSIONS = "model.json", "versions"
NUMBER = "[1-9][0-9]*"  # of a version, as a name
KEEP = 5  # versions


class Version(BaseModel):
    """One version, as ``morecl history`` shows it."""

    model_config = ConfigDict(strict=True, frozen=True)

    number: Annotated[int, Field(ge=1)]
    created: str  # ISO 8601
    action: str
    what: str
    classes: int
    images: int  # trained on
    accuracy: float | None  # percent, held-back images
    morecl: str


class History(BaseModel):
    """``model.json``."""

    model_config = ConfigDict(strict=True)

    versions: Annotated[list[Version], Field(min_length=1)]
    last_number: Annotated[int, Field(ge=1)]  # the highest that was ever given
    keep: Annotated[int, Field(ge=1)]  # versions


class ModelFolder:
    """See the module's text."""

    def __init__(self, path: str | Path):
        self.path = expanded(path)

    # ---- reading ----------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether a model is there. A folder that holds something else is an :class:`InputError`."""
        if (self.path / MODEL).is_file():
            return True
        if self.path.is_file():
            raise InputError(f"{self.path} is a file; a model is a folder")
        if self.path.is_symlink() and not self.path.is_dir():
            raise InputError(f"{self.path} is a link to {self.path.readlink()}, which is not there")
        if self.path.is_dir() and any(
            p.name != VERSIONS for p in self.path.iterdir() if not (_is_leftover(p) or belongs_to_claim(p))
        ):
            hint = "; it is a learner saved by `learner.save`" if (self.path / "learner.json").is_file() else ""
            raise InputError(f"{self.path} holds no model{hint}; choose another folder")
        if self._has_later_versions():  # a killed first lesson leaves at most version 1
            raise InputError(
                f"{self.path / MODEL} is missing, but {self.path / VERSIONS} holds versions of a model, which a new "
                f"one would remove. {self._way_without_list()}, or choose another folder"
            )
        return False

    def versions(self) -> list[Version]:
        """Oldest first; the last is in use."""
        return self._history().versions

    def kept(self) -> int:
        """How many versions are kept when the next one is added."""
        return self._history().keep

    def load(self, number: int | None = None, *, device: str | None = None) -> Classifier:
        """The version ``number``, or the one in use. A number is enough where ``model.json`` is lost or damaged."""
        if number is None:
            return self.load_newest(device=device)[1]
        check_count("version", number, 1)
        try:
            versions = self.versions()
        except InputError:
            if not self._folder(number).is_dir():
                raise
            return version_files.read(self._folder(number), device)
        numbers = [version.number for version in versions]
        if number not in numbers:
            raise InputError(f"{self.path} has no version {number}; it has {', '.join(map(str, numbers))}")
        classifier = self._read(number, device)
        classifier.newest_in[self.path.resolve()] = numbers[-1]
        return classifier

    def _read(self, number: int, device: str | None) -> Classifier:
        """A version; an error says how to go back, if it is the one in use."""
        try:
            return version_files.read(self._folder(number), device)
        except InputError as error:
            versions = self.versions()  # as of now: another process may have removed it meanwhile
            if number != versions[-1].number or not (way_out := self._way_back(versions, error)):
                raise
            raise InputError(f"{error}. {way_out}") from error

    def load_newest(self, *, device: str | None = None) -> tuple[list[Version], Classifier]:
        """The version in use, and all versions at that moment.

        Another process may replace and remove it while it is read; then the one that is in use by now is read.
        """
        while True:
            versions = self.versions()
            newest = versions[-1].number
            try:
                classifier = self._read(newest, device)
                classifier.newest_in[self.path.resolve()] = newest
                return versions, classifier
            except (InputError, OSError):
                if self.versions()[-1].number == newest:
                    raise

    def bytes(self, number: int) -> int:
        """Size of a version's files."""
        total = 0
        for file in self._folder(number).rglob("*"):
            with suppress(FileNotFoundError):  # another process removes the version
                total += file.stat().st_size if file.is_file() else 0
        return total

    # ---- changing ---------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep other processes from changing the model meanwhile.

        Raises:
            BusyError: another process changes it.
            InputError: it cannot be changed.
        """
        self.exists()  # refuses a folder that holds something else
        check_utf8(self.path)
        if self.path.is_dir() and not os.access(self.path, os.W_OK | os.X_OK):
            raise InputError(f"{self.path} may not be written to, so the model in it cannot be changed")
        with claimed(self.path):
            yield

    def commit(
        self, classifier: Classifier, action: str, what: str = "", *, keep: int | None = None, purge: bool = False
    ) -> int:
        """Add a version and put it in use.

        Args:
            keep: versions to keep, this one included, now and after later changes; ``None``: as many as so far.
            purge: keep no older version, because they hold what was to be forgotten.

        Raises:
            InputError: there is nothing to save; or the version is in use, but an older one could not be purged.
        """
        if not classifier.classes:
            raise InputError("nothing has been learned yet, so there is nothing to save")
        history = self._history() if self.exists() else None
        versions = history.versions if history else []
        number = history.last_number + 1 if history else 1
        keep = max(1, keep) if keep is not None else history.keep if history else KEEP
        self._remove_leftovers(versions)
        try:
            with atomic_folder(self._folder(number)) as temporary:
                version_files.write(classifier, temporary, self._folder(versions[-1].number) if versions else None)
        except BaseException:
            with suppress(OSError):  # it is not empty
                (self.path / VERSIONS).rmdir()
            raise
        version = Version(
            number=number,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            action=action,
            what=what,
            classes=len(classifier.classes),
            images=sum(classifier.images),
            accuracy=classifier.accuracy(),
            morecl=__version__,
        )
        self._put([*versions, version][-1 if purge else -keep :], number, keep)
        classifier.newest_in[self.path.resolve()] = number
        if purge and (left := self._leftovers([version])):
            raise InputError(
                f"{left[0]} could not be removed and still holds what was forgotten: remove it by hand. "
                f"Version {number}, without it, is in use"
            )
        return number

    def save(self, classifier: Classifier, action: str, what: str, keep: int | None) -> int:
        """:meth:`Classifier.save`."""
        if keep is not None:
            check_count("keep", keep, 1)
        with self.changing():
            known = classifier.newest_in.get(self.path.resolve())
            if known is not None and self.exists() and (now := self.versions()[-1].number) != known:
                raise InputError(
                    f"{self.path} was changed since this classifier was opened or saved: version {now} is in use, not "
                    f"{known}, and what was changed would be lost. Open it again and repeat your changes, or save this "
                    "one as another model"
                )
            return self.commit(classifier, action, what, keep=keep)

    def undo(self) -> Version:
        """Go back to the version before; the newest one is removed, if it can be. Returns the one now in use."""
        history = self._history()
        if len(history.versions) < 2:
            raise InputError(f"{self.path} has no earlier version to go back to")
        self._put(history.versions[:-1], history.last_number, history.keep)
        return history.versions[-2]

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _folder(self, number: int) -> Path:
        return self.path / VERSIONS / str(number)

    def _way_back(self, versions: list[Version], error: InputError) -> str:
        """How to get to the newest whole version if the one in use is damaged; nothing if there is no such way.

        A version that may not be read, or was written by another morecl, is not damaged: to undo it would delete it.
        """
        if isinstance(error.__cause__, PermissionError) or version_files.has_other_format(
            self._folder(versions[-1].number)
        ):
            return ""
        for steps, version in enumerate(reversed(versions)):
            if self._is_whole(version.number):
                times = f", given {steps} times," if steps > 1 else ""
                command = f"`morecl undo {shlex.quote(str(self.path))}`{times}"
                return f"{command} removes it and goes back to version {version.number}" if steps else ""
        return ""

    def _is_whole(self, number: int) -> bool:
        try:
            version_files.read(self._folder(number), "cpu")
        except InputError:
            return False
        return True

    def _has_later_versions(self) -> bool:
        """Whether the folder of a version after the first is there, whatever ``model.json`` says."""
        return max(self._found(), default=0) > 1

    def _found(self) -> list[int]:
        """The versions whose folders are there, whatever ``model.json`` says."""
        folder = self.path / VERSIONS
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        return [int(name) for name in names if name.isdecimal()]

    def _way_without_list(self) -> str:
        """How to get to the versions where ``model.json`` is lost or damaged."""
        way = f"Put {MODEL} back from a backup"
        if newest := max(self._found(), default=0):
            opened = f"morecl.Classifier.open({str(self.path)!r}, version={newest})"
            way += f"; or, in Python, {opened}.save('NEW') makes a new model of version {newest}"
        return way

    def _history(self) -> History:
        file = self.path / MODEL
        if not file.is_file():
            self.exists()
            command = f"morecl learn {shlex.quote(str(self.path))} FOLDER"
            raise InputError(f"there is no model in {self.path}; `{command}` makes one")
        try:
            return read_sealed(file, History)
        except NewerFormatError:
            raise
        except InputError as error:
            if isinstance(error.__cause__, OSError):  # it is whole, but may not be read
                raise
            raise InputError(f"{error}. {self._way_without_list()}") from error

    def _put(self, versions: list[Version], last_number: int, keep: int) -> None:
        """Make these the model's versions and remove all others."""
        history = History(versions=versions, last_number=last_number, keep=keep)
        write_json(self.path / MODEL, sealed({"format": FORMAT, **history.model_dump()}))
        self._remove_leftovers(versions)

    def _remove_leftovers(self, versions: list[Version]) -> None:
        for path in self._leftovers(versions):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _leftovers(self, versions: list[Version]) -> list[Path]:
        """What lies in the folder besides these versions: older ones, and drafts of an interrupted write."""
        named = {str(version.number) for version in versions}
        folder = self.path / VERSIONS
        found = [path for path in folder.iterdir() if _is_ours(path)] if folder.is_dir() else []
        old = [path for path in found if path.name not in named]
        return [*old, *(path for path in self.path.iterdir() if _is_leftover(path))]


def _is_ours(path: Path) -> bool:
    """Whether something in ``versions`` is a version, or on its way to be one or to be removed."""
    return re.fullmatch(NUMBER, path.name) is not None or is_trace(path.name, NUMBER)


def _is_leftover(path: Path) -> bool:
    return path.name.startswith(f".{MODEL}.") and path.name.endswith(".tmp")
