"""Which runs stand in tables of their own, as in the paper: half the memory, an ablation, all classes in one task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from morecl.report.grid import HALF_MEMORY, Column, Grid, Row

FEWEST = 3  # rows that are worth a table of their own, and other methods to be set apart from
ABLATED = ("no back update", "no coefficient")


@dataclass(frozen=True)
class Part:
    """Rows and columns of the grid that are shown apart from the others."""

    key: str  # behind the keys of its tables
    title: str  # behind the titles of its tables
    grid: Grid
    tables: dict[str, tuple[str, ...]]  # which kinds of tables, and of which metrics


def split(grid: Grid) -> tuple[Grid, list[Part]]:
    """The main part of the grid, and the parts that are shown apart, in the order of the report.

    Runs on all classes at once always stand apart from tasks; half the memory and an ablation if they are at least
    :data:`FEWEST` rows beside as many methods. An ablation also shows the rows of its methods that lack nothing.
    """
    main, parts = grid, []
    once, tasks = (_columns(grid, wanted) for wanted in (_at_once, lambda column: not _at_once(column)))
    if once and tasks:
        main = tasks
        parts.append(Part("once", "all classes in one task", once, {"main": ("aca",)}))
    ablated = [row for row in main if set(row.variant) & set(ABLATED)]
    half = [row for row in main if HALF_MEMORY in row.variant and row not in ablated]
    whole = [row for row in main if row not in (*ablated, *half)]
    if len({row.method for row in whole}) < FEWEST:
        return main, parts
    apart: list[Row] = []
    if len(ablated) >= FEWEST:
        methods, benchmarks = ({row.method for row in ablated}, {column for row in ablated for column in main[row]})
        rows = [*(row for row in whole if row.method in methods), *ablated]
        shown = _columns({row: main[row] for row in rows}, lambda column: column in benchmarks)
        parts.insert(0, Part("ablation", "ablation", shown, {"main": (), "ood": (), "errors": ()}))
        apart += ablated
    if len(half) >= FEWEST:
        parts.insert(0, Part("half", "half the memory", {row: main[row] for row in half}, {"main": (), "ood": ()}))
        apart += half
    return {row: cells for row, cells in main.items() if row not in apart}, parts


def _at_once(column: Column) -> bool:
    return column.tasks == 1


def _columns(grid: Grid, wanted: Callable[[Column], bool]) -> Grid:
    """The grid with these columns alone, and the rows that have one of them."""
    kept: Grid = {row: {c: runs for c, runs in cells.items() if wanted(c)} for row, cells in grid.items()}
    return {row: cells for row, cells in kept.items() if cells}
