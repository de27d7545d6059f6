"""``morecl cache``: the decoded images of ``folder:PATH`` data sets and of compressed archives on disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from morecl.cli.terminal import counted, needed_width, output_console, print_entry

if TYPE_CHECKING:
    from morecl.data.cache import Entry

PATH_WIDTH = 20  # columns of a path in the table, at least

app = typer.Typer(
    help="List or remove the decoded images that runs on folders and compressed archives keep on disk.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def list_() -> None:
    """List what is kept: folder, size, and when it was last used."""
    from morecl.data.cache import cache_limit, cache_root, entries

    root, limit, found = cache_root(), cache_limit(), entries(cache_root())
    console = output_console()
    if found:
        _show(console, found)
    taken = sum(entry.bytes for entry in found)
    console.print(Text(f"{in_bytes(taken)} of {in_bytes(limit)} in {root}"), soft_wrap=True)


@app.command("clear")
def clear(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="As `morecl cache list` shows them; default: all.")
    ] = None,
) -> None:
    """Remove decoded images, except those that a running process uses."""
    from morecl.data import cache

    removed, kept = cache.clear(cache.cache_root(), names or ())
    console = output_console()
    console.print(f"removed {len(removed)}, {in_bytes(sum(entry.bytes for entry in removed))}", highlight=False)
    for entry in kept:
        console.print(Text(f"kept {entry.name}: in use"), soft_wrap=True)


def _show(console: Console, entries: Sequence[Entry]) -> None:
    """A line per entry. Names stay whole, so that they can be copied into `morecl cache clear`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("images", "px", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    table.add_column("made from", overflow="fold", min_width=PATH_WIDTH)
    used = [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) + (" (now)" if entry.in_use() else "")
        for entry in entries
    ]
    for entry, when in zip(entries, used, strict=True):
        cells = (entry.name, f"{entry.images:,}", str(entry.side), in_bytes(entry.bytes), when, entry.folder)
        table.add_row(*map(Text, cells))
    if needed_width(table) <= console.width:
        console.print(table)
        return
    for entry, when in zip(entries, used, strict=True):
        details = (counted(entry.images, "image"), f"{entry.side} px", in_bytes(entry.bytes), f"last used {when}")
        print_entry(console, entry.name, (*details, f"made from {entry.folder}"), whole=True)


def in_bytes(count: int) -> str:
    """15,000,000 -> 15 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
