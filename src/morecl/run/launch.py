"""Starting and resuming a run."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

import morecl
from morecl import checkpoint, parallel, ranks
from morecl.config import LearnerConfig
from morecl.data import TaskStream, build_stream
from morecl.errors import DamagedError, InputError, RanksError
from morecl.files import write_json
from morecl.interrupts import sigterm_as_interrupt
from morecl.locking import claimed
from morecl.methods import Learner, method_class
from morecl.nn.device import is_out_of_memory
from morecl.parallel import Group
from morecl.records import Record
from morecl.run.folder import (
    PROGRESS,
    RESULT,
    RUN,
    checkpoints,
    clear,
    refuse_taken,
    remove_checkpoints,
    remove_leftovers,
)
from morecl.run.inputs import images_key, noted
from morecl.run.loop import learn_stream, task_groups
from morecl.run.measurements import Measurements
from morecl.run.out_of_memory import out_of_memory_explained
from morecl.run.request import ResolvedRun, RunRequest, read_request
from morecl.run.watcher import Watcher


def start(request: RunRequest, out: Path, *, overwrite: bool = False, watcher: Watcher | None = None) -> Record:
    """Run ``request`` and leave everything in the folder ``out``.

    Ctrl-C and SIGTERM raise ``KeyboardInterrupt``; :func:`resume` then continues from the last finished task.
    Processes that torchrun started work on the run together; all return the record, and the main one writes.

    Args:
        overwrite: replace a run that is already in ``out``.

    Raises:
        InputError: the request cannot be carried out, or not with the memory there is. Nothing is written, unless
            memory ran out after the first task: finished tasks stay, and :func:`resume` continues.
        DivergedError: training diverged.
        RanksError: another process of this run is gone. :func:`resume` continues from the last finished task.
    """
    request = request.model_copy(update={"directory": request.directory or str(Path.cwd())})
    run = request.resolve()
    run.check()  # before the folder: a bad request is the first thing to correct
    run.check_folder(out)
    if ranks.is_main():
        refuse_taken(out, overwrite)
    sizes = run.config.model_dump() | {"folder_size": run.recipe.folder_size}
    with _together(out) as group, sigterm_as_interrupt(), out_of_memory_explained(sizes, out):
        learner = _new_learner(run)
        learner.join(group)
        key = images_key(run) if parallel.is_main(group) else ""  # before they are read: they may change now
        stream = build_task_stream(run, learner)
        run.config.refuse_classes(len(stream.dataset.classes))
        request = request.model_copy(update={"plan": run.plan | noted(key, stream.dataset.side)})
        with _claimed(out, group):
            if parallel.is_main(group):
                refuse_taken(out, overwrite)  # another process may have been faster
                clear(out)
                write_json(out / RUN, request.model_dump(mode="json"))
            try:
                return _learn(request, learner, stream, out, Measurements(), watcher)
            except Exception as error:
                if is_out_of_memory(error) and parallel.is_main(group) and not checkpoints(out):
                    clear(out)  # resuming would fail again
                raise


def resume(out: Path, watcher: Watcher | None = None) -> Record:
    """Continue the run in ``out`` from its last checkpoint, or from the beginning if it has none.

    Raises:
        InputError: ``out`` holds no unfinished run, or its recipe or data changed since the run began.
    """
    request = read_request(out)  # before `claimed` makes the folder
    explained = out_of_memory_explained(request.settings, out)
    with _together(out) as group, sigterm_as_interrupt(), explained, _claimed(out, group):
        return _resume(out, watcher, group)


def _resume(out: Path, watcher: Watcher | None, group: Group | None) -> Record:
    request = read_request(out)  # again: another process may have replaced the run
    if (out / RESULT).is_file():
        if parallel.is_main(group):  # it may have been killed before it had tidied up
            remove_leftovers(out)
            if not request.keep_checkpoints:
                remove_checkpoints(out)
        raise InputError(f"the run in {out} is finished: see {out / RESULT}")
    run = request.resolve()
    saved = checkpoints(out)
    with _damage_explained(saved, out):
        measured = Measurements.read(saved[-1] / PROGRESS) if saved else Measurements()
        learner = checkpoint.load(saved[-1]) if saved else _new_learner(run)
    learner.join(group)
    stream = build_task_stream(run, learner)
    refuse_changed(run, learner, stream, measured, out)
    if parallel.is_main(group):
        remove_leftovers(out)
    return _learn(request, learner, stream, out, measured, watcher)


def _new_learner(run: ResolvedRun) -> Learner:
    return method_class(run.request.method)(run.config)


@contextmanager
def _damage_explained(saved: Sequence[Path], out: Path) -> Iterator[None]:
    """Say how to go on if the last of the ``saved`` checkpoints cannot be read."""
    try:
        yield
    except DamagedError as error:
        before = "the checkpoint before it" if len(saved) > 1 else "the first task"
        raise InputError(
            f"{error}. Delete {saved[-1]}, and `morecl resume {shlex.quote(str(out))}` goes on from {before}"
        ) from error


@contextmanager
def _together(out: Path) -> Iterator[Group | None]:
    """The group that works on the run in ``out``; if it breaks, the message says how to continue."""
    try:
        with parallel.joined() as group, _last_words() if group else nullcontext():
            yield group
    except RanksError as error:
        if not (out / RUN).is_file():
            raise
        again = ranks.command(f"resume {shlex.quote(str(out))}")
        raise RanksError(f"{error}. `{again}` continues after the last finished task") from error


@contextmanager
def _last_words() -> Iterator[None]:
    """After a :class:`RanksError` SIGTERM is ignored: torchrun sends it as soon as a rank is gone, and the message of
    those that are left must still be shown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    except RanksError:
        raise
    except BaseException:
        signal.signal(signal.SIGTERM, before)
        raise
    signal.signal(signal.SIGTERM, before)


