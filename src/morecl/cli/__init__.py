"""The command line: parses the arguments and calls the library.

To add a command, write a function with typer annotations in a file of this package (shared options are in
``options.py``) and register it below. Import what loads torch inside the function: ``morecl --help``, ``report`` and
``list`` must start within a second (``tests/cli/test_start_up.py``).
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape

from morecl import __version__, ranks
from morecl.cli import bench, cache, listing, report, run, serve, suite
from morecl.cli.grouped import GroupedCommands
from morecl.cli.own import evaluate, learn, model, predict
from morecl.cli.terminal import BAD_INPUT, ESCAPED, FAILED, error_console, printable
from morecl.errors import DivergedError, InputError, RanksError

app = typer.Typer(
    cls=GroupedCommands,
    help="Teach an image classifier new classes, task after task, and have it say 'unknown'.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_own_images = partial(app.command, rich_help_panel="Your own images")
_own_images()(learn.learn)
_own_images()(predict.predict)
_own_images()(evaluate.evaluate)
_own_images()(model.info)
_own_images()(model.history)
_own_images()(model.undo)
_own_images()(model.rename)
_own_images()(model.forget)
_own_images()(model.export)
_own_images()(serve.serve)

_experiments = partial(app.command, rich_help_panel="Experiments")
_experiments()(run.run)
_experiments()(run.resume)
_experiments()(run.rescore)
_experiments()(suite.suite)
_experiments()(suite.tune)
_experiments()(report.report)
_experiments()(bench.bench)
_experiments("list")(listing.list_)
app.add_typer(cache.app, name="cache", rich_help_panel="Experiments")


def main() -> None:
    """Entry point. Bad input ends with one message and exit code 2."""
    warnings.showwarning = _show_warning
    warnings.filterwarnings(
        "ignore", "Image size .* could be decompression bomb"
    )  # Pillow, of a large photo that it reads
    _prepare_output()
    try:
        app()
    except (InputError, OSError) as error:
        error_console().print(f"{ranks.before_error()}[red]error:[/red] {_shown(_text(error))}", emoji=False)
        sys.exit(BAD_INPUT)
    except DivergedError as error:
        error_console().print(f"{ranks.before_error()}[red]stopped:[/red] {_shown(str(error))}", emoji=False)
        sys.exit(FAILED)
    except RanksError as error:
        if ranks.tells_of_loss():
            error_console().print(f"[red]stopped:[/red] {_shown(str(error))}", emoji=False)
        sys.exit(FAILED)


def _shown(text: str) -> str:
    return escape(printable(text, keep="\n"))


def _text(error: InputError | OSError) -> str:
    """``FILE: No space left on device`` for an error of the system, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    if ranks.is_main():
        error_console().print(f"[yellow]warning:[/yellow] {_shown(str(message))}", emoji=False)


def _prepare_output() -> None:
    """Discard output to a closed stdout or stderr, and escape characters that the terminal's encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"morecl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if ranks.count() > 1 and context.invoked_subcommand not in ranks.COMMANDS:
        raise InputError(
            f"`morecl {context.invoked_subcommand}` runs in one process, and torchrun started {ranks.count()}: "
            "start it without torchrun"
        )
