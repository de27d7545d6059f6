"""``morecl suite`` and ``morecl tune``: many runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from morecl.cli import cluster, options
from morecl.cli.terminal import FAILED, exit_interrupted, output_console
from morecl.errors import InputError
from morecl.on_ray.cluster import ClusterOptions

if TYPE_CHECKING:  # these import torch
    from morecl.suite.plan import PlannedRun
    from morecl.suite.run import Outcome, Place


def suite(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="See `morecl list suites`; or your own .toml file.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs in parallel, each in its own process.")] = 1,
    out: Annotated[
        Path, typer.Option(callback=options.expanded, help="Folder for all runs; suites in the same folder share runs.")
    ] = Path("runs"),
    seeds: Annotated[str | None, typer.Option(metavar="0,1,...", help="Replace the suite's seeds.")] = None,
    backbone: options.Backbone = None,
    set_: options.SetForAll = None,
    data_root: options.DataRoot = None,
    device: options.Device = None,
    on: cluster.On = None,
    address: cluster.Address = None,
    gpus_per_run: cluster.GpusPerRun = None,
    cpus_per_run: cluster.CpusPerRun = None,
) -> None:
    """Run methods x benchmarks x seeds; skip what is finished."""
    settings = options.settings_from(set_, backbone=backbone, device=device)
    ray = cluster.cluster_options(on, address, gpus_per_run, cpus_per_run, settings.get("device"))
    if ray and jobs > 1:
        raise InputError("--jobs is for this machine; on Ray, --cpus-per-run and --gpus-per-run say how many fit")
    from morecl.suite import run as runs
    from morecl.suite.here import Here
    from morecl.suite.plan import kept_settings, load_suite, number_list, plan

    chosen = number_list("--seeds", seeds, int) if seeds is not None else None
    loaded = load_suite(name)
    planned = plan(loaded, out, settings=settings, seeds=chosen, data_root=data_root)
    console = output_console()
    for line in kept_settings(loaded, settings):
        console.print(line, style="dim", markup=False, emoji=False, highlight=False, soft_wrap=True)
    try:
        with _on_ray(ray, console) if ray else nullcontext(Here(jobs)) as place:
            outcomes = runs.run_suite(planned, console, place)
    except KeyboardInterrupt:
        exit_interrupted("the same command continues with the unfinished runs")
    runs.show(outcomes, console)
    if any(outcome.status == "failed" for outcome in outcomes):
        raise SystemExit(FAILED)
    command = f"morecl report {escape(shlex.quote(str(out)))} --format html --out report.html"
    console.print(f"all tables and figures: {command}", soft_wrap=True)


def tune(
    benchmark: options.Benchmark,
    lr: Annotated[str, typer.Option(metavar="0.001,...", help="Learning rates to try.")],
    epochs: Annotated[str, typer.Option(metavar="5,10,...", help="Numbers of epochs to try.")],
    out: Annotated[Path, typer.Option(callback=options.expanded, help="Folder for the trials and tune.json.")],
    method: options.Method = "more",
    validation: Annotated[float, typer.Option(help="Share of the training images to hold out.")] = 0.1,
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="A trial's score is the mean over these seeds.")] = "0",
    beyond: Annotated[
        int, typer.Option(min=0, help="Try up to this many further rates while the best is the smallest or largest.")
    ] = 0,
    class_order: options.ClassOrder = "0",
    train_per_class: options.TrainPerClass = None,
    backbone: options.Backbone = None,
    set_: options.Set = None,
    data_root: options.DataRoot = None,
    device: options.Device = None,
    on: cluster.On = None,
    address: cluster.Address = None,
    gpus_per_run: cluster.GpusPerRun = None,
    cpus_per_run: cluster.CpusPerRun = None,
) -> None:
    """Search learning rate and epochs on held-out training images, never on the test set."""
    settings = options.settings_from(set_, backbone=backbone, device=device)
    ray = cluster.cluster_options(on, address, gpus_per_run, cpus_per_run, settings.get("device"))
    from morecl import tune as search
    from morecl.cli.display import watching
    from morecl.run import RunRequest
    from morecl.suite.plan import number_list
    from morecl.suite.run import run_suite

    request = RunRequest(
        method=method,
        benchmark=benchmark,
        settings=settings,
        class_order=class_order,
        data_root=str(data_root) if data_root else None,
        train_per_class=train_per_class,
        validation=validation,
    )
    console = output_console()

    def elsewhere(runs: Sequence[PlannedRun], done: Callable[[Outcome], None]) -> list[Outcome]:
        assert ray is not None
        with _on_ray(ray, console) as place:
            return run_suite(runs, console, place, done=done)

    try:
        found = search.tune(
            request,
            lrs=number_list("--lr", lr, float),
            epochs=number_list("--epochs", epochs, int),
            seeds=number_list("--seeds", seeds, int),
            out=out,
            watch=lambda title: watching(console, title),
            elsewhere=elsewhere if ray else None,
            beyond=beyond,
        )
    except KeyboardInterrupt:
        exit_interrupted("the same command continues with the unfinished trials")
    search.show(found, console)
    console.print(f"record: {escape(str(out / search.FILE))}", soft_wrap=True)
    if found.best is None:
        raise SystemExit(FAILED)


@contextmanager
def _on_ray(options: ClusterOptions, console: Console) -> Iterator[Place]:
    from morecl.on_ray.cluster import connected
    from morecl.on_ray.runs import OnRay

    with connected(options) as ray:
        yield OnRay(ray, console)
