"""The heart of a run: learn a task, evaluate, write a checkpoint, until all tasks are done."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import torch

from morecl import checkpoint, parallel
from morecl.data import TaskStream
from morecl.evaluator import Evaluator
from morecl.files import atomic_folder
from morecl.methods import Learner
from morecl.records import Record, write_record
from morecl.run.folder import MODEL, PROGRESS, RESULT, checkpoint_folder, checkpoints, remove_checkpoints
from morecl.run.measurements import Measurements
from morecl.run.record import build_record
from morecl.run.request import RunRequest
from morecl.run.watcher import Watcher


def learn_stream(
    request: RunRequest, learner: Learner, stream: TaskStream, out: Path, measured: Measurements, watcher: Watcher
) -> Record:
    """Learn the tasks of ``stream`` that are not in ``measured`` yet; leave the model and the record in ``out``.

    In a group (:mod:`morecl.parallel`) all ranks do this; the main one writes.

    Args:
        learner: has learned the first ``len(measured.steps)`` tasks.
        measured: extended in place, task by task.
    """
    done, group = len(measured.steps), learner.group
    if group is not None:
        measured.ranks = max(measured.ranks, group.size)
    measured.note_sharing()
    measured.note_source()
    measured.fingerprint = stream.dataset.fingerprint
    measured.groups = task_groups(stream)
    watcher.started(learner, stream, done)
    clock = time.perf_counter()
    if learner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(learner.device)  # forget what ran in this process before
    evaluator = Evaluator(learner, stream)
    names = np.array(stream.dataset.classes, dtype=object)
    for task in (stream[k] for k in range(done, len(stream))):
        learner.learn_task(task.x_train, names[task.y_train].tolist(), watcher.epoch)
        if group is not None:
            group.require_same(learner.state(), f"after task {task.index + 1}")
        learned = time.perf_counter()
        step = evaluator.after_task(task.index)
        evaluated = time.perf_counter()
        measured.steps.append(step)
        capacity = learner.capacity()
        if capacity is not None:
            measured.capacity.append(capacity)
        measured.evaluate_seconds += evaluated - learned
        measured.total_seconds += evaluated - clock
        if learner.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(learner.device)
            measured.peak_memory_bytes = max(measured.peak_memory_bytes, peak)
        watcher.task(task.index, step, measured.total_seconds)
        if parallel.is_main(group):
            _write_checkpoint(out, learner, measured, keep=request.keep_checkpoints)
        clock = time.perf_counter()
    record = build_record(request, learner, stream, measured)
    if not parallel.is_main(group):
        return record
    learner.save(out / MODEL)
    write_record(out / RESULT, record)
    if not request.keep_checkpoints:
        remove_checkpoints(out)
    return record


def task_groups(stream: TaskStream) -> list[list[int]]:
    """The classes of every task, as JSON holds them."""
    return [list(group) for group in stream.groups]


def _write_checkpoint(out: Path, learner: Learner, measured: Measurements, *, keep: bool) -> None:
    older = checkpoints(out)
    with atomic_folder(checkpoint_folder(out, len(measured.steps))) as folder:
        checkpoint.write(learner, folder, include_backbone=False)
        measured.write(folder / PROGRESS)
    if not keep:
        for path in older:
            shutil.rmtree(path)
