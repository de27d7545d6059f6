"""How much of the adapters is taken, and how many more tasks fit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from morecl.methods import Learner
from morecl.methods.masked import MaskedLearner

FULL = 5.0  # percent of a layer that must be free for another task
IS_FULL = (  # said where no further task fits
    "the model is full: too few neurons are free for a further task like these. It can still be taught, but may learn "
    "new classes less well; a new model has room"
)


def taken(learner: Learner) -> dict[str, float]:
    """Percent of each layer's adapter neurons that finished tasks use and later ones cannot change."""
    if not isinstance(learner, MaskedLearner):
        return {}
    used: dict[str, NDArray[np.float32]] = {}  # blocks.0.attn.m1 -> whether some task uses the neuron
    for task in range(len(learner.task_sizes)):
        for place, mask in learner.masks(task).items():
            used[place] = np.maximum(used[place], mask) if place in used else mask
    layers: dict[str, list[NDArray[np.float32]]] = {}
    for place, mask in used.items():
        layers.setdefault(place.rsplit(".", 1)[0], []).append(mask)
    return {layer: 100 * float(np.concatenate(masks).mean()) for layer, masks in layers.items()}


def tasks_left(capacity: Mapping[str, float], tasks: int) -> int | None:
    """About how many more tasks fit before a layer has less than ``FULL`` percent free.

    Assumes that a further task takes the same share of what is free as the tasks so far did on average.
    """
    if not capacity or not tasks:
        return None
    used = max(capacity.values())
    if used <= 0:
        return None
    free = 1 - used / 100
    if 100 * free <= FULL:
        return 0
    each = free ** (1 / tasks)  # share of the free part that one task leaves free
    return int(np.floor(np.log(FULL / 100 / free) / np.log(each)))


def left(learner: Learner) -> int | None:
    """About how many more tasks fit into a learner; ``None`` if no limit is known."""
    return tasks_left(taken(learner), len(learner.task_sizes))
