"""Memory that is left: the tightest limit counts, and a system that tells nothing has none."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from morecl import ram

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 6 GiB available and 2 GiB of swap, whose process takes 1 GiB."""
    (tmp_path / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 6291456 kB\nSwapFree: 2097152 kB\n")
    (tmp_path / "statm").write_text(f"{GIB // ram.os.sysconf('SC_PAGE_SIZE')} 7 7 7 0 7 0\n")
    monkeypatch.setattr(ram, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(ram, "_OWN_PAGES", tmp_path / "statm")
    monkeypatch.setattr(ram, "_CONTAINER_LIMITS", (tmp_path / "max",))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    return tmp_path


def test_free_memory_and_swap(machine: Path) -> None:
    assert ram.available_bytes() == 8 * GIB


def test_a_container_limits_it(machine: Path) -> None:
    (machine / "max").write_text(f"{3 * GIB}\n")
    assert ram.available_bytes() == 3 * GIB
    (machine / "max").write_text("max\n")
    assert ram.available_bytes() == 8 * GIB


@pytest.mark.parametrize(("limit", "left"), [(5, 4), (20, 8), (1, 0)])
def test_the_shell_limits_it(machine: Path, monkeypatch: pytest.MonkeyPatch, limit: int, left: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit * GIB, resource.RLIM_INFINITY))
    assert ram.available_bytes() == left * GIB


def test_without_proc_the_whole_memory_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").unlink()
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(ram.os, "sysconf", pages.__getitem__)
    assert ram.available_bytes() == 4_096_000


def test_nothing_is_known(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").write_text("nonsense")
    monkeypatch.delattr(ram.os, "sysconf")
    assert ram.available_bytes() is None
