"""The command line: parses and calls; no logic of its own."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from morecl import __version__
from morecl.errors import DivergedError, InputError

if TYPE_CHECKING:  # torch takes seconds to import: only what a command needs is loaded
    from morecl.records import Record
    from morecl.runner import Watcher

app = typer.Typer(
    help="Teach an image classifier new classes, task after task, and have it say 'unknown'.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

BAD_INPUT, INTERRUPTED = 2, 130
PLAIN_WIDTH = 120  # columns where there is no terminal


class Listing(StrEnum):
    methods = "methods"
    benchmarks = "benchmarks"
    suites = "suites"
    backbones = "backbones"


class ReportFormat(StrEnum):
    text = "text"
    md = "md"
    latex = "latex"
    html = "html"


def main() -> None:
    """Entry point: what the user did wrong is one message and exit code 2."""
    warnings.showwarning = _show_warning
    _prepare_output()
    error_console = Console(stderr=True, soft_wrap=True)
    try:
        app()
    except (InputError, OSError) as error:
        error_console.print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(BAD_INPUT)
    except DivergedError as error:
        error_console.print(f"[red]stopped:[/red] {escape(str(error))}")
        sys.exit(1)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[yellow]warning:[/yellow] {escape(str(message))}")


def _prepare_output() -> None:
    """A closed stdout or stderr swallows what is written; a sign that the terminal's encoding lacks is no error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"morecl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None: ...


Out = Annotated[Path | None, typer.Option(help="Folder for the run (runs/BENCHMARK/METHOD/order-K-seed-S).")]


@app.command()
def run(
    benchmark: Annotated[
        str, typer.Argument(help="Name, path of a recipe (.toml), or folder:PATH with one sub-folder per class.")
    ] = "digits-5t",
    method: Annotated[str, typer.Option(help="See `morecl list methods`.")] = "more",
    backbone: Annotated[str | None, typer.Option(help="timm name, checkpoint file, or NAME@FILE.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Out = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the method; repeatable.")
    ] = None,
    class_order: Annotated[str, typer.Option(help="0..4 or random.")] = "0",
    memory_size: Annotated[int | None, typer.Option(min=0, help="Images in the replay memory.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Cut the classes into this many tasks.")] = None,
    train_per_class: Annotated[int | None, typer.Option(min=1, help="First N training images of each class.")] = None,
    test_per_class: Annotated[int | None, typer.Option(min=1, help="First N test images of each class.")] = None,
    validation: Annotated[
        float | None, typer.Option(help="Score on this share of the training images instead of the test set.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; else $MORECL_DATA.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
    compile_: Annotated[str | None, typer.Option("--compile", help="auto, on or off.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already there.")] = False,
) -> None:
    """Run a method on a benchmark and write result.json."""
    from morecl.config import parse_assignments
    from morecl.runner import RunRequest, start

    settings = parse_assignments(set_ or [])
    named = {"backbone": backbone, "memory_size": memory_size, "device": device}
    settings |= _given(named | {"precision": precision, "compile": compile_})
    if "seed" in settings:
        raise InputError("give the seed as --seed")
    request = RunRequest(
        method=method,
        benchmark=benchmark,
        settings=settings,
        class_order=class_order,
        seed=seed,
        data_root=str(data_root) if data_root else None,
        tasks=tasks,
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        validation=validation,
    )
    name = benchmark.replace("/", "_").replace(":", "_")
    folder = out or Path("runs") / name / method / f"order-{class_order}-seed-{seed}"
    _watch(
        f"{benchmark} {method}", folder, lambda watcher: start(request, folder, overwrite=overwrite, watcher=watcher)
    )


@app.command()
def resume(folder: Annotated[Path, typer.Argument(help="Folder of a run that was stopped.")]) -> None:
    """Go on with a run from its last checkpoint."""
    from morecl import runner

    request = runner.read_request(folder)
    title = f"{request.benchmark} {request.method}"
    _watch(title, folder, lambda watcher: runner.resume(folder, watcher))


@app.command()
def suite(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="See `morecl list suites`; or a file of your own.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, each in its own process.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for all runs; suites with the same one share runs.")] = Path("runs"),
    seeds: Annotated[str | None, typer.Option(metavar="0,1,...", help="Instead of the suite's own.")] = None,
    backbone: Annotated[str | None, typer.Option(help="timm name, checkpoint file, or NAME@FILE.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="For every method that has the setting; repeatable."),
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; else $MORECL_DATA.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...")] = None,
) -> None:
    """Run methods x benchmarks x seeds; what is finished is skipped."""
    from morecl.config import parse_assignments
    from morecl.suite.plan import load_suite, number_list, plan
    from morecl.suite.run import run_suite, show

    settings = parse_assignments(set_ or [])
    settings |= _given({"backbone": backbone, "device": device})
    chosen = number_list("--seeds", seeds, int) if seeds is not None else None
    planned = plan(load_suite(name), out, settings=settings, seeds=chosen, data_root=data_root)
    console = _console()
    try:
        outcomes = run_suite(planned, console, jobs=jobs)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; the same command goes on with what is not finished")
        raise SystemExit(INTERRUPTED) from None
    show(outcomes, console)
    if any(outcome.status == "failed" for outcome in outcomes):
        raise SystemExit(1)
    command = f"morecl report {escape(str(out))} --format html --out report.html"
    console.print(f"all tables and figures: {command}", soft_wrap=True)


@app.command()
def tune(
    benchmark: Annotated[str, typer.Argument(help="Name, path of a recipe (.toml), or folder:PATH.")],
    lr: Annotated[str, typer.Option(metavar="0.001,...", help="Learning rates to try.")],
    epochs: Annotated[str, typer.Option(metavar="5,10,...", help="Numbers of epochs to try.")],
    out: Annotated[Path, typer.Option(help="Folder for the trials and tune.json.")],
    method: Annotated[str, typer.Option(help="See `morecl list methods`.")] = "more",
    validation: Annotated[float, typer.Option(help="Share of the training images that is held out.")] = 0.1,
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="A pair's score is the mean over them.")] = "0",
    class_order: Annotated[str, typer.Option(help="0..4 or random.")] = "0",
    train_per_class: Annotated[int | None, typer.Option(min=1, help="First N training images of each class.")] = None,
    backbone: Annotated[str | None, typer.Option(help="timm name, checkpoint file, or NAME@FILE.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; repeatable.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; else $MORECL_DATA.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...")] = None,
) -> None:
    """Search learning rate and epochs on held-out training images, never on the test set."""
    from morecl import tune as search
    from morecl.config import parse_assignments
    from morecl.display import watching
    from morecl.runner import RunRequest
    from morecl.suite.plan import number_list

    settings = parse_assignments(set_ or [])
    settings |= _given({"backbone": backbone, "device": device})
    request = RunRequest(
        method=method,
        benchmark=benchmark,
        settings=settings,
        class_order=class_order,
        data_root=str(data_root) if data_root else None,
        train_per_class=train_per_class,
        validation=validation,
    )
    console = _console()
    try:
        found = search.tune(
            request,
            lrs=number_list("--lr", lr, float),
            epochs=number_list("--epochs", epochs, int),
            seeds=number_list("--seeds", seeds, int),
            out=out,
            watch=lambda title: watching(console, title),
        )
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; the same command goes on with the trials that are not finished")
        raise SystemExit(INTERRUPTED) from None
    search.show(found, console)
    console.print(f"record: {escape(str(out / search.FILE))}", soft_wrap=True)
    if found.best is None:
        raise SystemExit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="result.json files, or folders that hold some.")],
    format_: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.text,
    out: Annotated[Path | None, typer.Option(help="Write here instead of to the terminal.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write the figures, as SVG and PNG, to this folder.")
    ] = None,
) -> None:
    """Tables and figures from the records of finished runs."""
    from morecl.display import summary
    from morecl.files import check_target, write_text
    from morecl.report.collect import collect
    from morecl.report.formats import DOCUMENTS
    from morecl.report.render import write_figures

    if format_ is ReportFormat.text and out:
        raise InputError("--out goes with --format md, latex or html")
    if out:
        check_target(out, f"report.{format_.value}")
    records = collect(runs)
    if figures:
        write_figures(records, figures)
    if format_ is ReportFormat.text:
        summary(records, _console())
    elif out:
        write_text(out, DOCUMENTS[format_.value](records))
        print(out)
    else:  # UTF-8 whatever the terminal's encoding is, as in a file
        sys.stdout.flush()
        sys.stdout.buffer.write(DOCUMENTS[format_.value](records).encode())
        sys.stdout.buffer.flush()


