"""Which runs belong together: a grid of records, one row per method and setting, one column per benchmark."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from morecl.catalogue import METHODS
from morecl.config import LearnerConfig
from morecl.records import Record
from morecl.report.paper import (
    BACK_UPDATE_SETTINGS,
    BENCHMARKS,
    OTHER,
    PAPERS,
    REFERENCE,
    UPPER_BOUND,
    back_update,
    division,
    method_title,
    paper_settings,
    setting,
    settings,
    usual_memory,
)

NOT_A_SETTING = LearnerConfig.with_role("repetition", "machine", "weights")
HALF_MEMORY = "half memory"
HELD_OUT = "held-out images"  # in the label of a row that stands beside rows scored on the test set


@dataclass(frozen=True)
class Row:
    """A method, and the settings that distinguish it from other rows of the same method."""

    method: str
    variant: tuple[str, ...] = ()
    held_out: bool = False  # scored on held-out training images, while other rows are scored on the test set

    @property
    def label(self) -> str:
        """Name and settings, such as ``MORE (lr 0.1, held-out images)``."""
        name = method_title(self.method)
        return f"{name} ({', '.join(self.parts)})" if self.parts else name

    @property
    def parts(self) -> tuple[str, ...]:
        """What the label says in addition to the name."""
        return (*self.variant, HELD_OUT) if self.held_out else self.variant

    @property
    def competes(self) -> bool:
        """Whether the row may be marked as the best."""
        return self.method not in (UPPER_BOUND, REFERENCE) and not self.held_out


@dataclass(frozen=True)
class Column:
    """A benchmark, split into a number of equal tasks, or into tasks of these numbers of classes."""

    benchmark: str
    tasks: int | tuple[int, ...]

    @property
    def label(self) -> str:
        """The benchmark's name; the tasks only if they are not the usual ones."""
        name, usual = BENCHMARKS.get(self.benchmark, (self.benchmark, None))
        if self.tasks == usual:
            return name
        if isinstance(self.tasks, int):
            return f"{name} in {self.tasks} task{'s' if self.tasks > 1 else ''}"
        return f"{name} in tasks of {', '.join(map(str, self.tasks))} classes"

    @property
    def order(self) -> tuple[int, ...]:
        """By the number of tasks; equal ones first."""
        return (self.tasks,) if isinstance(self.tasks, int) else (len(self.tasks), *self.tasks)


Grid = dict[Row, dict[Column, list[Record]]]

_SWITCHED_OFF = {"pretrained": "random weights", "freeze_backbone": "trained backbone"}  # what rows call it


def arrange(records: Sequence[Record]) -> Grid:
    """Records by row and column; those that differ only in seed, class order or machine share a cell.

    A setting splits the rows of a method if it takes several values within one column, or if the paper varies it
    (memory size, back-update, coefficient). Its value is named unless it is the paper's for that benchmark (where the
    paper has none: the recipe's memory size, a switch that is on). Facts outside the config (backbone, number of
    images) are named only if they still make a difference. Scores on held-out training images never share a row with
    scores on the test set. Rows of MORE say whose back-update they had if that differs, or on a benchmark of the
    paper.
    """
    mixed = len({record.data.scored_on for record in records}) > 1
    weights = weights_of(records)
    by_method: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_method[record.method].append(record)
    grid: Grid = {}
    for method, runs in by_method.items():
        config = [experiment_settings(record) for record in runs]
        columns = [Column(record.benchmark, division(record)) for record in runs]
        keys = _varying(config, list(zip(columns, strict=True)))
        places = [
            (column, record.data.scored_on, *_values(values, keys))
            for record, column, values in zip(runs, columns, config, strict=True)
        ]
        whose = [back_update(record) for record in runs]
        tell = len({*whose} - {None}) > 1 or any(paper_settings(record.benchmark) for record in runs)
        extra = [_facts(record, weights) for record in runs]
        more_keys = _varying(extra, places, unknown=None)
        for record, column, values, facts, back in zip(runs, columns, config, extra, whose, strict=True):
            told = _told(record, back)
            ablated = [key for key in values if key not in keys and _is_ablated(record, key, values[key])]
            wanted = [key for key in sorted([*keys, *ablated]) if key not in told]
            named = [back if tell else None, *(_describe(record, key, values.get(key)) for key in wanted)]
            named += [f"{key} {facts[key]}" for key in more_keys if facts[key]]
            held_out = mixed and record.data.scored_on == "validation"
            row = Row(method, tuple(text for text in named if text), held_out)
            grid.setdefault(row, {}).setdefault(column, []).append(record)
    return dict(sorted(grid.items(), key=lambda item: _row_order(item[0])))


def columns_of(grid: Grid) -> list[Column]:
    """All columns, benchmarks of the paper first."""
    names = list(BENCHMARKS)
    columns = {column for row in grid.values() for column in row}
    return sorted(
        columns, key=lambda c: (names.index(c.benchmark) if c.benchmark in names else 99, c.benchmark, c.order)
    )


