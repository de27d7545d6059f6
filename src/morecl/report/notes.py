"""Notes below the tables: differences from the paper, and numbers that could be misread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from morecl.errors import few
from morecl.records import Record
from morecl.report.grid import HALF_MEMORY, HELD_OUT, Grid, arrange, columns_of, data_of, repetitions
from morecl.report.paper import (
    AUTHORS,
    BENCHMARKS,
    ONE_TASK,
    OTHER,
    OURS,
    PAPERS,
    PAPERS_WEIGHTS,
    PRETRAINED_ON,
    REFERENCE,
    UPPER_BOUND,
    back_update,
    condition,
    method_title,
    paper,
    paper_settings,
    same_backbone,
    setting,
)
from morecl.report.transfer import transfer_notes


def notes(records: Sequence[Record]) -> list[str]:
    """One sentence per fact that a reader needs in order not to misread the numbers."""
    grid = arrange(records)
    found = _paper_notes(grid) + caveats(grid)
    if any(row.method == UPPER_BOUND for row in grid):
        found.append(f"{method_title(UPPER_BOUND)} keeps all data: an upper bound, never in bold.")
    if len([row for row in grid if row.method == REFERENCE]) > 1:
        found.append(
            f"{method_title(REFERENCE)} was run with several settings; forward transfer is omitted where they mix."
        )
    return found + transfer_notes(records)


def caveats(grid: Grid) -> list[str]:
    """What must stand beside the numbers wherever they are shown: not the test set, unlike data, a repeated seed."""
    return held_out_note(grid) + unlike_data_note(grid) + repeated_note(grid)


def held_out_note(grid: Grid) -> list[str]:
    """Which numbers are not of the test set; empty if all are."""
    if any(row.held_out for row in grid):
        return [
            f"Rows labelled {HELD_OUT} are scored not on the test set but on training images kept out of training; "
            "they are never ranked."
        ]
    if any(r.data.scored_on == "validation" for row in grid.values() for runs in row.values() for r in runs):
        labels = ", ".join(column.label for column in columns_of(grid))
        return [f"Scored on held-out training images, not on the test set: {labels}."]
    return []


def unlike_data_note(grid: Grid) -> list[str]:
    """Where rows stand beside each other that had other images, or other numbers of them; empty if nowhere.

    See :func:`data_of`. The images of a folder are stored at the size of the backbone's input: where that differs, only
    the numbers are compared.
    """
    found = []
    for column in columns_of(grid):
        for scored_on in ("test", "validation"):
            there = [
                (row.label, record)
                for row, cells in grid.items()
                for record in cells.get(column, [])
                if record.data.scored_on == scored_on
            ]
            sizes = {record.backbone.image_size for _, record in there}
            known = {data_of(record) for _, record in there} - {None}
            only = known.pop() if len(known) == 1 else ""  # older records do not say it
            rows: dict[tuple[int, int, str], dict[str, None]] = defaultdict(dict)  # labels, each once
            for label, record in there:
                images = (data_of(record) or only or "") if scored_on == "validation" or len(sizes) == 1 else ""
                rows[record.data.train_images, record.data.test_images, images][label] = None
            alike = len({key[:2] for key in rows}) < len(rows)  # as many, but others
            each = [
                f"{few(list(labels), 3)}: {train:,} to train, {test:,} to test" + (f", data {images}" if alike else "")
                for (train, test, images), labels in rows.items()
            ]
            if len(each) > 1:
                found.append(f"{column.label} ({'; '.join(each)})")
    return [f"Not on the same images, so not comparable: {', '.join(found)}."] if found else []


def repeated_note(grid: Grid) -> list[str]:
    """Which numbers come from several runs with the same seed and class order; empty if none do."""
    repeated = [
        f"{row.label} on {column.label} ({len(runs)} runs, n = {len(repetitions(runs))})"
        for row, cells in grid.items()
        for column, runs in cells.items()
        if len(repetitions(runs)) < len(runs)
    ]
    if not repeated:
        return []
    return [f"Runs with the same seed and class order are averaged and count as one: {', '.join(repeated)}."]


def _paper_notes(grid: Grid) -> list[str]:
    """How the runs differ from the paper's."""
    columns = columns_of(grid)
    compared = [column for column in columns if paper_settings(column.benchmark)]
    found = [f"Numbers of the paper: {paper()['source']}."] if compared else []
    runs_of = {column: [r for row in grid.values() for r in row.get(column, [])] for column in columns}
    declared = PAPERS_WEIGHTS.get()
    weights = {r.backbone.sha256 for of_column in runs_of.values() for r in of_column} & declared.keys()
    if compared and weights:
        kinds = {condition: classes for classes, condition in PRETRAINED_ON.items()}
        listed = ", ".join(f"{one[:8]} ({kinds[declared[one]]} classes)" for one in sorted(weights))
        found.append(f"Weights taken for the paper's, as declared: {listed}.")
    for label, ours, theirs in _DIFFERENCES:
        parts = []
        for column in compared:
            there = theirs(column.benchmark)
            here = {value for record in runs_of[column] if (value := ours(record)) is not None}
            if here and there is not None and here != {there}:
                parts.append((column.label, f"{_listed(here)} (paper: {_listed({there})})"))
        if parts:
            everywhere = len({text for _, text in parts}) == 1 and len(parts) == len(compared)
            listed = parts[0][1] if everywhere else "; ".join(f"{name} {text}" for name, text in parts)
            found.append(f"{label}: {listed}.")
    counts = {len(repetitions(runs)) for row in grid.values() for column, runs in row.items() if column in compared}
    if counts and counts != {paper()["runs"]}:
        found.append(f"Runs per number: {_listed(counts)} (paper: {paper()['runs']}).")
    absent = [column.label for column in columns if column not in compared]
    if absent:
        found.append(f"Not in the paper: {', '.join(absent)}.")
    variants = {row.method for row in grid if row.variant}
    if compared and any(row.method in variants and not row.variant for row in grid):
        halved = {column for row, cells in grid.items() if HALF_MEMORY in row.variant for column in cells}
        unknown = [column for column in compared if "memory_size" not in paper_settings(column.benchmark)]
        guessed = [column.label for column in unknown if column in halved]
        if guessed:
            found.append(f"The paper gives no memory size for {', '.join(guessed)}; half memory is half the recipe's.")
        found.append(
            "Where rows of a method differ in a setting, those that do not name it have the paper's value, or our "
            "default where the paper has none."
        )
    return found + _back_update_notes([r for column in compared for r in runs_of[column]])


