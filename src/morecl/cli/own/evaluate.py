"""``morecl evaluate``: measure a model on images whose classes are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from morecl.cli import options
from morecl.cli.own.common import (
    Accept,
    Model,
    check_accept,
    class_table,
    existing,
    name_unreadable,
    out_of_memory_explained,
    percent,
    promise_lines,
)
from morecl.cli.own.counting import counted_off
from morecl.cli.terminal import FAILED, error_line, exit_interrupted, output_console, printable, say
from morecl.errors import InputError

if TYPE_CHECKING:
    from morecl.classifier import Evaluation

ROWS = 100  # classes that the terminal shows


def evaluate(
    model: Model,
    folder: Annotated[
        Path,
        typer.Argument(
            callback=options.expanded,
            metavar="FOLDER",
            help="Images, one sub-folder per class; classes it was never taught should be unknown.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(callback=options.expanded, help="Also write tables and figures to this HTML file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    accept: Accept = 0.95,
    device: options.Device = None,
) -> None:
    """Measure a model on images with known classes.

    The exit code is 1 if some images could not be read; all others are measured.
    """
    from morecl.data.folder import labelled_files
    from morecl.files import check_target, write_text

    check_accept(accept)
    store = existing(model)
    if out:
        check_target(out, "evaluation.html")
    files, names = labelled_files(folder, "test")
    console = output_console()
    try:
        with out_of_memory_explained("use --device cpu, or close other programs"):
            from morecl.classifier import evaluation
            from morecl.classifier.names import look_alikes

            classifier = store.load(device=device)
            answers = counted_off(classifier.answers(files, top=1, accept=accept, compare=True), lambda: len(files))
            found = evaluation.evaluate(answers, names, classifier.classes, classifier.promise(accept))
    except KeyboardInterrupt:
        exit_interrupted("nothing was written")
    for name, known in look_alikes(dict.fromkeys(names), classifier.classes):
        if name not in classifier.classes and known in classifier.classes:
            error_line(
                f"{name!r} counts as never taught; if it is {known!r}, which the model knows, rename the folder."
            )
    name_unreadable(found.unreadable)
    if not found.classes:
        raise InputError(f"no image in {folder} could be read")
    if as_json:
        print(json.dumps(found.as_dict(), indent=2, allow_nan=False))
    else:
        show_evaluation(console, found)
    if out:
        from morecl.classifier.page import html

        write_text(out, html(found, model.resolve().name, folder.resolve().name))
        if not as_json:
            console.print(f"page: {printable(str(out))}", markup=False, highlight=False, soft_wrap=True)
    if found.unreadable:
        raise SystemExit(FAILED)


def show_evaluation(console: Console, found: Evaluation) -> None:
    """The classes, then what holds for all of them."""
    table = class_table("class", "images", "right", "called unknown")
    taught = [each for each in found.classes if each.known]
    foreign = [each for each in found.classes if not each.known]
    for each in [*taught, *foreign][:ROWS]:
        right = percent(each.accuracy) if each.known else Text("never taught", style="yellow")
        table.add_row(Text(printable(each.name)), f"{each.images:,}", right, percent(each.rejected))
    if (more := len(found.classes) - ROWS) > 0:
        table.add_row(Text(f"and {more} more", style="dim"))
    console.print(table)
    for line in _lines(found):
        say(console, line)


def _lines(found: Evaluation) -> list[str]:
    lines = [found.caveat] if found.caveat else []
    if found.accuracy is not None:
        lines += [
            f'Known classes: {percent(found.accuracy)} right, {percent(found.known_rejected)} called "unknown"; '
            f"{percent(found.accuracy_forced)} right if it always had to answer.",
        ]
    if found.unknown_rejected is not None:
        auc = "" if found.auc is None else f"; AUC {found.auc:.1f} % (known against never taught)"
        lines.append(f'Classes never taught: {percent(found.unknown_rejected)} called "unknown"{auc}.')
    if found.mean_confidence is not None and found.calibration_error is not None:
        lines.append(
            f"Confidence: {percent(100 * found.mean_confidence)} on average, "
            f"calibration error {percent(100 * found.calibration_error)}."
        )
    return [*lines, *promise_lines(found.promise, "evaluate")]
