"""Predictions on a Ray cluster: a task answers a chunk of images, and the answers come in the order of the images."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from morecl.errors import InputError
from morecl.on_ray import node
from morecl.on_ray.cluster import Cluster

if TYPE_CHECKING:  # these import torch
    from morecl.classifier import Answer
    from morecl.methods import Learner

BATCHES = 4  # of the network, in a chunk
TRIES = 4  # of a chunk whose node or worker is lost


def answers(
    cluster: Cluster,
    model: Path,
    version: int,
    learner: Learner,
    paths: Iterable[str],
    *,
    device: str | None,
    top: int,
    accept: float,
) -> Iterator[Answer]:
    """As :meth:`morecl.Classifier.answers` of a version of the model in ``model``, in bounded memory.

    Chunks are whole batches, so on a CPU with the same number of threads the answers are the same, bit for bit.

    Args:
        learner: that of this version, on a CPU; its batches are those of the nodes.
    """
    import ray

    from morecl.methods.base import EVAL_BATCH_SIZE

    resources = cluster.resources(device or "auto")
    batch_size = learner.eval_batch_size
    if not resources["num_gpus"]:
        device = "cpu"
    elif learner.config.eval_batch_size is None:
        batch_size = EVAL_BATCH_SIZE["cuda"]
    around = node.Surroundings.here(cluster.cpus)
    task = ray.remote(**resources, max_retries=TRIES - 1, scheduling_strategy="SPREAD")(node.answer)
    source = iter(paths)
    pending: deque[Any] = deque()
    try:
        while True:
            while len(pending) < 2 * cluster.slots and (chunk := list(islice(source, BATCHES * batch_size))):
                pending.append(task.remote(model.absolute(), version, device, chunk, around, top, accept))
            if not pending:
                return
            yield from _received(pending[0])
            pending.popleft()
    finally:
        for waiting in pending:
            with suppress(Exception):
                ray.cancel(waiting, force=True)


def _received(waiting: Any) -> list[Answer]:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        found: list[Answer] = ray.get(waiting)
    except RayTaskError as error:
        raise InputError(node.reason(error)) from error
    except RayError as error:
        raise InputError(f"images were given to {TRIES} workers in turn, and all were lost: {error}") from error
    for answer in found:
        if answer.error == "does not exist" and answer.path and os.path.exists(answer.path):
            raise InputError(f"a node does not see {answer.path}; images have to be on storage that all nodes see")
    return found