def _back_update_notes(records: Sequence[Record]) -> list[str]:
    """Which rows of MORE have the paper's back-update, what follows for the others, and where the paper has none."""
    found = []
    whose = {back_update(record) for record in records}
    if whose & {OURS, OTHER}:
        rows = [f"MORE ({name})" for name in (PAPERS, AUTHORS) if name in whose]
        shown = (
            f"they are beside {' and '.join(rows)}, and in no column whose only MORE is such a one"
            if rows
            else "where it is the only MORE of a column, no method has: run it with preset=paper to compare them"
        )
        found.append(
            "MORE with a back-update that is not the paper's (our back-update, other back-update) has no numbers of "
            f"the paper beside it; {shown}."
        )
    without = {r.benchmark for r in records if back_update(r) == PAPERS and setting(r, "back_update") is False}
    if without:
        names = ", ".join(name for benchmark, (name, _) in BENCHMARKS.items() if benchmark in without)
        found.append(f"MORE ({PAPERS}) has no back-update on {names}, as in the paper.")
    return found


# (label, value in a record, value in the paper for a benchmark)
_DIFFERENCES: list[tuple[str, Callable[[Record], Any], Callable[[str], Any]]] = [
    (
        "Backbone",
        lambda record: None if same_backbone(record) else record.backbone.name,
        lambda benchmark: paper()["backbone"],
    ),
    (
        "Image size",
        lambda record: record.backbone.image_size or setting(record, "image_size"),
        lambda benchmark: paper()["image_size"],
    ),
    (
        "Tasks",
        lambda record: None if condition(record) == ONE_TASK else len(record.task_sizes),
        lambda benchmark: paper_settings(benchmark).get("tasks"),
    ),
    *(
        (label, lambda record, key=key: setting(record, key), lambda name, key=key: paper_settings(name).get(key))
        for label, key in [
            ("Epochs", "epochs"),
            ("Learning rate (the paper's is that of MORE)", "lr"),
            ("Bottleneck", "bottleneck"),
            ("Memory size", "memory_size"),
            ("Back-update", "back_update"),
        ]
    ),
    *(
        (label, lambda record, key=key: getattr(record.data, key), lambda name, key=key: paper_settings(name).get(key))
        for label, key in [("Training images", "train_images"), ("Test images", "test_images")]
    ),
]


def _listed(values: Iterable[Any]) -> str:
    """``on``/``off``, a number with thousands, several values in order."""

    def show(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:,}" if isinstance(value, int) else str(value)

    return ", ".join(show(value) for value in sorted(values))
