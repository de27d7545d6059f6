"""Searches the learning rate and the number of epochs on held-out training images, never on the test set.

Each pair is one run per seed, scored on a share (``validation``) of each class's training images that is not trained on
(see ``morecl.data.build_stream``). Runs go to OUT/lr-R-epochs-E/order-K-seed-S, the result to OUT/tune.json, which is
updated after every pair. An interrupted search continues where it stopped: finished runs are not repeated, nor is a
pair that diverged, unless its folder was deleted.

A best rate at an end of the grid says little, so the search can go on beyond it (``beyond``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from morecl.errors import DivergedError, InputError
from morecl.files import write_json
from morecl.interrupts import sigterm_as_interrupt
from morecl.records import Record
from morecl.run import RUN, RunRequest, Watcher, launch
from morecl.run.inputs import InputsNow
from morecl.suite.child import DIVERGED
from morecl.suite.plan import PlannedRun
from morecl.suite.run import Outcome, finished_record

TUNED = ("lr", "epochs")
STEP = 2.5  # from one rate to the next where only one was given
FILE = "tune.json"

Watch = Callable[[str], AbstractContextManager[Watcher]]
Elsewhere = Callable[[Sequence[PlannedRun], Callable[[Outcome], None]], Sequence[Outcome]]  # runs, what to do with each


class Trial(BaseModel):
    """One pair of rate and epochs: means over the seeds in percent, ``None`` if a run diverged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float
    epochs: int
    aca: float | None
    aia: float | None
    seconds: float | None = Field(
        description="of all its runs; null if one diverged, or shared its card or cores with others"
    )
    note: str = ""


class Search(BaseModel):
    """All trials. ``best`` has the highest ACA; ties are broken by the highest AIA, then by the fewest epochs."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["morecl.tune/1"] = Field(default="morecl.tune/1", alias="schema")
    request: RunRequest
    seeds: list[int]
    complete: bool = Field(description="whether all pairs have been tried, those beyond the grid included")
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
    elsewhere: Elsewhere | None = None,
    beyond: int = 0,
) -> Search:
    """Try every pair of ``lrs`` and ``epochs`` with every seed.

    Args:
        request: what the runs have in common. ``request.validation``, the share held out, is required.
        beyond: how many rates may be tried beyond the smallest and the largest, see :func:`rate_beyond`.
        watch: ``watch(title)`` gives the watcher of a run.
        elsewhere: carries out many runs at once, such as :func:`morecl.suite.run.run_suite` on a cluster. Without it
            they are carried out here, one after the other.

    Raises:
        InputError: the request is not valid, or a folder holds a different run; nothing is written. Or a run failed
            elsewhere; finished runs stay.
    """
    if request.validation is None:
        raise InputError("tuning needs held-out training images: give a validation share such as 0.1")
    if not (lrs and epochs and seeds):
        raise InputError("tuning needs at least one rate, one number of epochs and one seed")
    if "seed" in request.settings:
        raise InputError("give the seed as --seeds")
    for name in TUNED:
        if name in request.settings:
            raise InputError(f"{name} is searched: give its values as --{name}, not with --set")
    inputs = InputsNow()
    asked: dict[tuple[float, int], list[RunRequest]] = {}
    done: dict[tuple[float, int], Trial] = {}

    def ask(rates: Sequence[float]) -> None:
        new = {(lr, count): [_request(request, lr, count, seed) for seed in seeds] for lr in rates for count in epochs}
        for run in (run for runs in new.values() for run in runs):
            run.resolve().check()
            run.resolve().check_folder(_folder(out, run))
            finished_record(run, _folder(out, run), inputs)
        asked.update(new)

    def note(trial: Trial) -> None:
        done[trial.lr, trial.epochs] = trial
        write_json(out / FILE, search().model_dump(mode="json", by_alias=True))

    def search() -> Search:
        trials = [done[pair] for pair in asked if pair in done]
        complete = len(trials) == len(asked) and next_rate() is None
        return Search(request=request, seeds=list(seeds), complete=complete, trials=trials, best=best_of(trials))

    def next_rate() -> float | None:
        """Beyond the grid, when all that was asked for is done."""
        tried = len({lr for lr, _ in asked} - set(lrs))
        return rate_beyond([done[pair] for pair in asked]) if tried < beyond else None

    def carry_out() -> None:
        for pair, trial in _diverged_before(request, seeds, out).items():
            if pair in asked and pair not in done:
                note(trial)
        left = {pair: runs for pair, runs in asked.items() if pair not in done}
        if elsewhere and left:
            _try_elsewhere(left, out, elsewhere, note)
        else:
            for pair, runs in left.items():
                note(_trial(pair, runs, out, watch, inputs))

    ask(lrs)
    with nullcontext() if elsewhere else sigterm_as_interrupt():
        carry_out()
        while (rate := next_rate()) is not None:
            ask([rate])
            carry_out()
    return search()


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The best trial as :class:`Search` defines it; ``None`` if all diverged."""
    scored = [(t.aca, t.aia, -t.epochs, t) for t in trials if t.aca is not None and t.aia is not None]
    return max(scored, key=lambda entry: entry[:3])[-1] if scored else None


