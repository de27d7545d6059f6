"""What is done on the nodes. Ray imports this there, so ``morecl`` has to be installed on every node."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import morecl
from morecl.errors import InputError
from morecl.locking import EXPIRE_SECONDS, claimed
from morecl.run import RESULT, SHARED
from morecl.suite import child
from morecl.suite.plan import PlannedRun

if TYPE_CHECKING:  # these import torch
    from morecl.classifier import Answer, Classifier

_HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # from a run that asked for no card; Ray leaves them visible
_APPEAR_SECONDS = 30.0  # until a new file of another host is seen on network storage
_PASSED_ON = ("MORECL_", "OMP_NUM_THREADS")  # variables of the user's environment


@dataclass(frozen=True)
class Surroundings:
    """What work on a node takes from where the user gave the command."""

    version: str
    directory: Path
    variables: Mapping[str, str]

    @classmethod
    def here(cls, cpus: int) -> Surroundings:
        """``cpus``: the threads of a task, unless the user sets ``OMP_NUM_THREADS``."""
        passed = {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}
        return cls(morecl.__version__, Path.cwd(), {"OMP_NUM_THREADS": str(cpus), **passed})

    def check(self) -> None:
        """Raise :class:`InputError` if the work would not be the same on this node."""
        node = socket.gethostname()
        if self.version != morecl.__version__:
            raise InputError(f"{node} has morecl {morecl.__version__}, not {self.version}; install the same everywhere")
        if not self.directory.is_dir():
            raise InputError(f"{node} has no folder {self.directory}; work in a folder that all nodes see")


def carry_out(run: PlannedRun, around: Surroundings, cards: float, attempt: int) -> int:
    """Start or resume ``run`` as a process and wait for it; -> its exit code."""
    around.check()
    log = child.log_of(run)
    _wait_for(log)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"on {socket.gethostname()}{f', try {attempt}' if attempt > 1 else ''}\n")
    if attempt > 1 and run.folder.is_dir():
        _wait_until_free(run.folder)
    if (run.folder / RESULT).is_file():
        return 0  # the node was lost after the run had ended
    environment = {**child.environment_for(None), **around.variables, **({} if cards else _HIDDEN)}
    if cards < 1:
        environment[SHARED] = "1"
    process = child.Child(run, environment, cwd=around.directory)
    try:
        while True:  # in steps, so that Ray can interrupt it
            try:
                return process.process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                continue
    finally:
        child.stop([process])


def answer(
    model: Path, version: int, device: str | None, paths: Sequence[str], around: Surroundings, top: int, accept: float
) -> list[Answer]:
    """The answers for the images at ``paths``. The model stays loaded for the next ones."""
    around.check()
    classifier = _loaded(model, version, device, int(around.variables["OMP_NUM_THREADS"]))
    names = [str(around.directory / path) for path in paths]
    return [
        replace(found, path=path)
        for path, found in zip(paths, classifier.answers(names, top=top, accept=accept), strict=True)
    ]


def reason(error: Any) -> str:
    """What a ``RayTaskError`` was caused by, without the traceback on the node."""
    cause = error.cause
    if isinstance(cause, InputError):
        return str(cause)
    text = next(iter(str(cause).strip().splitlines()), "")
    hint = "; install the same morecl on every node" if "No module named" in text else ""
    return f"{type(cause).__name__} on a node: {text}{hint}"


@lru_cache(maxsize=1)
def _loaded(model: Path, version: int, device: str | None, threads: int) -> Classifier:
    import torch

    from morecl.classifier import ModelFolder

    torch.set_num_threads(threads)
    return ModelFolder(model).load(version, device=device)


def _wait_for(log: Path) -> None:
    """Wait until ``log``, which was made where the command was given, is seen here."""
    until = time.monotonic() + _APPEAR_SECONDS
    while not log.is_file():
        if time.monotonic() > until:
            raise InputError(
                f"{socket.gethostname()} does not see {log}; --out has to be on storage that all nodes see"
            )
        time.sleep(0.5)


def _wait_until_free(folder: Path) -> None:
    """Wait until the claim of a lost node has expired."""
    until = time.monotonic() + 1.5 * EXPIRE_SECONDS
    while True:
        try:
            with claimed(folder):
                return
        except InputError:
            if time.monotonic() > until:
                raise
            time.sleep(1.0)
