"""Running out of memory: a clear message, and no folder that could only fail again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from calling import exit_code
from digit_photos import write_digits
from morecl.errors import InputError
from morecl.methods.ncm import Ncm
from morecl.run import RunRequest, resume, start
from morecl.run.out_of_memory import is_out_of_memory

REQUEST = RunRequest(
    method="ncm", benchmark="digits-5t", settings={"eval_batch_size": 99}, train_per_class=2, test_per_class=1
)
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."
ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(ALLOCATOR),
    RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    OSError(12, "Cannot allocate memory"),
]


def fail_in(monkeypatch: pytest.MonkeyPatch, task: int, error: Exception) -> None:
    learn = Ncm._learn

    def failing(self: Ncm, data: Any, listener: Any) -> None:
        if data.index == task:
            raise error
        learn(self, data, listener)

    monkeypatch.setattr(Ncm, "_learn", failing)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{str(error)[:40]}")
def test_nothing_is_left_if_the_first_task_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_in(monkeypatch, 0, error)
    message = r"not enough memory: lower image_size, batch_size or eval_batch_size \(now image_size=16.*_size=99\)"
    with pytest.raises(InputError, match=message):
        start(REQUEST, tmp_path / "runs" / "digits-5t" / "ncm")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_if_the_data_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 80 GiB for an array")

    monkeypatch.setattr("morecl.run.launch.build_stream", failing)
    with pytest.raises(InputError, match=r"not enough memory.*The error was: Unable to allocate 80 GiB"):
        start(REQUEST, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_a_folders_images_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_digits(tmp_path / "photos", [0, 1], 0, 4)
    (tmp_path / "own.toml").write_text('dataset = "folder:photos"\ntasks = 1\nfolder_size = 1024\n')
    fail_in(monkeypatch, 0, MemoryError())
    request = REQUEST.model_copy(update={"benchmark": str(tmp_path / "own.toml")})
    with pytest.raises(InputError, match=r"eval_batch_size or folder_size \(now .*folder_size=1024\)"):
        start(request, tmp_path / "run")


def test_a_folder_that_was_there_before_stays_and_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        fail_in(patch, 0, MemoryError())
        with pytest.raises(InputError, match="not enough memory"):
            start(REQUEST, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    start(REQUEST, tmp_path / "run")


def test_finished_tasks_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = start(REQUEST, tmp_path / "whole")
    with monkeypatch.context() as patch:
        fail_in(patch, 2, RuntimeError(ALLOCATOR))
        for attempt in (lambda: start(REQUEST, tmp_path / "a run"), lambda: resume(tmp_path / "a run")):
            with pytest.raises(InputError, match=r"free some and `morecl resume '.*a run'`, or lower image_size"):
                attempt()
            assert (tmp_path / "a run" / "checkpoint-2").is_dir()
    assert resume(tmp_path / "a run").accuracy_matrix == whole.accuracy_matrix


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in(monkeypatch, 0, RuntimeError(ALLOCATOR))
    small = ["--train-per-class", 2, "--test-per-class", 1, "--out", tmp_path / "run"]
    assert exit_code(monkeypatch, "run", "--method", "ncm", *small) == 2
    error = capsys.readouterr().err
    assert "error: not enough memory" in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(28, "No space left"), ValueError("memory")])
def test_other_errors_are_not_about_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert not is_out_of_memory(error)
    fail_in(monkeypatch, 0, error)
    with pytest.raises(type(error)) as caught:
        start(REQUEST, tmp_path / "run")
    assert caught.value is error
    assert (tmp_path / "run" / "run.json").is_file()
