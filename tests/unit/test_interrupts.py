"""SIGTERM ends a run as Ctrl-C does, also where SIGINT is ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from morecl.interrupts import sigterm_as_interrupt
from morecl.run import launch


def test_sigterm_is_an_interrupt_inside_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_runs_its_block_and_changes_no_handler() -> None:
    seen: list[object] = []

    def work() -> None:
        with sigterm_as_interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def ignore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_run_and_its_resumption_end_cleanly_by_sigterm_where_sigint_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = ["--train-per-class", "6", "--test-per-class", "4", "--set", "bottleneck=4", "--device", "cpu"]
    endless = ["--set", "image_size=8", "--set", "epochs=1", "--set", "back_update_epochs=100000"]  # from task 2 on
    commands = [["run", "digits-5t", *small, *endless, "--out", str(folder)], ["resume", str(folder)]]
    for command in commands:
        process = subprocess.Popen(
            [sys.executable, "-m", "morecl", *command],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=ignore_sigint,
        )
        wait_for(folder / "checkpoint-1", process)
        if command[0] == "resume":
            assert process.stdout is not None
            process.stdout.readline()  # it continues after task 1
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130, error
        assert f"morecl resume {folder}" in error
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "checkpoint-1", "run.json"]
    assert launch.read_request(folder).benchmark == "digits-5t"
