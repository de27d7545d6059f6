"""One run: a method on a benchmark, from the first task to ``result.json``, resumable after every task.

A run's folder:

- ``run.json``: what was asked for and from which directory, written first;
- ``.lock``: there while a process is at work;
- ``checkpoint-K/``: the learner after K tasks (a saved learner) and ``progress.json``, what was measured so far.
  Written beside and renamed; the one before it is deleted afterwards. A run that is killed goes on from the newest;
- ``result.json``: the record, written last. ``model/`` is the learner at the end.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from pydantic import BaseModel, ConfigDict, ValidationError

import morecl
from morecl import checkpoint, metrics
from morecl.catalogue import SHIPPED
from morecl.data import Recipe, TaskStream, build_stream, load_recipe
from morecl.data.datasets import FOLDER
from morecl.errors import InputError, unknown_name
from morecl.evaluator import Evaluator, Step
from morecl.files import SEAL, atomic_folder, sealed, write_json
from morecl.locking import LOCK, claimed
from morecl.methods import METHODS, Learner, create, method_class
from morecl.nn.backbone import located
from morecl.progress import Listener, silent
from morecl.records import BackboneInfo, DataInfo, Metrics, Record, Roc, write_record

RUN, RESULT, PROGRESS = "run.json", "result.json", "progress.json"
_LEFTOVER = re.compile(r"\.(run\.json|result\.json|checkpoint-\d+|model)\..*(tmp|old)")


class RunRequest(BaseModel):
    """What was asked for; ``resume`` needs nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    benchmark: str
    settings: dict[str, Any] = {}  # what the user set; the rest comes from the recipe and the method's defaults
    class_order: str = "0"
    seed: int = 0
    data_root: str | None = None
    tasks: int | None = None
    train_per_class: int | None = None
    test_per_class: int | None = None
    validation: float | None = None
    directory: str = ""  # where the paths above begin, if they are relative; the current one if not said
    plan: dict[str, Any] = {}  # what the recipe and the above made of it when the run began, see `planned`

    def planned(self, recipe: Recipe) -> dict[str, Any]:
        """Which data in how many tasks: as the run began, or as ``recipe`` has it now if it has not."""
        keys = ("tasks", "train_per_class", "test_per_class")
        now = {key: getattr(recipe, key) if getattr(self, key) is None else getattr(self, key) for key in keys}
        return self.plan or {"dataset": recipe.dataset, "folder_size": recipe.folder_size, **now}

    def located(self) -> RunRequest:
        """The same with paths that hold in any directory."""
        base, benchmark, settings = Path.cwd() / self.directory, self.benchmark, dict(self.settings)
        if benchmark.startswith(FOLDER) and benchmark != FOLDER:
            benchmark = f"{FOLDER}{base / Path(benchmark.removeprefix(FOLDER)).expanduser()}"
        elif benchmark.endswith(".toml"):
            benchmark = str(base / Path(benchmark).expanduser())
        if isinstance(settings.get("backbone"), str):
            settings["backbone"] = located(settings["backbone"], base)
        root = None if self.data_root is None else str(base / Path(self.data_root).expanduser())
        return self.model_copy(update={"benchmark": benchmark, "settings": settings, "data_root": root})


@dataclass(frozen=True)
class Watcher:
    """Who wants to know how a run goes on; every call is optional."""

    started: Callable[[Learner, TaskStream, int], None] = lambda learner, stream, done: None
    epoch: Listener = silent
    task: Callable[[int, Step, float], None] = lambda index, step, seconds: None


def start(request: RunRequest, out: Path, *, overwrite: bool = False, watcher: Watcher | None = None) -> Record:
    """Run ``request`` and leave everything in ``out``; a folder with a run in it is refused unless ``overwrite``."""
    request = request.model_copy(update={"directory": request.directory or str(Path.cwd())})
    recipe = load_recipe(request.located().benchmark)
    settings = effective_settings(request.located(), recipe)
    method_class(request.method).Config.parse(settings)  # complain before anything is written
    _refuse_taken(out, overwrite)
    learner = create(request.method, **settings)
    stream = _stream(request.located(), recipe, learner)
    request = request.model_copy(update={"plan": request.located().planned(recipe)})
    with claimed(out):
        _refuse_taken(out, overwrite)  # by someone who was faster
        _clear(out)
        write_json(out / RUN, request.model_dump(mode="json"))
        return _go_on(request, learner, stream, out, _Progress(), watcher or Watcher())


def resume(out: Path, watcher: Watcher | None = None) -> Record:
    """Go on with the run in ``out`` from its last checkpoint; one that was killed before its first starts anew."""
    read_request(out)  # complains where there is none; to claim a folder makes it
    with claimed(out):
        return _resume(out, watcher or Watcher())


