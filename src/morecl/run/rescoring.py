"""Another way to answer, on networks that are already trained: the record of a run that was never made again."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from morecl import checkpoint
from morecl.errors import InputError
from morecl.evaluator import Evaluator
from morecl.interrupts import sigterm_as_interrupt
from morecl.locking import claimed
from morecl.methods import METHODS, Learner, method_class
from morecl.records import Record, write_record
from morecl.run.folder import MODEL, PROGRESS, RESULT, checkpoints, rescored_folder
from morecl.run.launch import build_task_stream, refuse_changed
from morecl.run.measurements import Measurements
from morecl.run.record import build_record
from morecl.run.request import read_request
from morecl.run.watcher import Watcher


def rescore(
    folder: Path, method: str | None = None, settings: Mapping[str, Any] | None = None, watcher: Watcher | None = None
) -> tuple[Path, Record]:
    """Score the networks of the run in ``folder`` by the rule of ``method``; -> the new record's folder, the record.

    After each task the learner of that time is loaded, gets the other rule, which is fitted to the task as it would
    have been then, and is evaluated. So the record is the one that a run of ``method`` with these settings would have
    left, times apart.

    Args:
        folder: a finished run that kept its checkpoints (``morecl run --keep-checkpoints``).
        method: one whose networks are trained as those of the run; the run's own method if not given.
        settings: settings that only change how answers are made.

    Raises:
        InputError: the run does not have what is needed, or other networks would have to be trained.
    """
    watcher = watcher or Watcher()
    request = read_request(folder)
    name = method or request.method
    cls = method_class(name)
    _refuse_other_networks(cls, method_class(request.method), folder)
    with sigterm_as_interrupt(), claimed(folder):
        saved = checkpoints(folder)
        if not (folder / RESULT).is_file():
            raise InputError(f"the run in {folder} is not finished: `morecl resume {shlex.quote(str(folder))}` first")
        _refuse_missing(folder, saved)
        run = request.resolve()
        measured, learner = Measurements(shared=Measurements.read(saved[-1] / PROGRESS).shared), None
        measured.note_sharing()
        measured.note_source()
        out = rescored_folder(folder, _variant(cls, settings or {}))
        for number, path in enumerate(saved):
            trained = checkpoint.load(path)
            config = cls.adopted_config(trained, dict(settings or {}))
            config.refuse_switched_off(settings or {})
            learner = cls.adopt(trained, config, before=learner)
            if number == 0:
                stream = build_task_stream(run, learner)
                refuse_changed(run, trained, stream, Measurements.read(path / PROGRESS), folder)
                names = np.array(stream.dataset.classes, dtype=object)
                evaluator = Evaluator(learner, stream)
                watcher.started(learner, stream, 0)
            task = stream[number]
            learner.fit_rule(task.x_train, names[task.y_train].tolist())
            evaluator.learner = learner
            _measure(evaluator, learner, number, measured)
            watcher.task(number, measured.steps[-1], measured.total_seconds)
        assert learner is not None
        record = build_record(request.model_copy(update={"method": name}), learner, stream, measured)
        learner.save(out / MODEL)
        write_record(out / RESULT, record)
    return out, record


def _measure(evaluator: Evaluator, learner: Learner, number: int, measured: Measurements) -> None:
    began = time.perf_counter()
    measured.steps.append(evaluator.after_task(number))
    measured.evaluate_seconds += time.perf_counter() - began
    measured.total_seconds = sum(learner.seconds.values()) + measured.evaluate_seconds
    capacity = learner.capacity()
    if capacity is not None:
        measured.capacity.append(capacity)


def _refuse_other_networks(cls: type[Learner], trained: type[Learner], folder: Path) -> None:
    """Refuse a method that does not use such networks, before anything is said about what ``folder`` holds."""
    if cls.trained_as == trained.trained_as:
        return
    found = f"{folder} holds a run of {trained.name!r}"
    if [name for name, other in METHODS.items() if other.trained_as == cls.trained_as] == [cls.name]:
        raise InputError(f"{found}; only a run of {cls.name!r} itself can be rescored by it")
    raise InputError(f"{found}; method {cls.name!r} uses networks that {cls.trained_as!r} trains")


def _refuse_missing(folder: Path, saved: list[Path]) -> None:
    tasks = len(Measurements.read(saved[-1] / PROGRESS).groups) if saved else None
    if tasks is None or len(saved) < tasks:
        raise InputError(
            f"{folder} has the checkpoints of {len(saved)} of {tasks or 'its'} tasks; rescoring needs all of them: run "
            "it again with --keep-checkpoints"
        )


def _variant(cls: type[Learner], settings: Mapping[str, Any]) -> str:
    """``more-coefficient-false``, however false was written."""
    values = cls.Config.parse(dict(settings)).model_dump(mode="json")
    parts = [cls.name, *(f"{key}-{values[key]}" for key in sorted(settings))]
    return re.sub(r"[^\w.-]+", "_", "-".join(parts)).lower()
