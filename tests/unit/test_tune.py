"""The search for rate and epochs: the best trial, no repeated runs, no use of the test images."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import morecl.tune
from morecl.errors import DivergedError, InputError
from morecl.records import read_record
from morecl.run import RunRequest, Watcher, launch
from morecl.suite.plan import PlannedRun
from morecl.suite.run import Outcome, finished_record
from morecl.tune import FILE, Search, Trial, at_edges, best_of, rate_beyond, show, tune

SMALL = {"image_size": 8, "bottleneck": 4, "batch_size": 8, "device": "cpu", "precision": "fp32"}


class NoWatch:
    def __call__(self, title: str) -> NoWatch:
        return self

    def __enter__(self) -> Watcher:
        return Watcher()

    def __exit__(self, *_: object) -> None:
        return None


def write_data(root: Path, *, test_seed: int) -> Path:
    """Ten kinds of stripes to learn from; the test split is noise with random labels, other for every seed."""
    root.mkdir()
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 8)
    images = rng.integers(0, 60, (80, 28, 28), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 6] += 180
    poison = np.random.default_rng(test_seed)
    x_test = poison.integers(0, 255, (50, 28, 28), dtype=np.uint8)
    y_test = poison.permutation(np.repeat(np.arange(10), 5))
    names = list("0123456789")
    np.savez(root / "mnist.npz", x_train=images, y_train=labels, x_test=x_test, y_test=y_test, classes=names)
    return root


def request(root: Path, **changes: Any) -> RunRequest:
    values = {
        "method": "finetune",
        "benchmark": "mnist-5t",
        "settings": SMALL,
        "validation": 0.25,
        "tasks": 2,
        **changes,
    }
    return RunRequest(data_root=str(root), **values)


def search(root: Path, out: Path, lrs: tuple[float, ...] = (0.001, 0.05), seeds: tuple[int, ...] = (0,)) -> Search:
    return tune(request(root), lrs=lrs, epochs=[1], seeds=seeds, out=out, watch=NoWatch())


def facts(found: Search) -> list[tuple[float, int, float | None, float | None]]:
    return [(t.lr, t.epochs, t.aca, t.aia) for t in found.trials]


def test_the_test_images_play_no_part(tmp_path: Path) -> None:
    roots = [write_data(tmp_path / f"data{seed}", test_seed=seed) for seed in (1, 2)]
    first, second = (search(root, tmp_path / f"out{k}") for k, root in enumerate(roots))
    assert facts(first) == facts(second)
    for lr in (0.001, 0.05):
        place = Path(f"lr-{lr}-epochs-1/order-0-seed-0/result.json")
        a, b = (read_record(tmp_path / f"out{k}" / place) for k in (0, 1))
        assert a.accuracy_matrix == b.accuracy_matrix and a.metrics == b.metrics and a.data == b.data
        assert a.data.scored_on == "validation"
        assert (a.data.train_images, a.data.test_images) == (60, 20)
    # the same learner scored on the test splits: there the two differ
    scored = [
        launch.start(request(root, validation=None, method="ncm", settings={"image_size": 8}), tmp_path / f"test{k}")
        for k, root in enumerate(roots)
    ]
    assert scored[0].accuracy_matrix != scored[1].accuracy_matrix


def test_all_trials_are_recorded_and_none_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, out = write_data(tmp_path / "data", test_seed=1), tmp_path / "out"
    started: list[tuple[float, int]] = []
    start = launch.start

    def stopped_at_the_third(asked: RunRequest, folder: Path, **options: Any) -> Any:
        started.append((asked.settings["lr"], asked.seed))
        if len(started) == 3:
            raise KeyboardInterrupt
        return start(asked, folder, **options)

    monkeypatch.setattr(launch, "start", stopped_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        search(root, out, seeds=(0, 1))
    left = json.loads((out / "tune.json").read_text())
    assert not left["complete"] and len(left["trials"]) == 1

    found = search(root, out, seeds=(0, 1))
    assert started == [(0.001, 0), (0.001, 1), (0.05, 0), (0.05, 0), (0.05, 1)]
    assert found.complete and found.seeds == [0, 1]
    records = [read_record(out / "lr-0.05-epochs-1" / f"order-0-seed-{k}" / "result.json") for k in (0, 1)]
    assert found.trials[1].aca == sum(record.metrics.aca for record in records) / 2
    assert found.trials[1].aia == sum(record.metrics.aia for record in records) / 2
    assert found.best == best_of(found.trials)
    assert Search.model_validate_json((out / "tune.json").read_text()) == found

    monkeypatch.delattr(launch, "start")
    assert facts(search(root, out, seeds=(0, 1))) == facts(found)
    with pytest.raises(InputError, match=r"validation = 0\.25, not 0\.5"):
        tune(request(root, validation=0.5), lrs=[0.05], epochs=[1], seeds=[0], out=out, watch=NoWatch())


def test_runs_that_share_a_card_have_no_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data(tmp_path / "data", test_seed=1)
    [alone] = search(data, tmp_path / "alone", lrs=(0.001,)).trials
    monkeypatch.setenv("MORECL_SHARED", "1")
    found = search(data, tmp_path / "shared", lrs=(0.001,))
    assert alone.seconds is not None and found.trials[0].seconds is None
    console = Console(file=io.StringIO(), width=100)
    show(found, console)
    assert console.file.getvalue().splitlines()[3].split()[-1] == "-"


def test_a_diverging_rate_loses_and_the_search_continues(tmp_path: Path) -> None:
    root = write_data(tmp_path / "data", test_seed=1)
    found = search(root, tmp_path / "out", lrs=(1e30, 0.001))
    assert found.trials[0].aca is None and found.trials[0].note
    assert found.trials[0].seconds is None  # no record says how long it took
    assert found.best == found.trials[1] and found.best.lr == 0.001
    assert found.complete


def test_a_trial_that_diverged_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, out = write_data(tmp_path / "data", test_seed=1), tmp_path / "out"
    first = search(root, out, lrs=(1e30, 0.001))
    tried: list[str] = []

    def noted(folder: Path, watcher: Watcher | None = None) -> None:
        tried.append(folder.parent.name)
        raise DivergedError("again")

    monkeypatch.setattr(launch, "resume", noted)
    monkeypatch.setattr(launch, "start", lambda request, folder, **_: noted(folder))
    assert search(root, out, lrs=(1e30, 0.001)) == first and not tried
    assert not search(root, out, lrs=(1e30,)).trials[0].aca and not tried  # another grid, the same trial
    assert tune(
        request(root), lrs=[1e30], epochs=[1], seeds=[0], out=out, watch=NoWatch(), elsewhere=at_once
    ).trials == [first.trials[0]]
    search(root, out, lrs=(1e30,), seeds=(0, 1))
    assert tried == ["lr-1e+30-epochs-1"]
    shutil.rmtree(out / "lr-1e+30-epochs-1")
    assert search(root, out, lrs=(1e30,), seeds=(0, 1)).trials[0].note == "again"
    assert len(tried) == 2


def at_once(runs: Sequence[PlannedRun], done: Callable[[Outcome], None]) -> list[Outcome]:
    """Carries out all runs, the last first, as a cluster might, and fails as `morecl run` does."""
    outcomes = []
    for run in reversed(runs):
        record = finished_record(run.request, run.folder)
        try:
            outcome = Outcome.of(run, record or launch.start(run.request, run.folder))
        except DivergedError as error:
            outcome = Outcome.of(run, f"stopped: {error} (see its log)")
        done(outcome)
        outcomes.append(outcome)
    return outcomes[::-1]


def test_a_search_elsewhere_finds_what_it_finds_here(tmp_path: Path) -> None:
    root = write_data(tmp_path / "data", test_seed=1)
    values: dict[str, Any] = {"lrs": (1e30, 0.05), "epochs": [1], "seeds": (0, 1), "watch": NoWatch()}
    seen: list[tuple[bool, list[float]]] = []

    def elsewhere(runs: Sequence[PlannedRun], done: Callable[[Outcome], None]) -> list[Outcome]:
        def look(outcome: Outcome) -> None:
            done(outcome)
            if (tmp_path / "there" / FILE).exists():
                found = Search.model_validate_json((tmp_path / "there" / FILE).read_text())
                seen.append((found.complete, [trial.lr for trial in found.trials]))

        return at_once(runs, look)

    here = tune(request(root), out=tmp_path / "here", **values)
    there = tune(request(root), out=tmp_path / "there", elsewhere=elsewhere, **values)
    assert facts(there) == facts(here) and there.complete
    assert there.trials[0].note.startswith(here.trials[0].note) and here.best and there.best
    assert there.best.lr == here.best.lr
    assert seen == [(False, [0.05]), (False, [0.05]), (True, [1e30, 0.05])]


def test_a_run_that_fails_elsewhere_is_no_trial(tmp_path: Path) -> None:
    root = write_data(tmp_path / "data", test_seed=1)

    def elsewhere(runs: Sequence[PlannedRun], done: Callable[[Outcome], None]) -> list[Outcome]:
        failed = Outcome.of(runs[0], "no room on the disk")
        done(failed)
        return [failed, *at_once(runs[1:], done)]

    with pytest.raises(InputError, match=r"1 of 2 runs failed; .* lr 0\.001 epochs 1 seed 0: no room on the disk"):
        tune(
            request(root),
            lrs=[0.001, 0.05],
            epochs=[1],
            seeds=[0],
            out=tmp_path / "out",
            watch=NoWatch(),
            elsewhere=elsewhere,
        )
    left = Search.model_validate_json((tmp_path / "out" / FILE).read_text())
    assert not left.complete and [trial.lr for trial in left.trials] == [0.05]


@pytest.mark.parametrize(
    ("scores", "next_rate"),
    [
        ({0.002: 50.0, 0.005: 60.0, 0.0125: 55.0}, None),
        ({0.002: 60.0, 0.005: 50.0, 0.0125: 40.0}, 0.0008),
        ({0.002: 40.0, 0.005: 50.0, 0.0125: 60.0}, 0.031),
        ({0.002: 40.0, 0.005: 50.0, 0.0125: None}, None),  # a larger one would diverge, too
        ({0.002: 50.0, 0.005: 40.0, 0.0125: None}, 0.0008),
        ({0.002: None, 0.005: None}, 0.0008),
        ({0.05: 50.0}, 0.02),
        ({0.1: 50.0, 0.1001: 40.0}, 0.1 * (0.1 / 0.1001)),  # rounded, it would be the same
    ],
)
def test_the_rate_after_one_at_an_end(scores: dict[float, float | None], next_rate: float | None) -> None:
    trials = [Trial(lr=lr, epochs=5, aca=aca, aia=aca, seconds=1.0) for lr, aca in scores.items()]
    assert rate_beyond(trials) == next_rate


@pytest.mark.parametrize(
    ("beyond", "peak", "tried"),
    [
        (0, 0.0002, [0.002, 0.005]),
        (5, 0.0003, [0.002, 0.005, 0.0008, 0.00032, 0.00013]),
        (1, 0.0002, [0.002, 0.005, 0.0008]),
        (5, 0.02, [0.002, 0.005, 0.013, 0.034]),
        (5, 1.0, [0.002, 0.005, 0.013, 0.034, 0.089, 0.23]),  # which diverges
    ],
)
@pytest.mark.parametrize("here", [True, False])
def test_a_search_goes_on_beyond_its_grid_until_the_best_is_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool, beyond: int, peak: float, tried: list[float]
) -> None:
    started: list[float] = []
    out = tmp_path / "out"

    def trial(pair: tuple[float, int], *_: Any) -> Trial:
        assert not started or not json.loads((out / FILE).read_text())["complete"]
        started.append(pair[0])
        score = None if pair[0] > 0.1 else -abs(np.log(pair[0] / peak))
        return Trial(lr=pair[0], epochs=pair[1], aca=score, aia=score, seconds=None)

    def elsewhere(runs: Sequence[PlannedRun], done: Callable[[Outcome], None]) -> list[Outcome]:
        outcomes = [Outcome.of(run, "stopped: it diverged") for run in runs]
        for outcome in outcomes:
            done(outcome)
        return outcomes

    monkeypatch.setattr(morecl.tune, "_trial", trial)
    monkeypatch.setattr(morecl.tune, "_ended_trial", trial)
    place = {} if here else {"elsewhere": elsewhere}
    asked = request(write_data(tmp_path / "data", test_seed=1))
    found = tune(asked, lrs=[0.002, 0.005], epochs=[1], seeds=[0], out=out, watch=NoWatch(), beyond=beyond, **place)
    assert started == [trial.lr for trial in found.trials] == tried
    assert found.complete and Search.model_validate_json((out / FILE).read_text()) == found


def test_best_is_by_last_accuracy_then_average_then_fewest_epochs() -> None:
    def trial(lr: float, epochs: int, aca: float | None, aia: float | None) -> Trial:
        return Trial(lr=lr, epochs=epochs, aca=aca, aia=aia, seconds=1.0)

    diverged = trial(1.0, 1, None, None)
    assert best_of([diverged]) is None
    assert best_of([diverged, trial(0.1, 5, 60.0, 99.0), trial(0.2, 5, 61.0, 50.0)]) == trial(0.2, 5, 61.0, 50.0)
    assert best_of([trial(0.1, 5, 60.0, 70.0), trial(0.2, 5, 60.0, 71.0)]) == trial(0.2, 5, 60.0, 71.0)
    assert best_of([trial(0.1, 9, 60.0, 70.0), trial(0.2, 5, 60.0, 70.0)]) == trial(0.2, 5, 60.0, 70.0)
    assert best_of([trial(0.1, 5, 60.0, 70.0), trial(0.2, 5, 60.0, 70.0)]) == trial(0.1, 5, 60.0, 70.0)


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (
            {(0.1, 5): 60.0, (0.2, 5): 50.0},
            ["0.1 is the smallest rate tried: a smaller one may be better (see --beyond)"],
        ),
        (
            {(0.1, 5): 50.0, (0.2, 5): 60.0},
            ["0.2 is the largest rate tried: a larger one may be better (see --beyond)"],
        ),
        ({(0.1, 5): 50.0, (0.2, 5): 60.0, (0.5, 5): 40.0}, []),
        (
            {(0.1, 5): 50.0, (0.2, 5): 60.0, (0.5, 5): None},
            ["0.2 is the largest rate that did not diverge: a run with another class order may"],
        ),
        ({(0.1, 5): 60.0}, []),
        ({(0.1, 5): 50.0, (0.1, 10): 60.0}, ["10 is the largest number of epochs tried: more may be better"]),
        ({(0.1, 5): 60.0, (0.1, 10): 50.0}, []),
    ],
)
def test_a_best_at_the_edge_of_the_grid_is_said(grid: dict[tuple[float, int], float | None], said: list[str]) -> None:
    trials = [Trial(lr=lr, epochs=n, aca=aca, aia=aca, seconds=1.0) for (lr, n), aca in grid.items()]
    best = best_of(trials)
    assert best is not None and at_edges(trials, best) == said
    console = Console(file=io.StringIO(), width=100)
    asked = RunRequest(method="more", benchmark="digits-5t")
    show(Search(request=asked, seeds=[0], complete=True, trials=trials, best=best), console)
    lines = console.file.getvalue().splitlines()
    assert lines[lines.index(f"best: --set lr={best.lr} --set epochs={best.epochs}") + 1 :] == said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": None}, "held-out"),
        ({"method": "ncm", "settings": {}}, "'ncm' trains nothing on a frozen backbone"),
        ({"settings": {"lr": 0.1}}, "give its values as --lr"),
        ({"settings": {"epoch": 1}}, "unknown setting 'epoch'"),
        ({"benchmark": "mnist"}, "did you mean 'mnist-5t'"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    asked = request(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        tune(asked, lrs=[0.1], epochs=[1], seeds=[0], out=tmp_path / "out", watch=NoWatch())
    assert not (tmp_path / "out").exists()
