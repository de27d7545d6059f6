"""Records without runs, from which tests make tables, figures and pages."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from morecl import metrics
from morecl.records import BackboneInfo, DataInfo, Metrics, Record, Roc
from morecl.report.tables import Cell, Table, build_tables


def make_record(
    method: str = "more",
    benchmark: str = "digits-5t",
    seed: int = 0,
    *,
    level: float = 80.0,
    tasks: int = 5,
    config: dict[str, Any] | None = None,
    backbone: str = "vit_mini_patch4_32",
    train_images: int = 1000,
    **changes: Any,
) -> Record:
    """A valid record whose accuracies lie around ``level``; equal arguments give equal records."""
    rng = np.random.default_rng([seed, *hashlib.sha256(f"{method} {benchmark}".encode()).digest()[:4]])
    fall = 20 / tasks
    rows = [
        [min(100.0, level + 12 - fall * (i - j) - fall / 4 * i + float(rng.normal(0, 1.5))) for j in range(i + 1)]
        for i in range(tasks)
    ]
    matrix = metrics.accuracy_matrix(rows)
    per_step = [float(np.mean(row)) for row in rows]
    known, unknown = rng.normal(0, 1, 400), rng.normal(level / 60, 1, 400)
    x, y = metrics.roc_curve_points(known, unknown)
    aucs = [metrics.auc(known, unknown)] * (tasks - 1)
    early = float(rng.uniform(40, 80))
    values: dict[str, Any] = {
        "method": method,
        "benchmark": benchmark,
        "seed": seed,
        "class_order": list(range(2 * tasks)),
        "class_order_name": "0",
        "task_sizes": [2] * tasks,
        "config": {"epochs": 5, "memory_size": 200, **(config or {})},
        "backbone": BackboneInfo(name=backbone, sha256=hashlib.sha256(backbone.encode()).hexdigest()),
        "data": DataInfo(name=benchmark, fingerprint="0" * 64, train_images=train_images, test_images=500),
        "versions": {"morecl": "0.1.0"},
        "device": "cpu",
        "metrics": Metrics(
            aca=per_step[-1],
            aia=metrics.aia(per_step),
            reduction_rate=metrics.reduction_rate(matrix),
            bwt=metrics.bwt(matrix),
            auc=aucs[-1] if aucs else None,
            iauc=metrics.iauc(aucs) if aucs else None,
            fpr95=metrics.fpr95(known, unknown),
            aupr=metrics.aupr(known, unknown),
            til_accuracy=min(100.0, level + 15),
            errors_to_earlier=early,
            errors_to_later=100 - early,
        ),
        "accuracy_matrix": matrix,
        "til_matrix": _til_matrix(min(100.0, level + 15), tasks),
        "aca_per_step": per_step,
        "auc_per_step": aucs,
        "roc": Roc(false_positive_rate=list(x), true_positive_rate=list(y)),
        "seconds": {"train": 40.0 + level, "back_update": 12.0, "test": 8.0},
        "entries": {"backbone": 5_500_000, "adapters": 600_000, "heads": 20_000, "buffer": 614_400, "total": 6_120_000},
    }
    if sizes := changes.get("task_sizes"):
        values["class_order"] = list(range(sum(sizes)))
    if isinstance(told := changes.get("metrics"), Metrics):  # steps that give these
        before = (told.aia * tasks - told.aca) / max(1, tasks - 1)
        values["aca_per_step"] = [before] * (tasks - 1) + [told.aca]
        values["til_matrix"] = _til_matrix(told.til_accuracy, tasks)
        if told.auc is None or told.iauc is None:
            values["auc_per_step"] = []
        else:
            before = (told.iauc * (tasks - 1) - told.auc) / max(1, tasks - 2)
            values["auc_per_step"] = [before] * (tasks - 2) + [told.auc]
    return Record(**(values | changes))


def _til_matrix(share: float, tasks: int) -> list[list[float | None]]:
    return metrics.accuracy_matrix([[share] * (i + 1) for i in range(tasks)])


def with_aca(value: float, *args: object, **keywords: object) -> Record:
    """A record whose metrics are known: only ACA and AIA matter."""
    aia = value if keywords.get("tasks") == 1 else value + 5
    numbers = Metrics(aca=value, aia=aia, reduction_rate=None, auc=None, iauc=None, til_accuracy=99.0)
    return make_record(*args, metrics=numbers, roc=None, **keywords)  # type: ignore[arg-type]


def main_table(records: list[Record]) -> Table:
    """The table of accuracies."""
    return next(table for table in build_tables(records) if table.key == "main")


def aca_cells(records: list[Record]) -> dict[str, Cell | None]:
    """The ACA of the first benchmark, by the row's label."""
    table = main_table(records)
    return {row.label: cells[0] for row, cells in table.rows.items()}


def held_out(record: Record) -> Record:
    """Scored on some of its training images, of which fewer are left to train on: that needs no other label."""
    data = {"scored_on": "validation", "train_images": record.data.train_images - 1, "test_images": 1}
    return record.model_copy(update={"data": record.data.model_copy(update=data)})
