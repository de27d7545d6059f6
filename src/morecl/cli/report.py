"""``morecl report``: tables and figures from records. Never imports torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morecl.cli import options
from morecl.cli.terminal import FAILED, error_line, output_console
from morecl.errors import InputError

if TYPE_CHECKING:
    from morecl.records import Record


class ReportFormat(StrEnum):
    text = "text"
    md = "md"
    latex = "latex"
    html = "html"


ENDINGS = {".md": ReportFormat.md, ".tex": ReportFormat.latex, ".html": ReportFormat.html}


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(callback=options.all_expanded, help="result.json files, or folders that contain some."),
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(ReportFormat),
            callback=options.one_of("format", ReportFormat),
            help="[default: text, or what the ending of --out says]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=options.expanded, help="Write to this file (.md, .tex, .html) instead of the terminal."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(callback=options.expanded, help="Also write the figures (SVG and PNG) to this folder."),
    ] = None,
    paper_weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHA256=CLASSES",
            help="These weights are the paper's, pre-trained on 611 or 200 classes. May be repeated.",
        ),
    ] = None,
) -> None:
    """Make tables and figures from the records of finished runs.

    The exit code is 1 if some records could not be read; the report has all others and says so.
    """
    from morecl.cli.summary import print_summary
    from morecl.files import check_target
    from morecl.report.collect import collect
    from morecl.report.paper import declared_weights

    chosen = ReportFormat(format_) if format_ else _format_of(out) if out else ReportFormat.text
    if chosen is ReportFormat.text and out:
        raise InputError("--out goes with --format md, latex or html")
    if out:
        check_target(out, f"report.{chosen.value}")
    found = collect(runs)
    records, lost = found.records, found.notes
    for problem in found.problems:
        error_line(f"left out: {problem}")
    with declared_weights(paper_weights or [], records):
        if figures:
            from morecl.report.render import write_figures

            write_figures(records, figures)
        if chosen is ReportFormat.text:
            seen = sys.stdout.isatty() and sys.stderr.isatty()  # just above the table
            print_summary(records, output_console(), [] if seen else lost)
        else:
            _write(chosen, out, records, lost)
    if lost:
        raise SystemExit(FAILED)


def _write(format_: ReportFormat, out: Path | None, records: Sequence[Record], lost: Sequence[str]) -> None:
    from morecl.files import write_text
    from morecl.report.formats import DOCUMENTS

    document = DOCUMENTS[format_.value](records, lost)
    if out:
        write_text(out, document)
        print(out)
    else:  # UTF-8 in any locale, as in a file
        sys.stdout.flush()
        sys.stdout.buffer.write(document.encode())
        sys.stdout.buffer.flush()


def _format_of(out: Path) -> ReportFormat:
    """What the name of a file says that it should hold."""
    if out.suffix.lower() not in ENDINGS:
        raise InputError(f"--out {out}: the ending names no format; use {', '.join(ENDINGS)}, or give --format")
    return ENDINGS[out.suffix.lower()]
