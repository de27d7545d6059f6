"""The paper's settings and numbers (``assets/paper_tables.json``), and the names that tables print."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, cast

from morecl.catalogue import METHODS
from morecl.config import SgdConfig
from morecl.records import Record

UPPER_BOUND = "joint"  # keeps all data: shown, never in bold
REFERENCE = "single"  # one model per task, not a class-incremental learner: used for forward transfer only

# Name in print and usual tasks (their number, or the classes of each), in the order of the columns.
BENCHMARKS: dict[str, tuple[str, int | tuple[int, ...]]] = {
    "cifar10-5t": ("CIFAR10-5T", 5),
    "cifar10-5t-1k": ("CIFAR10-5T-1k", 5),
    "cifar100-10t": ("CIFAR100-10T", 10),
    "cifar100-20t": ("CIFAR100-20T", 20),
    "cifar100-unequal": ("CIFAR100-unequal", (10, 1, 1, 20, 5, 1, 30, 2, 10, 20)),
    "cifar100-first-one": ("CIFAR100-first-one", (1, 9, *[10] * 9)),
    "cifar100-uneven-40": ("CIFAR100-uneven-40", (40, 1, 5, 1, 20, 2, 1, 10, 15, 5)),
    "tinyimagenet-5t": ("T-ImageNet-5T", 5),
    "tinyimagenet-10t": ("T-ImageNet-10T", 10),
    "svhn-5t": ("SVHN-5T", 5),
    "mnist-5t": ("MNIST-5T", 5),
    "fashionmnist-5t": ("FashionMNIST-5T", 5),
    "digits-5t": ("Digits-5T", 5),
    "digits-unequal": ("Digits-unequal", (1, 3, 1, 4, 1)),
    "digits-one-by-one": ("Digits-one-by-one", 10),
}


@cache
def paper() -> dict[str, Any]:
    """Everything in the file; its ``remarks`` explain how to read it."""
    text = files("morecl").joinpath("assets/paper_tables.json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))


def paper_settings(benchmark: str) -> dict[str, Any]:
    """The paper's settings for ``benchmark``; empty for a benchmark that it does not use."""
    return cast(dict[str, Any], paper()["settings"].get(benchmark, {}))


def settings(record: Record) -> dict[str, Any]:
    """The record's config, flat, without settings that had no effect."""
    flat = flatten(record.config)
    names = {path: path.split(".")[-1] for path in flat}
    frozen = all(value for path, value in flat.items() if names[path] == "freeze_backbone")
    method = METHODS.get(record.method)
    without = SgdConfig.training_settings() if method and not method.trains and frozen else ()
    return {path: value for path, value in flat.items() if names[path] not in without}


def setting(record: Record, name: str) -> Any:
    """The value of ``name`` among the record's :func:`settings`, at any depth; ``None`` if there is none."""
    return next((value for path, value in settings(record).items() if path.split(".")[-1] == name), None)


def division(record: Record) -> int | tuple[int, ...]:
    """The number of tasks if they are equal (the first may have one class more), else the classes of each."""
    sizes = record.task_sizes
    equal = sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    return len(sizes) if equal else tuple(sizes)


def method_title(name: str) -> str:
    """The method's name in print; a method that is not in the catalogue keeps its own name."""
    return METHODS[name].title if name in METHODS else name


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``, outer values before inner ones."""
    flat = {prefix + key: value for key, value in config.items() if not isinstance(value, dict)}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
    return flat


def paper_number(record: Record, metric: str) -> tuple[float, float | None] | None:
    """The paper's (mean, standard deviation) for such a run, regardless of its backbone and epochs."""
    condition = _condition(record)
    by_benchmark = paper()["numbers"].get(condition, {}).get(metric, {})
    pair = by_benchmark.get(record.benchmark, {}).get(record.method)
    return None if pair is None else (pair[0], pair[1])


def _condition(record: Record) -> str | None:
    """The paper's experiment that a run repeats; ``None`` if there is none."""
    theirs = paper_settings(record.benchmark)
    tasks = division(record)
    if tasks != theirs.get("tasks"):
        return "one_task" if tasks == 1 else None
    changes = []
    back_update = setting(record, "back_update")
    if back_update is not None and back_update != theirs.get("back_update", back_update):
        changes.append("back_update" if back_update else "no_back_update")
    if setting(record, "coefficient") is False:
        changes.append("no_coefficient")
    size, size_there = setting(record, "memory_size"), theirs.get("memory_size")
    if size and size_there and size != size_there:
        changes.append("half_memory" if 2 * size == size_there else "other_memory")
    return "+".join(changes) or "main"