@app.command()
def bench(
    methods: Annotated[
        str | None,
        typer.Option(metavar="all|NAME,...", help="Measure instead what a pass and a further task cost with these."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure instead where the time of a training step goes.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two minutes on two CPU cores.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this JSON file.")] = None,
    backbone: Annotated[str | None, typer.Option(help="timm name, checkpoint file, or NAME@FILE.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Input size in pixels; else the backbone's own.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="For every method that has the setting; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
    compile_: Annotated[str | None, typer.Option("--compile", help="auto, on or off.")] = None,
) -> None:
    """Measure speed here: of MORE against the number of tasks or, with --methods, of learning with each method."""
    from morecl.bench import cost, speed
    from morecl.bench import profile as step
    from morecl.config import parse_assignments
    from morecl.files import check_target, write_json

    if profile and methods is not None:
        raise InputError("--profile is of MORE alone; leave out --methods")
    if out:
        check_target(out, "bench.json")
    settings = parse_assignments(set_ or [])
    named = {"backbone": backbone, "image_size": image_size, "device": device}
    settings |= _given(named | {"precision": precision, "compile": compile_})
    console = _console()
    result: speed.Bench | cost.Costs | step.StepProfile
    with console.status("starting") as status:

        def report(what: str) -> None:
            status.update(what)

        if profile:
            result = step.measure(settings, step.QUICK if quick else step.Size(), report)
        elif methods is not None:
            result = cost.measure(cost.method_names(methods), settings, cost.QUICK if quick else cost.Size(), report)
        else:
            result = speed.bench(settings, speed.QUICK if quick else speed.Size(), report)
    result.show(console)
    if out:
        write_json(out, result.as_dict())


@app.command("list")
def list_(what: Annotated[Listing, typer.Argument()]) -> None:
    """Show the methods, benchmarks, suites or backbones there are."""
    from morecl.listing import listing

    table = Table(box=None, pad_edge=False, show_header=False)
    for row in listing(what.value):
        table.add_row(*map(Text, row))
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _watch(title: str, folder: Path, work: Callable[[Watcher], Record]) -> None:
    """Run ``work(watcher)`` under a live display; on ctrl-C say how to go on."""
    from morecl.display import summary, watching

    console = _console()
    try:
        with watching(console, title) as watcher:
            record = work(watcher)
    except KeyboardInterrupt:
        hint = "nothing was written"
        if (folder / "run.json").is_file():
            hint = f"`morecl resume {escape(str(folder))}` goes on from the last finished task"
        Console(stderr=True, soft_wrap=True).print(f"stopped; {hint}")
        raise SystemExit(INTERRUPTED) from None
    summary([record], console)
    console.print(f"record: {escape(str(folder / 'result.json'))}", soft_wrap=True)
