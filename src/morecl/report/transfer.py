"""Forward transfer: runs compared with models of single tasks, which another method (``single``) trained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from morecl import metrics
from morecl.errors import few
from morecl.records import Record
from morecl.report.grid import data_of, experiment_settings, weights_of
from morecl.report.paper import REFERENCE, method_title, setting

NETWORK = ("pretrained", "freeze_backbone", "bottleneck")  # must be the same
TRAINING = {"lr": "learning rate", "epochs": "number of epochs", "batch_size": "batch size"}  # should be


def with_fwt(records: Sequence[Record]) -> list[Record]:
    """The records with forward transfer, where runs of ``single`` have the same data, order and network.

    The reference is the diagonal of their task-incremental matrix, averaged over their seeds. References with different
    settings are not mixed: forward transfer then stays undefined, and :func:`morecl.report.notes.notes` says so.
    """
    filled = []
    for record, alone in _compared(records):
        if alone:
            diagonals = np.array([np.diag(np.array(single.til_matrix, dtype=np.float64)) for single in alone])
            update = {"fwt": metrics.fwt(record.accuracy_matrix, diagonals.mean(axis=0))}
            record = record.model_copy(update={"metrics": record.metrics.model_copy(update=update)})
        filled.append(record)
    return filled


def transfer_notes(records: Sequence[Record]) -> list[str]:
    """In which settings of training the single models differ from the runs that are compared with them."""
    parts = []
    for key, words in TRAINING.items():
        unlike: dict[str, None] = {}  # titles, each once
        for record, alone in _compared(records):
            if alone and setting(record, key) not in (None, setting(alone[0], key)):
                unlike[method_title(record.method)] = None
        if unlike:
            parts.append(f"another {words} than {few(sorted(unlike), 3)}")
    if not parts:
        return []
    return [f"Forward transfer compares with models of single tasks that were trained with {'; '.join(parts)}."]


def _compared(records: Sequence[Record]) -> list[tuple[Record, list[Record]]]:
    """Each record, and the runs of ``single`` that give its forward transfer; none if it has it or there are none."""
    weights = weights_of(records)

    def same(record: Record) -> tuple[Any, ...]:
        order, sizes = tuple(record.class_order), tuple(record.task_sizes)
        data = record.data.fingerprint, data_of(record), record.data.scored_on
        return record.benchmark, order, sizes, weights(record), *data

    references: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record.method == REFERENCE:
            references[same(record)].append(record)
    found = []
    for record in records:
        wanted = record.method != REFERENCE and record.metrics.fwt is None
        alone = [single for single in references.get(same(record), []) if _same_network(record, single)]
        found.append((record, alone if wanted and not _several_settings(alone) else []))
    return found


def _same_network(record: Record, single: Record) -> bool:
    """A method without adapters (nearest class mean) is compared with what adapters of any width learn."""
    for key in NETWORK:
        one, other = setting(record, key), setting(single, key)
        if None not in (one, other) and one != other:
            return False
    return True


def _several_settings(runs: Sequence[Record]) -> bool:
    return len({json.dumps(experiment_settings(record), sort_keys=True) for record in runs}) > 1
