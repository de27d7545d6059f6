"""Locking a folder so that one process at a time works in it, on one host or several.

Two things keep others out. ``.lock`` is locked by the system, which drops the lock of a killed process at once, but on
network storage may not know of other hosts. ``.claim`` says who works here, and its modification time is renewed every
few seconds; so a host that died is known by a claim that is no longer renewed. Its age is taken by the clock of the
file system, so the hosts' own clocks do not matter.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from morecl.errors import BusyError

LOCK = ".lock"
CLAIM = ".claim"
BUSY = "another process is at work in"  # how the message of a BusyError begins
RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 60.0  # without a renewal: the host is dead

_SETTLE_SECONDS = 1.0  # two hosts may take an expired claim at once; after this both see whose it is
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}  # the file system has none


@dataclass(frozen=True)
class Claim:
    """Who works in a folder. ``boot`` tells hosts apart: names repeat, and a host that started anew holds no lock."""

    host: str
    boot: str
    pid: int
    since: str
    token: str


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Create ``folder`` if needed and keep other processes out of it, those of other hosts too.

    The lock file stays: if it were removed, a process that had opened it before could lock the removed file while
    another locks a new one. It goes only with a folder that was created here and stayed empty.

    A process whose claim was taken over by another host, because it did not renew it in time, gets SIGTERM.

    Raises:
        BusyError: another process is at work in ``folder``.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise _taken(folder) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        with _claim(folder, locked=lock.is_locked):
            yield
    finally:
        if created:
            _remove_if_empty(folder, created)
        lock.release()


def is_claimed(folder: Path) -> bool:
    """Whether another process seems to be at work in ``folder``. Only :func:`claimed` knows for sure."""
    try:
        found = _read(folder / CLAIM)
    except OSError:
        return False
    if found is None or abs(time.time() - found[1]) >= EXPIRE_SECONDS:
        return False
    claim = found[0]
    if claim.boot != _boot():
        return True
    return claim.pid != os.getpid() and _is_alive(claim.pid)


def _is_alive(pid: int) -> bool:
    """Of a process on this host; where it cannot be told, it may be."""
    if os.name != "posix":  # the signal 0 would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:  # it has ended, or is in another container
        return False
    except PermissionError:  # another user's
        return True
    return True


def belongs_to_claim(path: Path) -> bool:
    """Whether ``path`` is one of the files that :func:`claimed` makes; they say nothing about what a folder holds."""
    return path.name == LOCK or path.name.startswith(CLAIM)


@contextmanager
def _claim(folder: Path, locked: bool) -> Iterator[None]:
    """Hold ``.claim``. ``locked``: the system lock is held, so no other process of this host works here."""
    since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    mine = Claim(socket.gethostname(), _boot(), os.getpid(), since, uuid.uuid4().hex)
    file, released = folder / CLAIM, threading.Event()
    renewing = threading.Thread(target=_renew, args=(file, mine, released), name="renew claim", daemon=True)
    try:
        _take(file, mine, locked)
        renewing.start()
        yield
    finally:
        released.set()
        if renewing.ident is not None:
            renewing.join()
        with suppress(OSError):
            if (found := _read(file)) and found[0].token == mine.token:
                file.unlink()


def _take(file: Path, mine: Claim, locked: bool) -> None:
    """Make ``file`` the claim ``mine``, or raise :class:`BusyError`."""
    draft = file.with_name(f"{CLAIM}.{mine.token}")
    try:
        draft.write_text(json.dumps(asdict(mine)), encoding="utf-8")
        while True:
            try:
                _publish(draft, file)
                return
            except FileExistsError:
                found = _read(file)
            if found is None:  # released just now
                continue
            other, renewed = found
            os.utime(draft)
            age = draft.stat().st_mtime - renewed
            expired = abs(age) > EXPIRE_SECONDS  # one from the future is not renewed either: the clock was set back
            ended = locked and other.boot == mine.boot  # else it would hold the lock
            if not ended and not expired and other.token != mine.token:
                raise _taken(file.parent)
            os.replace(draft, file)
            if expired:
                time.sleep(_SETTLE_SECONDS)
                if (found := _read(file)) is None or found[0].token != mine.token:
                    raise _taken(file.parent)
            return
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk
            error.filename = str(file.parent)
        raise
    finally:
        draft.unlink(missing_ok=True)


def _publish(draft: Path, file: Path) -> None:
    """Give ``draft`` the name ``file``; ``FileExistsError`` if there is one. Of several hosts, one succeeds."""
    try:
        os.link(draft, file)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with file.open("x", encoding="utf-8") as stream:
            try:
                stream.write(draft.read_text(encoding="utf-8"))
                stream.flush()
            except OSError:  # a full disk
                file.unlink(missing_ok=True)
                raise


def _renew(file: Path, mine: Claim, released: threading.Event) -> None:
    renewed = time.time()
    while not released.wait(RENEW_SECONDS):
        with suppress(OSError):  # the storage is away; it may come back
            found = _read(file)
            if found is None and time.time() - renewed < EXPIRE_SECONDS:  # someone tidied up
                with file.open("x", encoding="utf-8") as stream:
                    stream.write(json.dumps(asdict(mine)))
            elif found is not None and found[0].token == mine.token:
                os.utime(file)
            else:  # this process was stopped, or the storage was away, for longer than a claim lives
                who = _who(found[0]) if found else "another process"
                print(f"stopping: {who} has taken over {file.parent}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            renewed = time.time()


def _read(file: Path) -> tuple[Claim, float] | None:
    """The claim and when it was renewed, by the file system's clock; ``None`` if there is none.

    The file is opened before it is asked for its time: network storage then answers from the server, not from a cache.
    """
    try:
        with file.open("rb") as stream:
            renewed = os.fstat(stream.fileno()).st_mtime
            text = stream.read()
    except FileNotFoundError:
        return None
    try:
        return Claim(**json.loads(text)), renewed
    except (ValueError, TypeError):  # half-written, or not ours
        return Claim("an unknown host", "", 0, "", ""), renewed


def _taken(folder: Path) -> BusyError:
    found = None
    with suppress(OSError):
        found = _read(folder / CLAIM)
    who = f" ({_who(found[0])})" if found else ""
    there = found is not None and found[0].boot != _boot()
    hint = f". If that host is dead, the folder is free {EXPIRE_SECONDS:.0f} s after its end" if there else ""
    return BusyError(f"{BUSY} {folder}{who}; wait for it, or choose another folder{hint}")


def _who(claim: Claim) -> str:
    return f"process {claim.pid} on {claim.host}, since {claim.since}" if claim.since else claim.host


@cache
def _boot() -> str:
    """Tells hosts apart, and the starts of a host; where the system has no such id, by the network card's address."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _remove_if_empty(folder: Path, created: list[Path]) -> None:
    """If ``folder`` holds nothing but the lock file, remove ``created``, innermost first, as far as they are empty."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in created:
                path.rmdir()