def _resume(out: Path, watcher: Watcher) -> Record:
    request = read_request(out)
    if (out / RESULT).is_file():
        raise InputError(f"the run in {out} is finished: see {out / RESULT}")
    recipe = load_recipe(request.located().benchmark)
    newest = _newest_checkpoint(out)
    if newest is None:
        learner, progress = create(request.method, **effective_settings(request.located(), recipe)), _Progress()
    else:
        learner, progress = checkpoint.load(newest), _Progress.read(newest / PROGRESS)
    stream = _stream(request.located(), recipe, learner)
    afresh = request.model_copy(update={"plan": {}})
    same = {"recipe": request.located().planned(recipe) == afresh.located().planned(recipe)}
    if newest:
        same["method"], same["seed"] = request.method == learner.name, request.seed == learner.config.seed
        same["tasks"] = progress.groups == _groups(stream)
        same["data"] = progress.fingerprint == stream.dataset.fingerprint
    if changed := [name for name, unchanged in same.items() if not unchanged]:
        raise InputError(
            f"{request.benchmark} is not what the run in {out} began with: other {', '.join(changed)}. Put back what "
            "was changed, or start anew with `morecl run ... --overwrite`"
        )
    _remove_leftovers(out)
    return _go_on(request, learner, stream, out, progress, watcher)


def _refuse_taken(out: Path, overwrite: bool) -> None:
    """A folder with something else in it is never used, one with a run only to ``overwrite`` it."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; a run needs a folder")
    if not out.exists() or all(path.name == LOCK or _LEFTOVER.fullmatch(path.name) for path in out.iterdir()):
        return
    if not (out / RUN).is_file():
        raise InputError(f"{out} is not empty and holds no run; choose another folder")
    if not overwrite and (out / RESULT).is_file():
        raise InputError(f"{out} holds a finished run: --overwrite replaces it")
    if not overwrite:
        raise InputError(f"{out} already holds a run: `morecl resume {out}` goes on with it, --overwrite starts anew")


def read_request(out: Path) -> RunRequest:
    """The request in ``out/run.json``."""
    try:
        return RunRequest.model_validate_json((out / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{out} holds no run (no {RUN})") from error
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise InputError(f"{out / RUN} cannot be read: {error}") from error


def effective_settings(request: RunRequest, recipe: Recipe) -> dict[str, Any]:
    """The recipe's settings that the method knows, overridden by what the user set.

    A recipe's image size is meant for the shipped backbone; any other is used at its own unless the user says so.
    """
    config, wanted = method_class(request.method).Config, request.settings
    _check_names(recipe)
    if foreign := [key for key in wanted if key not in config.model_fields and key in _all_settings()]:
        raise InputError(f"method {request.method!r} has no setting {', '.join(foreign)}; leave it out")
    of_recipe = {key: value for key, value in recipe.settings_for(request.method).items() if key in config.model_fields}
    if wanted.get("backbone", SHIPPED) != SHIPPED:
        of_recipe.pop("image_size", None)
    config.refuse_idle(request.method, wanted, of_recipe)
    return config.choose(of_recipe | wanted) | wanted | {"seed": request.seed}


def _check_names(recipe: Recipe) -> None:
    """A recipe's settings are those of some method; what stands under a method's name, of that one."""
    for name, table in {"": recipe.settings, **recipe.methods}.items():
        known = set(method_class(name).Config.model_fields) if name else _all_settings()
        for key in table:
            if key not in known:
                place = f"methods.{name}" if name else "settings"
                raise unknown_name(f"setting in [{place}] of benchmark {recipe.name}", key, known)


def _all_settings() -> set[str]:
    return {key for method in METHODS.values() for key in method.Config.model_fields}


@dataclass
class _Progress:
    """What was measured in the tasks so far; goes into each checkpoint."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    capacity: list[float] = dataclasses.field(default_factory=list)
    evaluate_seconds: float = 0.0
    total_seconds: float = 0.0
    peak_memory_bytes: int = 0
    fingerprint: str = ""
    groups: list[list[int]] = dataclasses.field(default_factory=list)  # the classes of every task

    def write(self, path: Path) -> None:
        value = dataclasses.asdict(self)
        value["steps"] = [dataclasses.asdict(s) | {"roc": s.roc.model_dump() if s.roc else None} for s in self.steps]
        write_json(path, sealed(value))

    @staticmethod
    def read(path: Path) -> _Progress:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value != sealed(value):
                raise ValueError("it is not as it was saved (its sha256 differs)")
            del value[SEAL]
            for step in value["steps"]:
                step["roc"] = Roc.model_validate(step["roc"]) if step["roc"] else None
                step["errors"] = tuple(step["errors"]) if step["errors"] else None
            value["steps"] = [Step(**step) for step in value["steps"]]
            return _Progress(**value)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error}") from error


def _go_on(
    request: RunRequest, learner: Learner, stream: TaskStream, out: Path, progress: _Progress, watcher: Watcher
) -> Record:
    done = len(progress.steps)
    progress.fingerprint, progress.groups = stream.dataset.fingerprint, _groups(stream)
    names = np.array(stream.dataset.classes, dtype=object)
    watcher.started(learner, stream, done)
    clock = time.perf_counter()
    if learner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(learner.device)  # of what ran in this process before
    evaluator = Evaluator(learner, stream)
    for task in (stream[k] for k in range(done, len(stream))):
        learner.learn_task(task.x_train, names[task.y_train].tolist(), watcher.epoch)
        started = time.perf_counter()
        step = evaluator.after_task(task.index)
        now = time.perf_counter()
        progress.steps.append(step)
        capacity = learner.capacity()
        if capacity is not None:
            progress.capacity.append(capacity)
        progress.evaluate_seconds += now - started
        progress.total_seconds += now - clock
        if learner.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(learner.device)
            progress.peak_memory_bytes = max(progress.peak_memory_bytes, peak)
        watcher.task(task.index, step, progress.total_seconds)
        _write_checkpoint(out, task.index + 1, learner, progress)
        clock = time.perf_counter()
    record = _record(request, learner, stream, progress)
    learner.save(out / "model")
    write_record(out / RESULT, record)
    for path in _checkpoints(out):
        shutil.rmtree(path)
    return record


