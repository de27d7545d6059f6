"""CUDA started in a thread: which card, and what happens without."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from morecl import cli, cuda_start
from morecl.run import RUN, RunRequest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is called of a driver with two cards."""
    made: list[tuple[str, int]] = []

    def get(card: Any, index: int) -> int:
        made.append(("cuDeviceGet", index))
        card._obj.value = 10 + index
        return 0 if index < 2 else 101

    def retain(context: Any, card: Any) -> int:
        made.append(("cuDevicePrimaryCtxRetain", card.value))
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: made.append(("cuInit", flags)) or 0, cuDeviceGet=get, cuDevicePrimaryCtxRetain=retain
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cu130")
    return made


def begin(device: object) -> None:
    cuda_start.begin(device)
    for thread in threading.enumerate():
        if thread.name == "cuda":
            thread.join()


@pytest.mark.parametrize(("device", "card"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_the_card_of_the_setting_is_started(calls: list[tuple[str, int]], device: str, card: int) -> None:
    begin(device)
    assert calls == [("cuInit", 0), ("cuDeviceGet", card), ("cuDevicePrimaryCtxRetain", 10 + card)]


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda:x", "", None, 3])
def test_other_devices_start_nothing(calls: list[tuple[str, int]], device: object) -> None:
    begin(device)
    assert not calls


def test_a_torch_for_cpus_starts_nothing(calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cpu")
    begin("auto")
    assert not calls


@pytest.mark.parametrize("command", ["run", "resume"])
@pytest.mark.parametrize(("ranks", "begun"), [(None, ["cpu"]), ("2", [])])
def test_the_command_begins_unless_ranks_share_the_cards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, ranks: str | None, begun: list[str]
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(cuda_start, "begin", asked.append)
    monkeypatch.setattr("morecl.ranks.count", lambda: int(ranks or 1))
    monkeypatch.setattr(f"morecl.run.launch.{'start' if command == 'run' else command}", lambda *_, **__: sys.exit(7))
    request = RunRequest(benchmark="digits-5t", method="more", settings={"device": "cpu"})
    (tmp_path / RUN).write_text(request.model_dump_json(), encoding="utf-8")
    rest = ["digits-5t", "--device", "cpu", "--out", str(tmp_path / "run")] if command == "run" else [str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["morecl", command, *rest])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 7 and asked == begun


def test_a_card_that_is_not_there_is_left_to_torch(calls: list[tuple[str, int]]) -> None:
    begin("cuda:2")
    assert calls == [("cuInit", 0), ("cuDeviceGet", 2)]


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_start, "LIBRARY", "libcuda-not-there.so")
    assert cuda_start._start(0) is False
    begin("auto")


@pytest.mark.gpu
def test_on_a_gpu_torch_uses_what_was_started() -> None:
    import torch

    assert cuda_start._start(0)
    assert torch.ones(3, device="cuda").sum() == 3
