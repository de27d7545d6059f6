"""``morecl run`` and ``morecl resume``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from morecl import cuda_start, ranks
from morecl.cli import options
from morecl.cli.terminal import INTERRUPTED, exit_interrupted, output_console
from morecl.errors import InputError

if TYPE_CHECKING:
    from morecl.records import Record
    from morecl.run import Watcher


def run(
    benchmark: options.Benchmark = "digits-5t",
    method: options.Method = "more",
    backbone: options.Backbone = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=options.expanded, help="Folder for the run. Default: runs/BENCHMARK/METHOD/order-K-seed-S."
        ),
    ] = None,
    set_: options.Set = None,
    class_order: options.ClassOrder = "0",
    memory_size: Annotated[int | None, typer.Option(min=0, help="Images in the replay memory.")] = None,
    tasks: options.Tasks = None,
    train_per_class: options.TrainPerClass = None,
    test_per_class: options.TestPerClass = None,
    validation: Annotated[
        float | None, typer.Option(help="Score on this share of the training images instead of the test set.")
    ] = None,
    data_root: options.DataRoot = None,
    device: options.Device = None,
    precision: options.Precision = None,
    compile_: options.Compile = None,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the checkpoint of every task, for `morecl rescore`.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing run.")] = False,
) -> None:
    """Run a method on a benchmark and write result.json."""
    settings = options.settings_from(
        set_, backbone=backbone, memory_size=memory_size, device=device, precision=precision, compile=compile_
    )
    division = None if tasks is None else options.division(tasks)
    if "seed" in settings:
        raise InputError("give the seed as --seed")
    from morecl.data import load_recipe
    from morecl.run import RunRequest, default_folder, preset_notes, rate_notes

    recipe = load_recipe(benchmark)  # reject a typo before torch is imported
    _start_cuda(settings)
    from morecl.run.launch import start

    request = RunRequest(
        method=method,
        benchmark=benchmark,
        settings=settings,
        class_order=class_order,
        seed=seed,
        data_root=str(data_root) if data_root else None,
        tasks=division,
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        validation=validation,
        keep_checkpoints=keep_checkpoints,
    )
    run = request.resolve()
    notes = [*preset_notes(run), *(f"{note} (--set lr=...)" for note in rate_notes([run]))]
    folder = out or default_folder(Path("runs"), recipe.name, method, class_order, seed)
    _display(
        f"{benchmark} {method}",
        folder,
        lambda watcher: start(request, folder, overwrite=overwrite, watcher=watcher),
        notes,
    )


def resume(
    folder: Annotated[Path, typer.Argument(callback=options.expanded, help="Folder of an interrupted run.")],
) -> None:
    """Continue an interrupted run from its last checkpoint."""
    from morecl import run as runs

    request = runs.read_request(folder)
    _start_cuda(request.settings)
    title = f"{request.benchmark} {request.method}"
    _display(title, folder, lambda watcher: runs.resume(folder, watcher))


def rescore(
    folder: Annotated[
        Path, typer.Argument(callback=options.expanded, help="Folder of a run made with --keep-checkpoints.")
    ],
    method: Annotated[
        str | None, typer.Option(help="A method that uses the same networks (see its page). Default: the run's own.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of how answers are made; repeatable."),
    ] = None,
) -> None:
    """Score the networks of a finished run by another rule, without training; leave a record beside the first."""
    from morecl import run as runs
    from morecl.cli.display import watching
    from morecl.cli.summary import print_summary

    settings = options.settings_from(set_)
    console = output_console()
    try:
        with watching(console, f"rescoring by {method or 'its own method'}") as watcher:
            out, record = runs.rescore(folder, method, settings, watcher)
    except KeyboardInterrupt:
        exit_interrupted("nothing was written")
    print_summary([record], console)
    console.print(f"record: {escape(str(out / 'result.json'))}", soft_wrap=True)


def _start_cuda(settings: Mapping[str, Any]) -> None:
    """While torch is imported."""
    if ranks.count() == 1:  # else each has its own card
        cuda_start.begin(settings.get("device", "auto"))


def _display(title: str, folder: Path, work: Callable[[Watcher], Record], notes: Sequence[str] = ()) -> None:
    """Call ``work(watcher)`` under a live display and show its result; on ctrl-C say how to continue.

    ``notes`` are shown as a run begins.
    """
    from morecl.cli.display import watching
    from morecl.cli.summary import print_summary

    console = output_console()
    console.quiet = not ranks.is_main()
    try:
        with watching(console, title, notes=notes) as watcher:
            record = work(watcher)
    except KeyboardInterrupt:
        if not ranks.tells_of_loss():
            raise SystemExit(INTERRUPTED) from None
        started = (folder / "run.json").is_file()
        command = f"`{escape(ranks.command(f'resume {shlex.quote(str(folder))}'))}`"
        exit_interrupted(f"{command} continues after the last finished task" if started else "nothing was written")
    print_summary([record], console)
    console.print(f"record: {escape(str(folder / 'result.json'))}", soft_wrap=True)