def _groups(stream: TaskStream) -> list[list[int]]:
    return [list(group) for group in stream.groups]


def _stream(request: RunRequest, recipe: Recipe, learner: Learner) -> TaskStream:
    """Images of a folder are held at the size that the backbone's transform begins with, unless the recipe says one."""
    return build_stream(
        recipe,
        data_root=Path(request.data_root) if request.data_root else None,
        class_order=request.class_order,
        seed=request.seed,
        tasks=request.tasks,
        train_per_class=request.train_per_class,
        test_per_class=request.test_per_class,
        folder_size=recipe.folder_size or learner.backbone.input.resize,
        validation=request.validation,
        progress=True,
    )


def _record(request: RunRequest, learner: Learner, stream: TaskStream, progress: _Progress) -> Record:
    steps = progress.steps
    matrix = metrics.accuracy_matrix([step.accuracy for step in steps])
    til_matrix = metrics.accuracy_matrix([step.til for step in steps])
    detection = steps[:-1]
    last_detection = detection[-1] if detection else None
    auc_per_step = [step.auc for step in detection if step.auc is not None]
    errors = steps[-1].errors
    entries = learner.entries()
    seconds = {**learner.seconds, "evaluate": progress.evaluate_seconds, "total": progress.total_seconds}
    return Record(
        method=request.method,
        benchmark=request.benchmark,
        seed=request.seed,
        class_order=list(stream.class_order),
        class_order_name=request.class_order,
        task_sizes=[len(group) for group in stream.groups],
        # a record travels: it names the weights' file, not where it lay (their sha256 says which they are)
        config=learner.config.record(),
        backbone=BackboneInfo(name=learner.backbone.architecture or "local", sha256=learner.backbone.sha256),
        data=DataInfo(
            name=stream.dataset.name,
            fingerprint=stream.dataset.fingerprint,
            train_images=len(stream.dataset.y_train),
            test_images=len(stream.dataset.y_test),
            scored_on=stream.scored_on,
            classes=list(stream.dataset.classes),
        ),
        versions={
            "morecl": morecl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "timm": timm.__version__,
            "numpy": np.__version__,
        },
        device=_device_name(learner.device),
        metrics=Metrics(
            aca=steps[-1].aca,
            aia=metrics.aia([step.aca for step in steps]),
            reduction_rate=metrics.reduction_rate(matrix),
            bwt=metrics.bwt(matrix),
            auc=last_detection.auc if last_detection else None,
            iauc=metrics.iauc(auc_per_step) if auc_per_step else None,
            fpr95=last_detection.fpr95 if last_detection else None,
            aupr=last_detection.aupr if last_detection else None,
            til_accuracy=metrics.til_accuracy(til_matrix),
            errors_to_earlier=errors[0] if errors else None,
            errors_to_later=errors[1] if errors else None,
        ),
        accuracy_matrix=matrix,
        til_matrix=til_matrix,
        aca_per_step=[step.aca for step in steps],
        auc_per_step=auc_per_step,
        fpr95_per_step=[step.fpr95 for step in detection if step.fpr95 is not None],
        aupr_per_step=[step.aupr for step in detection if step.aupr is not None],
        roc=last_detection.roc if last_detection else None,
        seconds=seconds,
        entries={**entries, "total": sum(entries.values()), "buffer": int(learner.memory.images.size)},
        capacity=progress.capacity,
        peak_memory_bytes=progress.peak_memory_bytes or None,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _write_checkpoint(out: Path, tasks: int, learner: Learner, progress: _Progress) -> None:
    older = _checkpoints(out)
    with atomic_folder(out / f"checkpoint-{tasks}") as folder:
        checkpoint.write(learner, folder, include_backbone=False)
        progress.write(folder / PROGRESS)
    for path in older:
        shutil.rmtree(path)


def _checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in out.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def _newest_checkpoint(out: Path) -> Path | None:
    found = _checkpoints(out)
    return found[-1] if found else None


def _clear(out: Path) -> None:
    """Remove what an earlier run left in its folder, and nothing else."""
    _remove_leftovers(out)
    for path in out.iterdir():
        if path.is_dir() and re.fullmatch(r"checkpoint-\d+|model", path.name):
            shutil.rmtree(path)
        elif path.name in (RUN, RESULT):
            path.unlink()


def _remove_leftovers(out: Path) -> None:
    """What a kill left half-written."""
    for path in [path for path in out.iterdir() if _LEFTOVER.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
