"""What a run has measured so far: saved with every checkpoint, made into the record at the end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import morecl
from morecl.errors import DamagedError, InputError
from morecl.evaluator import Step
from morecl.files import SEAL, sealed, write_json
from morecl.records import Roc
from morecl.run.folder import SHARED


@dataclass
class Measurements:
    """One entry per finished task in ``steps`` and, for methods with masks, in ``capacity``."""

    steps: list[Step] = field(default_factory=list)
    capacity: list[float] = field(default_factory=list)
    evaluate_seconds: float = 0.0
    total_seconds: float = 0.0
    peak_memory_bytes: int = 0  # of the main process
    ranks: int = 1  # processes that learned together, at most
    shared: bool = False  # other runs used the same card or cores at some time
    fingerprint: str = ""  # of the data
    sources: list[str] = field(default_factory=list)  # fingerprints of the code it ran with, more if that changed
    groups: list[list[int]] = field(default_factory=list)  # the classes of every task

    def note_sharing(self) -> None:
        """Take in whether the environment says that other runs use the same card or cores now."""
        if os.environ.get(SHARED, "") not in ("", "0"):
            self.shared = True

    def note_source(self) -> None:
        """Take in which code is running now."""
        source = source_fingerprint(Path(morecl.__file__).parent)
        if source not in self.sources:
            self.sources.append(source)

    def write(self, path: Path) -> None:
        value = dataclasses.asdict(self)
        value["steps"] = [dataclasses.asdict(s) | {"roc": s.roc.model_dump() if s.roc else None} for s in self.steps]
        write_json(path, sealed(value))

    @staticmethod
    def read(path: Path) -> Measurements:
        """Read and check what :meth:`write` wrote.

        Raises:
            DamagedError: the file is missing or was changed.
            InputError: it cannot be read.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value != sealed(value):
                raise ValueError("it was changed after it was saved (its sha256 differs)")
            del value[SEAL]
            for step in value["steps"]:
                step["roc"] = Roc.model_validate(step["roc"]) if step["roc"] else None
                step["errors"] = tuple(step["errors"]) if step["errors"] else None
            value["steps"] = [Step(**step) for step in value["steps"]]
            return Measurements(**value)
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing") from error
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror or error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from error


def source_fingerprint(package: Path) -> str:
    """The start of a sha256 of all Python files below ``package``: tells records of changed code apart."""
    digest = hashlib.sha256()
    files = sorted(package.rglob("*.py"))
    if not files:
        return "unknown"  # not installed as files
    for path in files:
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]
