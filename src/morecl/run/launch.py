"""Starting and resuming a run."""

from __future__ import annotations

from pathlib import Path

from morecl import checkpoint
from morecl.data import TaskStream, build_stream
from morecl.errors import InputError
from morecl.files import write_json
from morecl.interrupts import sigterm_as_interrupt
from morecl.locking import claimed
from morecl.methods import Learner, create
from morecl.records import Record
from morecl.run.folder import PROGRESS, RESULT, RUN, checkpoints, clear, refuse_taken, remove_leftovers
from morecl.run.loop import learn_stream, task_groups
from morecl.run.measurements import Measurements
from morecl.run.out_of_memory import is_out_of_memory, out_of_memory_explained
from morecl.run.request import ResolvedRun, RunRequest, read_request
from morecl.run.watcher import Watcher


def start(request: RunRequest, out: Path, *, overwrite: bool = False, watcher: Watcher | None = None) -> Record:
    """Run ``request`` and leave everything in the folder ``out``.

    Ctrl-C and SIGTERM raise ``KeyboardInterrupt``; :func:`resume` then continues from the last finished task.

    Args:
        overwrite: replace a run that is already in ``out``.

    Raises:
        InputError: the request cannot be carried out, or not with the memory there is. Nothing is written, unless
            memory ran out after the first task: finished tasks stay, and :func:`resume` continues.
        DivergedError: training diverged.
    """
    request = request.model_copy(update={"directory": request.directory or str(Path.cwd())})
    run = request.resolve()
    config = run.config  # checked before anything is written
    refuse_taken(out, overwrite)
    sizes = config.model_dump() | {"folder_size": run.recipe.folder_size}
    with sigterm_as_interrupt(), out_of_memory_explained(sizes, out):
        learner = create(request.method, **run.settings)
        stream = build_task_stream(run, learner)
        request = request.model_copy(update={"plan": run.plan})
        with claimed(out):
            refuse_taken(out, overwrite)  # another process may have been faster
            clear(out)
            write_json(out / RUN, request.model_dump(mode="json"))
            try:
                return learn_stream(request, learner, stream, out, Measurements(), watcher or Watcher())
            except Exception as error:
                if is_out_of_memory(error) and not checkpoints(out):
                    clear(out)  # resuming would fail again
                raise


def resume(out: Path, watcher: Watcher | None = None) -> Record:
    """Continue the run in ``out`` from its last checkpoint, or from the beginning if it has none.

    Raises:
        InputError: ``out`` holds no unfinished run, or its recipe or data changed since the run began.
    """
    request = read_request(out)  # before `claimed` makes the folder
    with sigterm_as_interrupt(), out_of_memory_explained(request.settings, out), claimed(out):
        return _resume(out, watcher or Watcher())


def _resume(out: Path, watcher: Watcher) -> Record:
    request = read_request(out)  # again: another process may have replaced the run
    if (out / RESULT).is_file():
        raise InputError(f"the run in {out} is finished: see {out / RESULT}")
    run = request.resolve()
    saved = checkpoints(out)
    measured = Measurements.read(saved[-1] / PROGRESS) if saved else Measurements()
    learner = checkpoint.load(saved[-1]) if saved else create(request.method, **run.settings)
    stream = build_task_stream(run, learner)
    refuse_changed(run, learner, stream, measured, out)
    remove_leftovers(out)
    return learn_stream(request, learner, stream, out, measured, watcher)


def refuse_changed(run: ResolvedRun, learner: Learner, stream: TaskStream, measured: Measurements, out: Path) -> None:
    """Raise :class:`InputError` if the run would continue with something other than it began with."""
    request = run.request
    same = {"recipe": run.plan == run.current_plan}
    if measured.steps:
        same["method"] = request.method == learner.name
        same["seed"] = request.seed == learner.config.seed
        same["tasks"] = measured.groups == task_groups(stream)
        same["data"] = measured.fingerprint == stream.dataset.fingerprint
    if changed := [name for name, unchanged in same.items() if not unchanged]:
        raise InputError(
            f"the run in {out} cannot continue: {request.benchmark} is not what it began with, "
            f"{', '.join(changed)} changed. Undo the change, or start over with `morecl run ... --overwrite`"
        )


def build_task_stream(run: ResolvedRun, learner: Learner) -> TaskStream:
    """The tasks. Images of a user's folder are stored at the recipe's size or else at the backbone's input size."""
    request = run.request
    return build_stream(
        run.recipe,
        data_root=run.data_root,
        class_order=request.class_order,
        seed=request.seed,
        tasks=request.tasks,
        train_per_class=request.train_per_class,
        test_per_class=request.test_per_class,
        folder_size=run.recipe.folder_size or learner.backbone.input.resize,
        validation=request.validation,
        progress=True,
    )
