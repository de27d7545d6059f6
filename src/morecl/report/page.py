"""The HTML report: one page that holds its own style and figures and loads nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from morecl.records import Record
from morecl.report.figures import Drawing, drawings
from morecl.report.grid import Column, Grid, Row, arrange, columns_of
from morecl.report.notes import caveats, notes
from morecl.report.paired import all_tables
from morecl.report.paper import UPPER_BOUND, method_title
from morecl.report.plots import NARROW, WIDE
from morecl.report.render import inline_svg
from morecl.report.tables import TABLE_KINDS, Cell, Table, stages


@dataclass(frozen=True)
class Topic:
    """A section of the page: tables and figures about the same question."""

    key: str
    title: str
    tables: tuple[str, ...]
    figures: tuple[str, ...]


TOPICS = (
    Topic("accuracy", "Accuracy", ("main", "differences", "main-half", "main-ablation", "main-once"), ("accuracy",)),
    Topic("unknown", "Unknown classes", ("ood", "threshold", "ood-half", "ood-ablation"), ("roc",)),
    Topic("forgetting", "Forgetting", ("tasks", "transfer"), ("reduction", "matrix")),
    Topic("errors", "Task errors", ("errors", "errors-ablation"), ("errors",)),
    Topic("cost", "Time and memory", ("cost",), ("time", "entries")),
)


@dataclass(frozen=True)
class Section:
    """What the template needs of a topic."""

    topic: Topic
    tables: list[Table]
    figures: list[Drawing]
    matrices: list[tuple[Column, list[Drawing]]]


@dataclass(frozen=True)
class Card:
    """The best row of a benchmark by one metric, or its only one."""

    benchmark: str
    best: bool
    metric: str
    meaning: str
    row: Row
    cell: Cell
    beside: str  # joint training, if that is better


@dataclass(frozen=True)
class ClassList:
    """Names of the classes of each task, in one class order."""

    column: Column
    order: str
    tasks: list[list[str]]


def html(records: Sequence[Record], lost: Sequence[str] = ()) -> str:
    """The page; ``lost``: notes on records that are not in it.

    It follows the reader's light or dark mode and has figures for wide and for narrow windows.
    """
    grid = arrange(records)
    columns = columns_of(grid)
    tables = all_tables(records)
    one_row = len(grid) == 1 and len(columns) == 1
    sections = list(_sections([] if one_row else tables, drawings(records)))
    if one_row:  # a bar chart with one bar of the two numbers that the summary has
        sections = [section for section in sections if section.topic.key != "errors"]
    return (
        _environment()
        .get_template("report.html")
        .render(
            lead=_lead(records, grid),
            cards=[*_cards(tables, "main", "aca"), *_cards(tables, "ood", "auc")],
            caveats=[*lost, *caveats(grid)],
            summary=tables if one_row else [],
            sections=sections,
            several=len(columns) > 1,
            class_lists=list(_class_lists(grid, columns)),
            notes=[*lost, *notes(records)],
            images=_image_maker(),
            kinds=TABLE_KINDS,
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("morecl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _lead(records: Sequence[Record], grid: Grid) -> str:
    spent = ""
    if all(record.seconds_count for record in records):
        minutes = sum(sum(stages(record).values()) for record in records) / 60
        spent = f"; {minutes / 60:.1f} hours of computing" if minutes >= 60 else f"; {minutes:.1f} minutes of computing"
    backbones = ", ".join(sorted({record.backbone.name for record in records}))
    methods = {row.method for row in grid}
    benchmarks = {record.benchmark for record in records}
    counts = [(len(records), "run"), (len(methods), "method"), (len(benchmarks), "benchmark")]
    runs, of, on = (f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts)
    return f"{runs} of {of} on {on}; backbone {backbones}{spent}."


def _sections(tables: Sequence[Table], figures: Sequence[Drawing]) -> Iterator[Section]:
    for topic in TOPICS:
        own = [drawing for drawing in figures if drawing.key in topic.figures]
        matrices = [drawing for drawing in own if drawing.key == "matrix"]
        section = Section(
            topic,
            tables=[table for table in tables if table.key in topic.tables],
            figures=[drawing for drawing in own if drawing.key != "matrix"],
            matrices=[(c, list(group)) for c, group in itertools.groupby(matrices, key=lambda drawing: drawing.column)],
        )
        if section.tables or own:
            yield section


def _cards(tables: Sequence[Table], key: str, metric_key: str) -> Iterator[Card]:
    """The best row of each benchmark by one metric."""
    metric = next(metric for metric in TABLE_KINDS[key].metrics if metric.key == metric_key)
    for table in tables:
        for index, (benchmark, label) in enumerate(table.heads):
            if table.key != key or label != metric.label or benchmark == "Average":
                continue
            ranked = [(cell, row) for row, cells in table.rows.items() if row.competes and (cell := cells[index])]
            if ranked:
                cell, row = max(ranked, key=lambda pair: pair[0].mean)
                joint = table.rows[Row(UPPER_BOUND)][index] if Row(UPPER_BOUND) in table.rows else None
                beside = f"{method_title(UPPER_BOUND)} {joint.mean:.1f}" if joint and joint.mean > cell.mean else ""
                yield Card(benchmark, len(ranked) > 1, metric.label, _CARD_WORDS[metric_key], row, cell, beside)


_CARD_WORDS = {"aca": "accuracy after the last task", "auc": "detection of unknown classes"}


def _class_lists(grid: Grid, columns: Sequence[Column]) -> Iterator[ClassList]:
    """Which classes each task has, for the records that name them; each class order once."""
    for column in columns:
        runs = [record for row in grid.values() for record in row.get(column, [])]
        named = [record for record in runs if len(record.data.classes) > max(record.class_order)]
        orders: dict[tuple[int, ...], list[Record]] = {}
        for record in named:
            orders.setdefault((*record.class_order, *record.task_sizes), []).append(record)
        for same in orders.values():
            record = same[0]
            names = iter([record.data.classes[label] for label in record.class_order])
            seeds = sorted({r.seed for r in same})
            listed = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
            order = f"class order {record.class_order_name} ({listed})"
            yield ClassList(column, order, [list(itertools.islice(names, size)) for size in record.task_sizes])


def _image_maker() -> Callable[[Drawing], dict[str, Markup]]:
    """A function that draws a figure for each window size; ids are unique in the page."""
    numbers = itertools.count()

    def images(drawing: Drawing) -> dict[str, Markup]:
        widths = {"any": NARROW} if drawing.key == "matrix" else {"wide": WIDE, "narrow": NARROW}
        return {size: inline_svg(drawing.draw(width), f"f{next(numbers)}") for size, width in widths.items()}

    return images