@contextmanager
def _claimed(out: Path, group: Group | None) -> Iterator[None]:
    """The main rank claims the folder for all; the others wait until it has."""
    if group is None:
        with claimed(out):
            yield
        return
    if not group.main:
        group.barrier()
        yield
        return
    with claimed(out):
        group.barrier()
        yield


def _learn(
    request: RunRequest,
    learner: Learner,
    stream: TaskStream,
    out: Path,
    measured: Measurements,
    watcher: Watcher | None,
) -> Record:
    """:func:`learn_stream`, once all ranks have been found to do the same; only the main one is watched."""
    if learner.group is not None:
        learner.group.agree(
            {
                "versions": f"morecl {morecl.__version__}, torch {torch.__version__}",
                "method": f"{request.method}, seed {request.seed}",
                "backbone": learner.backbone.sha256,
                "data": stream.dataset.fingerprint,
                "finished tasks": len(measured.steps),
            }
        )
    shown = watcher if parallel.is_main(learner.group) else None
    return learn_stream(request, learner, stream, out, measured, shown or Watcher())


def refuse_changed(run: ResolvedRun, learner: Learner, stream: TaskStream, measured: Measurements, out: Path) -> None:
    """Raise :class:`InputError` if the run would continue with something other than it began with."""
    request = run.request
    same = {"recipe": not run.recipe_changed()}
    if measured.steps:
        same["settings"] = _trained_as(run, learner)
        same["method"] = request.method == learner.name
        same["seed"] = request.seed == learner.config.seed
        same["tasks"] = measured.groups == task_groups(stream)
        same["data"] = measured.fingerprint == stream.dataset.fingerprint
    if changed := [name for name, unchanged in same.items() if not unchanged]:
        raise InputError(
            f"the run in {out} cannot continue: {request.benchmark} is not what it began with, "
            f"{', '.join(changed)} changed. Undo the change, or start over with `morecl run ... --overwrite`"
        )


def _trained_as(run: ResolvedRun, learner: Learner) -> bool:
    """Whether ``learner`` has the settings of ``run``. Seed, machine and place of the weights are not compared."""
    free = set(LearnerConfig.with_role("machine", "weights", "repetition"))
    return learner.config.model_dump(exclude=free) == run.config.model_dump(exclude=free)


def build_task_stream(run: ResolvedRun, learner: Learner) -> TaskStream:
    """The tasks. Images of a user's folder are stored at the recipe's size or else at the backbone's input size."""
    options = run.stream_options(run.recipe.folder_size or learner.backbone.input.resize)
    with learner.group.first_on_each_machine() if learner.group else nullcontext():
        return build_stream(run.recipe, **options, progress=parallel.is_main(learner.group))