def repetitions(runs: Iterable[Record]) -> list[list[Record]]:
    """The runs of a cell grouped by seed and class order: a number's n is the number of groups, not of records."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in runs:
        groups[record.seed, *record.class_order].append(record)
    return list(groups.values())


def repetition_values(runs: Iterable[Record], value: Callable[[Record], float | None]) -> list[float]:
    """One value per seed and class order: the mean where a run was repeated; runs without a value are left out."""
    found = [[known for record in group if (known := value(record)) is not None] for group in repetitions(runs)]
    return [fmean(values) for values in found if values]


def repetition_mean(runs: Iterable[Record], value: Callable[[Record], float | None]) -> float | None:
    """The mean over seeds and class orders; ``None`` if no run has a value."""
    values = repetition_values(runs, value)
    return fmean(values) if values else None


def experiment_settings(record: Record) -> dict[str, Any]:
    """The settings that make a different experiment."""
    return {key: value for key, value in settings(record).items() if key not in NOT_A_SETTING}


def weights_of(records: Iterable[Record]) -> Callable[[Record], str]:
    """What tells the weights of these runs apart: their hash as they are in their file, where some record has it.

    The hash of the weights in use differs between CPUs if positions are resampled. Random weights are all alike: they
    differ with the seed.
    """
    sources = {r.backbone.sha256: r.backbone.source_sha256 for r in records if r.backbone.source_sha256}

    def weights(record: Record) -> str:
        if setting(record, "pretrained") is False:
            return ""
        return sources.get(record.backbone.sha256, record.backbone.sha256)

    return weights


def data_of(record: Record) -> str | None:
    """What tells the images of runs apart, besides their numbers; ``None`` if an older record does not say it.

    Images that are held out for validation change with the seed, so that only data set and classes are compared.
    """
    data = record.data
    if data.scored_on == "test":
        return data.fingerprint[:8]
    if not data.classes:
        return None
    return f"{data.name} {hashlib.sha256(chr(10).join(data.classes).encode()).hexdigest()[:8]}"


def _facts(record: Record, weights: Callable[[Record], str]) -> dict[str, Any]:
    """What distinguishes experiments besides the config; ``None`` is not known."""
    return {
        "backbone": record.backbone.name,
        "weights": weights(record)[:8],
        "train images": record.data.train_images,
        "test images": record.data.test_images,
        "data": data_of(record),
    }


def _values(values: dict[str, Any], keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(json.dumps(values.get(key), sort_keys=True) for key in keys)


def _varying(settings: Sequence[dict[str, Any]], places: Sequence[tuple[Any, ...]], unknown: object = ...) -> list[str]:
    """Keys with more than one value among records of the same place, sorted; ``unknown`` is no value."""
    seen: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    all_keys = sorted({key for values in settings for key in values})
    for values, place in zip(settings, places, strict=True):
        for key, value in zip(all_keys, _values(values, all_keys), strict=True):
            if values.get(key) is not unknown:
                seen[*place, key].add(value)
    return sorted({place[-1] for place, values in seen.items() if len(values) > 1})


def _is_ablated(record: Record, key: str, value: Any) -> bool:
    """Whether the paper varies this setting and its usual value is known."""
    if key == "memory_size":
        return value is not None and usual_memory(record.benchmark) is not None
    return key in ("back_update", "coefficient")


def _told(record: Record, back: str | None) -> frozenset[str]:
    """Settings that need no name: those of a back-update that has one, or that did not happen."""
    named = back not in (None, OTHER)
    none = setting(record, "back_update") is False or setting(record, "memory_size") == 0
    told = BACK_UPDATE_SETTINGS if named or none else frozenset[str]()
    return told if back in (None, PAPERS) else told | {"back_update"}  # the paper's may be none, another is one


def _describe(record: Record, key: str, value: Any) -> str | None:
    """A setting in words, ``None`` for the usual one."""
    words = key.replace("_", " ")
    if key == "image_size" and value is None:
        value = record.backbone.image_size  # the backbone's own; older records do not have it
    usual = usual_memory(record.benchmark) if key == "memory_size" else None
    theirs = paper_settings(record.benchmark).get(key, usual)
    if value == theirs and theirs is not None:
        return None
    if key == "augment":
        return "augmented" if value else None
    if key in _SWITCHED_OFF and value is False:
        return _SWITCHED_OFF[key]
    if isinstance(value, bool):
        return f"no {words}" if not value else (f"with {words}" if theirs is not None else None)
    if key == "memory_size" and value and theirs == 2 * value:
        return HALF_MEMORY
    return f"{words} {'none' if value is None else value}"


def _row_order(row: Row) -> tuple[float, str, bool, int, tuple[str, ...]]:
    places = {name: float(place) for place, name in enumerate(METHODS)}
    just_before_more = places["more"] - 0.5
    return places.get(row.method, just_before_more), row.method, row.held_out, len(row.variant), row.variant
