"""One process at a time in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from morecl import locking
from morecl.errors import InputError
from morecl.locking import CLAIM, EXPIRE_SECONDS, LOCK, claimed, is_claimed

# Opens the lock file, waits until it can lock what it opened, and holds it.
WAITER = """
import fcntl, sys
file = open(sys.argv[1], "a")
print("opened", flush=True)
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    claim = "import sys, pathlib; from morecl.locking import claimed; claimed(pathlib.Path(sys.argv[1])).__enter__()"
    command = [sys.executable, "-c", claim, str(tmp_path)]
    with claimed(tmp_path):
        other = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "BusyError: another process is at work in" in other.stderr
    assert subprocess.run(command, timeout=60).returncode == 0


def test_only_one_is_in_when_another_had_opened_the_lock_file_before_it_was_released(tmp_path: Path) -> None:
    """The second process locks the file it opened while the first was in; a third must find that same file locked."""
    pytest.importorskip("fcntl")
    with claimed(tmp_path):
        command = [sys.executable, "-c", WAITER, str(tmp_path / LOCK)]
        waiter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "opened\n"
    try:
        assert waiter.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match="another process is at work"), claimed(tmp_path):
            raise AssertionError("two processes are in")
    finally:
        waiter.communicate("", timeout=60)
    with claimed(tmp_path):
        pass


def test_a_claim_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space") as caught, claimed(tmp_path / "run"):
        pass
    assert caught.value.filename == str(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_without_hard_links_leaves_no_empty_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(Path, "read_text", full)
    with pytest.raises(OSError, match="No space"), claimed(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_created_and_stayed_empty_is_removed(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with claimed(tmp_path / "there"):
        pass
    assert [path.name for path in (tmp_path / "there").iterdir()] == [LOCK]
    with claimed(tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    assert sorted(path.name for path in (tmp_path / "used").iterdir()) == [LOCK, "file"]


def test_who_else_seems_to_be_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(pid: int, boot: str, age: float = 0.0) -> bool:
        (tmp_path / CLAIM).write_text(json.dumps({"host": "h", "boot": boot, "pid": pid, "since": "", "token": "t"}))
        then = time.time() - age
        os.utime(tmp_path / CLAIM, (then, then))
        return is_claimed(tmp_path)

    assert not is_claimed(tmp_path) and not is_claimed(tmp_path / "nowhere")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert claim(os.getppid(), locking._boot())
    assert not claim(os.getppid(), locking._boot(), age=2 * EXPIRE_SECONDS)  # its number was given to another
    assert not claim(ended.pid, locking._boot())

    def refused(pid: int, sign: int) -> None:
        raise PermissionError  # another user's process

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refused)
        assert claim(os.getppid(), locking._boot())
    assert claim(1, "another host") and not claim(1, "another host", age=2 * EXPIRE_SECONDS)
    with claimed(tmp_path / "own"):
        assert not is_claimed(tmp_path / "own")  # this process is no other
