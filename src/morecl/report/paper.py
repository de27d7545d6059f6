"""The paper's settings and numbers (``assets/paper_tables.json``), and the names that tables print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

from morecl import presets
from morecl.catalogue import METHODS
from morecl.config import SgdConfig
from morecl.errors import InputError
from morecl.records import Record

UPPER_BOUND = "joint"  # keeps all data: shown, never in bold
PRETRAINED_ON = {"611": "main", "200": "pretrained_on_200_classes"}  # classes of ImageNet, and the experiment
ONE_TASK = "one_task"  # all classes at once: the paper's experiment on frozen features
REFERENCE = "single"  # one model per task, not a class-incremental learner: used for forward transfer only

# Whose back-update a run of MORE had, as rows call it.
PAPERS, AUTHORS, OURS, OTHER = "paper", "authors' code", "our back-update", "other back-update"
BACK_UPDATES = {PAPERS: presets.MORE["paper"], AUTHORS: presets.MORE["authors"], OURS: presets.MORE_DEFAULT}
BACK_UPDATE_SETTINGS = frozenset({"preset", *presets.MORE_DEFAULT})

# What records had that lack a setting: all of them, and those of a method or with a setting.
_ADDED_TO_ALL = {"pretrained": True, "freeze_backbone": True, "augment": False}
_ADDED_LATER: dict[str, dict[str, Any]] = {
    "icarl": {"ood_score": "head"},
    "agem": {"project": "step"},
    "derpp": {"mask_unseen": True},
    "pass": {"kd_unit": "square"},
    "tpl": {"md_mean": "held-out"},
    "morerp": {"known_weight": 0.0, "kept_features": 60000},
    "c": {"shrink_below": 1.0},
    "back_update_lr": {
        "preset": None,
        "back_update_rate": "relative",
        "back_update_draw": "random",
        "back_update_start": "last",
        "back_update_features": "own",
    },
}

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
    "tinyimagenet88-8t": ("T-ImageNet88-8T", 8),
    "svhn-5t": ("SVHN-5T", 5),
    "mnist-5t": ("MNIST-5T", 5),
    "fashionmnist-5t": ("FashionMNIST-5T", 5),
    "digits-5t": ("Digits-5T", 5),
    "digits-unequal": ("Digits-unequal", (1, 3, 1, 4, 1)),
    "digits-one-by-one": ("Digits-one-by-one", 10),
}

# sha256 of weights that are declared the paper's, and the experiment that they belong to: see declared_weights
PAPERS_WEIGHTS: ContextVar[Mapping[str, str]] = ContextVar("papers_weights", default=MappingProxyType({}))


@cache
def paper() -> dict[str, Any]:
    """Everything in the file; its ``remarks`` explain how to read it."""
    text = files("morecl").joinpath("assets/paper_tables.json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))


def paper_settings(benchmark: str) -> dict[str, Any]:
    """The paper's settings for ``benchmark``; empty for a benchmark that it does not use."""
    return cast(dict[str, Any], paper()["settings"].get(benchmark, {}))


@cache
def usual_memory(benchmark: str) -> int | None:
    """The memory size of the paper or, where it gives none, of the packaged recipe; ``None`` without either."""
    from morecl.data.benchmarks import load_recipe, recipe_names  # takes a quarter of a second

    size = paper_settings(benchmark).get("memory_size")
    if size is None and benchmark in recipe_names():
        size = load_recipe(benchmark).settings.get("memory_size")
    return cast(int | None, size)


def settings(record: Record) -> dict[str, Any]:
    """The record's config without settings that had no effect, and with those that came later."""
    found = _ADDED_TO_ALL | record.config
    for key, added in _ADDED_LATER.items():
        if key == record.method or key in record.config:
            found |= {name: value for name, value in added.items() if name not in record.config}
    method = METHODS.get(record.method)
    idle = method is not None and not method.trains and found["freeze_backbone"]
    without = SgdConfig.training_settings() if idle else ()
    return {key: value for key, value in found.items() if key not in without}


def setting(record: Record, name: str) -> Any:
    """The value of ``name`` among the record's :func:`settings`; ``None`` if there is none."""
    return settings(record).get(name)


def division(record: Record) -> int | tuple[int, ...]:
    """The number of tasks if they are equal (the first may have one class more), else the classes of each."""
    sizes = record.task_sizes
    equal = sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    return len(sizes) if equal else tuple(sizes)


def method_title(name: str) -> str:
    """The method's name in print; a method that is not in the catalogue keeps its own name."""
    return METHODS[name].title if name in METHODS else name


def back_update(record: Record) -> str | None:
    """Whose back-update a run of MORE had, a key of ``BACK_UPDATES`` or ``OTHER``; ``None`` if that says nothing of it.

    Without any it is the paper's where the paper has none either (Tiny-ImageNet), and else no back-update.
    """
    values = settings(record)
    if record.method != "more" or not values.keys() >= presets.MORE_DEFAULT.keys() or values.get("memory_size") == 0:
        return None
    if values.get("back_update") is False:
        return PAPERS if paper_settings(record.benchmark).get("back_update") is False else None
    same = (name for name, theirs in BACK_UPDATES.items() if all(values[key] == theirs[key] for key in theirs))
    return next(same, OTHER)