def rate_beyond(trials: Sequence[Trial]) -> float | None:
    """The rate to try next, if the best is the smallest or the largest tried or all diverged; else ``None``.

    It is as far from the end of the grid as the next rate within, or a factor of :data:`STEP` below the only one.
    """
    best, rates = best_of(trials), sorted({trial.lr for trial in trials})
    if best is None or best.lr == rates[0]:
        new = rates[0] * (rates[0] / rates[1] if len(rates) > 1 else 1 / STEP)
    elif best.lr == rates[-1]:
        new = rates[-1] * rates[-1] / rates[-2]
    else:
        return None
    short = float(f"{new:.2g}")
    return new if short in rates else short


def at_edges(trials: Sequence[Trial], best: Trial) -> list[str]:
    """What the best says of values that were not tried: a line for each edge of the grid at which it is."""
    rates, counts = sorted({t.lr for t in trials}), sorted({t.epochs for t in trials})
    trained = max(t.lr for t in trials if t.aca is not None)
    notes = []
    if len(rates) > 1 and best.lr == rates[0]:
        notes.append(f"{best.lr} is the smallest rate tried: a smaller one may be better (see --beyond)")
    if len(rates) > 1 and best.lr == rates[-1]:
        notes.append(f"{best.lr} is the largest rate tried: a larger one may be better (see --beyond)")
    elif best.lr == trained < rates[-1]:
        notes.append(f"{best.lr} is the largest rate that did not diverge: a run with another class order may")
    if len(counts) > 1 and best.epochs == counts[-1]:
        notes.append(f"{best.epochs} is the largest number of epochs tried: more may be better")
    return notes


