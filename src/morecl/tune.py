"""Searching the learning rate and the number of epochs on held-out training images, never on the test set.

Every pair is one run per seed, scored on ``validation`` of each class's training images, which it does not train on
(see ``morecl.data.build_stream``). Runs go to OUT/lr-R-epochs-E/order-K-seed-S, the result to OUT/tune.json, written
anew after every pair. A search that was stopped goes on: finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from morecl import runner
from morecl.data import load_recipe
from morecl.errors import DivergedError, InputError
from morecl.files import write_json
from morecl.methods import method_class
from morecl.records import Record
from morecl.runner import RUN, RunRequest, Watcher, effective_settings
from morecl.suite.run import finished_record

TUNED = ("lr", "epochs")
FILE = "tune.json"

Watch = Callable[[str], AbstractContextManager[Watcher]]


class Trial(BaseModel):
    """One pair of rate and epochs: means over the seeds, percent; ``None`` where a run diverged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float
    epochs: int
    aca: float | None
    aia: float | None
    seconds: float = Field(description="of all its runs")
    note: str = ""


class Search(BaseModel):
    """All that was tried. ``best`` has the highest ACA; of equal ones the highest AIA, then the fewest epochs."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["morecl.tune/1"] = Field(default="morecl.tune/1", alias="schema")
    request: RunRequest
    seeds: list[int]
    complete: bool = Field(description="whether every pair asked for has been tried")
    trials: list[Trial]
    best: Trial | None


def tune(
    request: RunRequest,
    *,
    lrs: Sequence[float],
    epochs: Sequence[int],
    seeds: Sequence[int],
    out: Path,
    watch: Watch,
) -> Search:
    """Try every pair of ``lrs`` and ``epochs`` with every seed; ``request`` is what they share.

    ``request.validation`` is the share held out and must be given. ``watch(title)`` gives each run its watcher.
    """
    if request.validation is None:
        raise InputError("tuning needs held-out training images: give a validation share such as 0.1")
    if not (lrs and epochs and seeds):
        raise InputError("tuning needs at least one rate, one number of epochs and one seed")
    if "seed" in request.settings:
        raise InputError("give the seed as --seeds")
    for name in TUNED:
        if name in request.settings:
            raise InputError(f"{name} is what is searched: give its values as --{name}, not with --set")
    pairs = [(lr, count) for lr in lrs for count in epochs]
    recipe = load_recipe(request.benchmark)
    asked = {pair: [_request(request, *pair, seed) for seed in seeds] for pair in pairs}
    for run in (run for runs in asked.values() for run in runs):  # complain before anything is written
        method_class(run.method).Config.parse(effective_settings(run.located(), recipe))
        finished_record(run, _folder(out, run))
    trials: list[Trial] = []
    for pair, runs in asked.items():
        trials.append(_trial(pair, runs, out, watch))
        search = Search(
            request=request,
            seeds=list(seeds),
            complete=len(trials) == len(pairs),
            trials=trials,
            best=best_of(trials),
        )
        write_json(out / FILE, search.model_dump(mode="json", by_alias=True))
    return search


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial that :class:`Search` calls best; ``None`` if all diverged."""
    scored = [(t.aca, t.aia, -t.epochs, t) for t in trials if t.aca is not None and t.aia is not None]
    return max(scored, key=lambda entry: entry[:3])[-1] if scored else None


def show(search: Search, console: Console) -> None:
    """All trials, best in green, and how to use it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("lr", "epochs", "ACA %", "AIA %", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for trial in search.trials:
        scores = ["-" if value is None else f"{value:.2f}" for value in (trial.aca, trial.aia)]
        style = "green" if trial == search.best else None
        cells = [str(trial.lr), str(trial.epochs), *scores, f"{trial.seconds:.0f}", escape(trial.note)]
        table.add_row(*cells, style=style)
    console.print(table)
    console.print("[dim]ACA and AIA on held-out training images, mean over the seeds; the test set was not used.[/dim]")
    if search.best:
        console.print(f"best: --set lr={search.best.lr} --set epochs={search.best.epochs}", highlight=False)
    else:
        console.print("every trial diverged; try smaller rates")


def _request(request: RunRequest, lr: float, epochs: int, seed: int) -> RunRequest:
    settings = {**request.settings, "lr": lr, "epochs": epochs}
    return request.model_copy(update={"settings": settings, "seed": seed})


def _folder(out: Path, request: RunRequest) -> Path:
    lr, epochs = (request.settings[name] for name in TUNED)
    return out / f"lr-{lr}-epochs-{epochs}" / f"order-{request.class_order}-seed-{request.seed}"


def _trial(pair: tuple[float, int], runs: Sequence[RunRequest], out: Path, watch: Watch) -> Trial:
    records: list[Record] = []
    lr, epochs = pair
    for request in runs:
        folder = _folder(out, request)
        record = finished_record(request, folder)
        if record is None:
            try:
                with watch(f"lr {lr} epochs {epochs} seed {request.seed}") as watcher:
                    begun = (folder / RUN).is_file()
                    record = runner.resume(folder, watcher) if begun else runner.start(request, folder, watcher=watcher)
            except DivergedError as error:
                return Trial(lr=lr, epochs=epochs, aca=None, aia=None, seconds=_seconds(records), note=str(error))
        records.append(record)
    count = len(records)
    return Trial(
        lr=lr,
        epochs=epochs,
        aca=sum(record.metrics.aca for record in records) / count,
        aia=sum(record.metrics.aia for record in records) / count,
        seconds=_seconds(records),
    )


def _seconds(records: Sequence[Record]) -> float:
    return sum(record.seconds["total"] for record in records)
