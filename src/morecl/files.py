"""Atomic writes: a crash leaves no half-written file. Write under a temporary name, flush to disk, rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from morecl import __version__
from morecl.errors import InputError, NewerFormatError

SEAL = "sha256"


def expanded(path: str | os.PathLike[str]) -> Path:
    """``path`` with the home folder in place of ``~``; that of a user who is not there stays as it is."""
    return Path(os.path.expanduser(path))


def there_or_at_home(path: str | os.PathLike[str]) -> str:
    """As :func:`expanded`, unless something is there under the name itself: a class of signs may be called ``~``."""
    return os.fspath(path) if os.path.lexists(path) else os.path.expanduser(path)


def check_utf8(folder: Path) -> None:
    """Raise :class:`InputError` if the path of ``folder`` is not UTF-8: safetensors opens no file there."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the path {folder} is not UTF-8, and no model can be read from such a folder: rename the folder"
        ) from error


def check_target(target: Path, example: str, option: str = "--out") -> None:
    """Raise :class:`InputError` if no file can be written to ``target``. Call it before a long computation."""
    if target.is_dir():
        raise InputError(f"{target} is a folder; give {option} the name of a file, such as {target / example}")
    if file := next((parent for parent in target.parents if parent.is_file()), None):
        raise InputError(f"{target} cannot be written: {file} is a file, not a folder; give {option} another name")
    try:
        with tempfile.TemporaryFile(dir=next(parent for parent in target.parents if parent.exists())):
            pass  # tried, because permissions do not tell: root may write to /proc, by them
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}); give {option} another name") from error


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``target``; rename it to ``target`` on success, remove it on failure."""
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the name of a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _named_in_errors(target):
        temporary = _temporary_name(target)
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE(temporary.stat().st_mode)  # by the umask, which cannot be read without setting it
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``target`` on success.

    An existing folder is first renamed and deleted last, so that at any moment one complete version exists as
    ``target`` or ``.target.old``.
    """
    if target.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise InputError(f"{target} is the current directory or above it and cannot be replaced; name a new folder")
    if target.is_file():
        raise InputError(f"{target} is a file; give the name of a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _named_in_errors(target):
        temporary = _temporary_name(target)
        temporary.mkdir()
        mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666  # safetensors gives none to others
        try:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file():
                    with path.open("rb+") as file:
                        os.fsync(file.fileno())
                    os.chmod(path, mode)
            aside = target.parent / f".{target.name}.old"
            shutil.rmtree(aside, ignore_errors=True)
            if target.exists():
                os.replace(target, aside)
            os.replace(temporary, target)
            shutil.rmtree(aside, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN and infinities raise ``ValueError``: JSON has neither."""
    write_text(target, json.dumps(value, indent=2, allow_nan=False) + "\n")


def compact_json(value: Any, indent: str = "") -> str:
    """``value`` as JSON to be read and compared: one key per line, a list of plain values on one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        entries = [f"{inner}{json.dumps(key)}: {compact_json(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
        return "[\n" + ",\n".join(inner + compact_json(part, inner) for part in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` with the sha256 of its other entries under ``SEAL``; a changed value differs from its sealed self."""
    rest = {key: part for key, part in value.items() if key != SEAL}
    text = json.dumps(rest, sort_keys=True, allow_nan=False)
    return {**rest, SEAL: hashlib.sha256(text.encode()).hexdigest()}


def refuse_newer(file: Path, found: object, known: str) -> None:
    """Raise :class:`NewerFormatError` if ``found``, the format of ``file``, is a later one than ``known``."""
    (kind, _, number), (known_kind, _, known_number) = str(found).rpartition("/"), known.rpartition("/")
    if kind == known_kind and number.isdecimal() and int(number) > int(known_number):
        raise NewerFormatError(
            f"{file} has the format {found!s:.60}, which this morecl ({__version__}) does not read; "
            "a newer morecl is needed"
        )


def is_trace(name: str, target: str) -> bool:
    """Whether ``name`` is one that :func:`atomic_path` or :func:`atomic_folder` gives, for a moment, beside ``target``.

    ``target`` is a regular expression of names.
    """
    return re.fullmatch(rf"\.({target})\.([0-9a-f]+\.tmp|old)", name) is not None


def _temporary_name(target: Path) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"


@contextmanager
def _named_in_errors(target: Path) -> Iterator[None]:
    """Have errors of the system name ``target``: a full disk names no file, others the temporary one."""
    try:
        yield
    except OSError as error:
        own = os.path.abspath(target.parent / f".{target.name}.")
        found = error.filename
        mine = found is None or (isinstance(found, str) and os.path.abspath(found).startswith(own))
        if error.errno is not None and mine:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
