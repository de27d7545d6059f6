"""Find and read the records of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from morecl.errors import InputError
from morecl.records import Record, read_record

RECORD_NAME = "result.json"


def collect(paths: Sequence[Path]) -> list[Record]:
    """The records in the given files and folders (at any depth); a record found twice counts once."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(sorted(inner.resolve() for inner in path.rglob(RECORD_NAME)))
        elif path.exists():
            found[path.resolve()] = None
        else:
            raise InputError(f"there is no file or folder {path}; give a {RECORD_NAME} or a folder that holds some")
    if not found:
        places = ", ".join(str(path) for path in paths) or "nothing"
        raise InputError(f"no {RECORD_NAME} found in {places}; a finished run leaves one in its folder")
    records: list[Record] = []
    for path in found:
        record = read_record(path)
        if record not in records:
            records.append(record)
    return records