def paper_number(record: Record, metric: str) -> tuple[float, float | None] | None:
    """The paper's (mean, standard deviation) for such a run, regardless of its epochs; see :func:`same_backbone`."""
    by_benchmark = paper()["numbers"].get(condition(record), {}).get(metric, {})
    pair = by_benchmark.get(record.benchmark, {}).get(record.method)
    return None if pair is None else (pair[0], pair[1])


def paper_average(records: Sequence[Record], metric: str) -> tuple[float, float | None] | None:
    """The paper's number for such runs on its five benchmarks, where it gives that alone; else ``None``."""
    conditions = {condition(record) for record in records}
    if len(conditions) != 1 or {record.benchmark for record in records} != {*paper()["numbers"]["main"]["auc"]}:
        return None
    averages = paper()["numbers"].get(conditions.pop(), {}).get(metric, {}).get("average", {})
    pair = averages.get(records[0].method)
    return None if pair is None else (pair[0], pair[1])


def same_backbone(record: Record) -> bool:
    """Whether the paper's number is for the very same backbone: architecture and what it was pre-trained on."""
    if setting(record, "pretrained") is False:
        return record.backbone.name.partition(".")[0] in paper()["architectures"]
    return record.backbone.sha256 in PAPERS_WEIGHTS.get()


@contextmanager
def declared_weights(texts: Sequence[str], records: Sequence[Record]) -> Iterator[None]:
    """Within it, weights of some records are the paper's: ``SHA256=611`` or ``SHA256=200``, its classes of ImageNet.

    The paper's weights are not known to the package, so nothing but the architecture can be checked. The first eight
    digits or more of a record's ``backbone.sha256`` or ``source_sha256`` are enough.
    """
    declared: dict[str, str] = {}
    for text in texts:
        hashes, experiment = _declaration(text, records)
        if twice := hashes & declared.keys():
            raise InputError(f"--paper-weights {min(twice)[:8]} is given twice; leave one out")
        declared |= dict.fromkeys(hashes, experiment)
    before = PAPERS_WEIGHTS.set(declared)
    try:
        yield
    finally:
        PAPERS_WEIGHTS.reset(before)


def _declaration(text: str, records: Sequence[Record]) -> tuple[set[str], str]:
    """The backbone's sha256 (several, if CPUs resampled its positions), and the experiment that they belong to."""
    start, _, classes = text.partition("=")
    if classes not in PRETRAINED_ON or len(start) < 8:
        raise InputError(f"'{text}' is not like 1a2b3c4d=611 or 1a2b3c4d=200 (start of backbone.sha256, classes)")
    found: dict[str, str] = {}
    hashes: set[str] = set()
    for backbone in (r.backbone for r in records):
        if any(value.startswith(start.lower()) for value in (backbone.sha256, backbone.source_sha256)):
            found[backbone.source_sha256 or backbone.sha256] = backbone.name
            hashes.add(backbone.sha256)
    if len(found) != 1:
        known = ", ".join(sorted({f"{r.backbone.sha256[:8]} ({r.backbone.name})" for r in records}))
        raise InputError(f"'{start}' is the start of {len(found)} backbones among the records: {known}")
    [name] = found.values()
    if name.partition(".")[0] not in paper()["architectures"]:
        raise InputError(f"{name} is not the paper's architecture ({', '.join(paper()['architectures'])})")
    return hashes, PRETRAINED_ON[classes]


def condition(record: Record) -> str | None:
    """The paper's experiment that a run repeats, as far as its method goes; ``None`` if there is none.

    A backbone without pre-training, or with one that the paper varies, is an experiment of its own. Of other backbones
    :func:`same_backbone` says whether they are the paper's. Scores on held-out training images repeat none.
    """
    if record.data.scored_on != "test":
        return None
    theirs = paper_settings(record.benchmark)
    tasks = division(record)
    changes = []
    if setting(record, "pretrained") is False:
        changes.append("no_pretraining")
    elif (weights := PAPERS_WEIGHTS.get().get(record.backbone.sha256, "main")) != "main":
        changes.append(weights)
    if setting(record, "freeze_backbone") is False:
        changes.append("trained_backbone")
    if tasks != theirs.get("tasks"):
        return ONE_TASK if tasks == 1 and not changes else None
    back = setting(record, "back_update")
    if back is not None and back != theirs.get("back_update", back):
        changes.append("back_update" if back else "no_back_update")
    if back_update(record) in (OURS, OTHER):
        changes.append("other_back_update")
    if setting(record, "coefficient") is False:
        changes.append("no_coefficient")
    size, size_there = setting(record, "memory_size"), usual_memory(record.benchmark)
    if size is not None and size_there is not None and size != size_there:
        changes.append("half_memory" if 2 * size == size_there else "other_memory")
    return "+".join(changes) or "main"
