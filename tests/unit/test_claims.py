"""One host at a time in a folder, where the system's lock knows nothing of other hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from morecl import locking
from morecl.errors import InputError
from morecl.locking import CLAIM, LOCK, claimed
from waiting import until

# A host of its own: another boot and name, and a system lock that nobody else sees.
HOST = """
import os, pathlib, socket, sys, time
from morecl import locking
from filelock import FileLock
host, folder = sys.argv[1], pathlib.Path(sys.argv[2])
locking._boot = lambda: host
socket.gethostname = lambda: host
locking.FileLock = lambda path: FileLock(f"{path}-{host}")
locking.RENEW_SECONDS, locking.EXPIRE_SECONDS, locking._SETTLE_SECONDS = 0.1, float(sys.argv[3]), 0.2
print("ready", flush=True)
sys.stdin.readline()
try:
    with locking.claimed(folder):
        print("in", flush=True)
        sys.stdin.readline()
except locking.BusyError as error:
    print(error, flush=True)
"""


class Host:
    def __init__(self, name: str, folder: Path, expire: float = 60.0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, name, str(folder), str(expire)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.said() == "ready"

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> Host:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def hosts(folder: Path, *names: str, expire: float = 60.0) -> Iterator[list[Host]]:
    started = [Host(name, folder, expire) for name in names]
    try:
        yield started
    finally:
        for host in started:
            host.end()


def leave_claim(folder: Path, *, age: float = 0.0, **changes: Any) -> None:
    """The claim of a host that did not remove it."""
    claim = {"host": "node7", "boot": "other", "pid": 41, "since": "2026-01-02 03:04:05+00:00", "token": "t", **changes}
    (folder / CLAIM).write_text(json.dumps(claim))
    os.utime(folder / CLAIM, (time.time() - age, time.time() - age))


def test_another_host_is_refused_by_name_until_the_first_is_done(tmp_path: Path) -> None:
    with hosts(tmp_path, "node1", "node2") as (first, second):
        assert first.go_on().said() == "in"
        found = second.go_on().said()
        assert f"another process is at work in {tmp_path} (process {first.process.pid} on node1, since 2" in found
        assert "free 60 s after its end" in found
        first.go_on().process.wait(timeout=30)
        with claimed(tmp_path):
            assert json.loads((tmp_path / CLAIM).read_text())["pid"] == os.getpid()
    assert not (tmp_path / CLAIM).exists() and not list(tmp_path.glob(f"{CLAIM}.*"))


@pytest.mark.parametrize("left", [None, "expired"])
def test_of_many_hosts_at_once_one_is_in(tmp_path: Path, left: str | None) -> None:
    if left:
        leave_claim(tmp_path, age=120)
    names = [f"node{k}" for k in range(4)]
    with hosts(tmp_path, *names) as started:
        for host in started:
            host.go_on()
        said = [host.said() for host in started]
    assert said.count("in") == 1
    assert sum("another process is at work" in text for text in said) == 3


def test_a_living_host_renews_its_claim_and_a_dead_one_loses_it(tmp_path: Path) -> None:
    def renewed() -> float:
        return (tmp_path / CLAIM).stat().st_mtime

    with hosts(tmp_path, "node1", "node2", "node3", expire=3.0) as (first, second, third):
        assert first.go_on().said() == "in"
        begun = renewed()
        until(lambda: renewed() > begun + 3.0)  # it would have expired
        assert "node1" in second.go_on().said()
        first.end()
        time.sleep(3.2)
        assert third.go_on().said() == "in"


def test_who_lost_a_claim_is_stopped(tmp_path: Path) -> None:
    with hosts(tmp_path, "node1") as (first,):
        assert first.go_on().said() == "in"
        leave_claim(tmp_path)
        assert first.process.wait(timeout=30) < 0
        assert first.process.stderr is not None
        assert f"process 41 on node7, since 2026-01-02 03:04:05+00:00 has taken over {tmp_path}" in (
            first.process.stderr.read()
        )
    assert json.loads((tmp_path / CLAIM).read_text())["host"] == "node7"


@pytest.mark.parametrize(("age", "free"), [(55.0, False), (65.0, True), (-55.0, False), (-65.0, True)])
def test_a_claim_expires_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, free: bool
) -> None:
    leave_claim(tmp_path, age=age)
    monkeypatch.setattr(locking, "_SETTLE_SECONDS", 0.0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)  # this host's clock is an hour ahead
    if free:
        with claimed(tmp_path):
            pass
    else:
        with pytest.raises(InputError, match=r"process 41 on node7, since 2026-01-02"), claimed(tmp_path):
            raise AssertionError("two hosts are in")


def test_a_killed_process_of_this_host_frees_the_folder_at_once(tmp_path: Path) -> None:
    leave_claim(tmp_path, boot=locking._boot())
    with claimed(tmp_path):
        assert json.loads((tmp_path / CLAIM).read_text())["token"] != "t"
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_an_unreadable_claim_counts_until_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(locking, "_SETTLE_SECONDS", 0.0)
    (tmp_path / CLAIM).write_text(text)
    with pytest.raises(InputError, match="an unknown host"), claimed(tmp_path):
        raise AssertionError("two hosts are in")
    os.utime(tmp_path / CLAIM, (1.0, 1.0))
    with claimed(tmp_path):
        pass


def test_without_locks_and_hard_links_the_claim_alone_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(locking.errno.ENOTSUP, "not here")

    monkeypatch.setattr(locking.FileLock, "acquire", refuse)
    monkeypatch.setattr(os, "link", refuse)
    with claimed(tmp_path), pytest.raises(InputError, match=f"process {os.getpid()} on"), claimed(tmp_path):
        raise AssertionError("two are in")
    assert not (tmp_path / CLAIM).exists()


def test_a_claim_that_someone_removed_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "RENEW_SECONDS", 0.05)
    with claimed(tmp_path):
        (tmp_path / CLAIM).unlink()
        until = time.monotonic() + 10
        while not (tmp_path / CLAIM).exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / CLAIM).exists()
    assert not (tmp_path / CLAIM).exists()
