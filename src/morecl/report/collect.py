"""Find and read the records of finished runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from morecl.errors import InputError, few
from morecl.records import Record, read_record

RECORD_NAME = "result.json"
NAMED = 3  # files that a note names


@dataclass(frozen=True)
class Collected:
    """Records, and why others could not be read."""

    records: list[Record]
    problems: list[str]

    @property
    def notes(self) -> list[str]:
        """What a report must say of records that it lacks, the first of them named; empty if it lacks none."""
        if not self.problems:
            return []
        which = "it" if len(self.problems) == 1 else "they"
        return [f"Left out, since {which} cannot be read: {few(self.problems, NAMED, '; ')}."]


def collect(paths: Sequence[Path]) -> Collected:
    """The records in the given files and folders (at any depth); a record found twice counts once.

    Raises:
        InputError: there are none, or none that can be read.
    """
    found: dict[str, Path] = {}  # real path -> as it was given
    problems: list[str] = []
    for path in paths:
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"there is no file or folder {path}; give a {RECORD_NAME} or a folder that holds some"
            ) from None
        except OSError:  # reading it says why
            is_folder = False
        found |= {os.path.realpath(each): each for each in (_below(path, problems) if is_folder else [path])}
    if not found and not problems:
        places = ", ".join(str(path) for path in paths) or "nothing"
        raise InputError(f"no {RECORD_NAME} found in {places}; a finished run leaves one in its folder")
    records: list[Record] = []
    for path in found.values():
        try:
            record = read_record(path)
        except InputError as error:
            cause = error.__cause__
            problems.append(f"{path} ({cause.strerror})" if isinstance(cause, OSError) else str(error))
            continue
        if record not in records:
            records.append(record)
    if not records:
        raise InputError(f"no record can be read: {'; '.join(problems)}")
    return Collected(records, problems)


def _below(folder: Path, problems: list[str]) -> list[Path]:
    """The records in a folder and in folders that it links to, sorted; why one cannot be read is added to ``problems``.

    A folder is entered once, however many links lead to it.
    """
    lost: list[OSError] = []
    found: list[Path] = []
    entered = {os.path.realpath(folder)}
    for inner, folders, files in os.walk(folder, onerror=lost.append, followlinks=True):
        found += [Path(inner) / RECORD_NAME] if RECORD_NAME in files else []
        new = {os.path.realpath(os.path.join(inner, name)): name for name in sorted(folders, reverse=True)}
        folders[:] = sorted(name for path, name in new.items() if path not in entered)
        entered |= new.keys()
    found.sort()
    problems += [f"{error.filename} ({error.strerror})" for error in lost]
    return found
