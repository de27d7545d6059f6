"""``morecl cache``: the decoded images of ``folder:PATH`` data sets and of compressed archives on disk."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from morecl.cli.terminal import output_console

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
        table = Table(box=None, pad_edge=False)
        for title in ("name", "images", "px", "size", "last used", "made from"):
            table.add_column(title, justify="right" if title in ("images", "px", "size") else "left", overflow="fold")
        for entry in found:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) + (" (now)" if entry.in_use() else "")
            cells = (entry.name, f"{entry.images:,}", str(entry.side), in_bytes(entry.bytes), used, entry.folder)
            table.add_row(*map(Text, cells))
        console.print(table)
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


def in_bytes(count: int) -> str:
    """15,000,000 -> 15 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