def show(search: Search, console: Console) -> None:
    """Print all trials, the best in green, and the command line options for it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("lr", "epochs", "ACA %", "AIA %", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for trial in search.trials:
        scores = ["-" if value is None else f"{value:.2f}" for value in (trial.aca, trial.aia)]
        style = "green" if trial == search.best else None
        seconds = "-" if trial.seconds is None else f"{trial.seconds:.0f}"
        cells = [str(trial.lr), str(trial.epochs), *scores, seconds, escape(trial.note)]
        table.add_row(*cells, style=style)
    console.print(table)
    console.print("[dim]ACA and AIA on held-out training images, mean over the seeds; the test set was not used.[/dim]")
    if search.best:
        console.print(f"best: --set lr={search.best.lr} --set epochs={search.best.epochs}", highlight=False)
        for note in at_edges(search.trials, search.best):
            console.print(note, highlight=False, soft_wrap=True)
    else:
        console.print("every trial diverged; try smaller rates")


def _request(request: RunRequest, lr: float, epochs: int, seed: int) -> RunRequest:
    settings = {**request.settings, "lr": lr, "epochs": epochs}
    return request.model_copy(update={"settings": settings, "seed": seed})


def _folder(out: Path, request: RunRequest) -> Path:
    lr, epochs = (request.settings[name] for name in TUNED)
    return _pair_folder(out, lr, epochs) / f"order-{request.class_order}-seed-{request.seed}"


def _pair_folder(out: Path, lr: float, epochs: int) -> Path:
    return out / f"lr-{lr}-epochs-{epochs}"


def _trial(pair: tuple[float, int], runs: Sequence[RunRequest], out: Path, watch: Watch, inputs: InputsNow) -> Trial:
    records: list[Record] = []
    lr, epochs = pair
    for request in runs:
        folder = _folder(out, request)
        record = finished_record(request, folder, inputs)
        if record is None:
            try:
                with watch(f"lr {lr} epochs {epochs} seed {request.seed}") as watcher:
                    if (folder / RUN).is_file():
                        record = launch.resume(folder, watcher)
                    else:
                        record = launch.start(request, folder, watcher=watcher)
            except DivergedError as error:
                return Trial(lr=lr, epochs=epochs, aca=None, aia=None, seconds=None, note=str(error))
        records.append(record)
    return _scored(pair, records)


def _try_elsewhere(
    asked: Mapping[tuple[float, int], Sequence[RunRequest]],
    out: Path,
    elsewhere: Elsewhere,
    note: Callable[[Trial], None],
) -> None:
    """All runs of all pairs at once; a trial is noted when the last of its runs has ended."""
    planned = {
        _folder(out, run): PlannedRun(run, _folder(out, run), f"lr {lr} epochs {epochs} seed {run.seed}")
        for (lr, epochs), runs in asked.items()
        for run in runs
    }
    ended: dict[Path, Outcome] = {}

    def look(outcome: Outcome) -> None:
        ended[outcome.run.folder] = outcome
        lr, epochs = (outcome.run.request.settings[name] for name in TUNED)
        mine = [ended.get(_folder(out, run)) for run in asked[lr, epochs]]
        if all(mine) and not any(_failed(one) for one in mine if one):
            note(_ended_trial((lr, epochs), [one for one in mine if one]))

    outcomes = elsewhere(list(planned.values()), look)
    if failed := [outcome for outcome in outcomes if _failed(outcome)]:
        raise InputError(
            f"{len(failed)} of {len(outcomes)} runs failed; the same command tries them again. {failed[0].run.title}: "
            f"{failed[0].reason}"
        )


def _failed(outcome: Outcome) -> bool:
    """Whether it says nothing about its pair; that training diverged does."""
    return outcome.status == "failed" and not outcome.reason.startswith(DIVERGED)


def _ended_trial(pair: tuple[float, int], outcomes: Sequence[Outcome]) -> Trial:
    records = [outcome.record for outcome in outcomes if outcome.record]
    if diverged := next((outcome.reason for outcome in outcomes if not outcome.record), None):
        lr, epochs = pair
        reason = diverged.removeprefix(DIVERGED).strip()
        return Trial(lr=lr, epochs=epochs, aca=None, aia=None, seconds=None, note=reason)
    return _scored(pair, records)


def _diverged_before(request: RunRequest, seeds: Sequence[int], out: Path) -> dict[tuple[float, int], Trial]:
    """The trials of the same search in ``out`` that diverged and whose runs are still there."""
    try:
        before = Search.model_validate_json((out / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or of another version: what diverged then is tried again
        return {}
    if (before.request, before.seeds) != (request, list(seeds)):
        return {}
    trials = {(trial.lr, trial.epochs): trial for trial in before.trials if trial.aca is None}
    return {pair: trial for pair, trial in trials.items() if _pair_folder(out, *pair).is_dir()}


def _scored(pair: tuple[float, int], records: Sequence[Record]) -> Trial:
    lr, epochs = pair
    count = len(records)
    return Trial(
        lr=lr,
        epochs=epochs,
        aca=sum(record.metrics.aca for record in records) / count,
        aia=sum(record.metrics.aia for record in records) / count,
        seconds=_seconds(records),
    )


def _seconds(records: Sequence[Record]) -> float | None:
    return sum(r.seconds["total"] for r in records) if all(r.seconds_count for r in records) else None
