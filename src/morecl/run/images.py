"""Whether the images of a user's folder are still those that a finished run had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from morecl.data import build_stream
from morecl.data.datasets import FOLDER
from morecl.data.folder import files_key
from morecl.records import Record
from morecl.run.request import ResolvedRun

IMAGES = "images"  # in the plan of a run, if they are in a user's folder


def images_key(run: ResolvedRun) -> str:
    """See :func:`morecl.data.folder.files_key`; empty if the images are in no folder of the user's."""
    name = run.recipe.dataset
    return files_key(Path(name.removeprefix(FOLDER)).expanduser()) if name.startswith(FOLDER) else ""


def noted(key: str, side: int) -> dict[str, Any]:
    """What a run's plan keeps of its images, stored at ``side`` pixels; nothing without a ``key``."""
    return {IMAGES: {"files": key, "side": side}} if key else {}


def are_others(run: ResolvedRun, record: Record, key: str) -> bool:
    """Whether the images of ``run``, which left ``record``, have changed since; ``key``: :func:`images_key` of now.

    Only if a file was written since, the images are looked at: it may be a copy. Of runs that noted nothing, nobody
    knows.
    """
    before = run.plan.get(IMAGES)
    if not key or before is None or before["files"] == key:
        return False
    request = run.request
    stream = build_stream(
        run.recipe,
        data_root=run.data_root,
        class_order=request.class_order,
        seed=request.seed,
        tasks=request.tasks,
        train_per_class=request.train_per_class,
        test_per_class=request.test_per_class,
        folder_size=before["side"],
        validation=request.validation,
    )
    return stream.dataset.fingerprint != record.data.fingerprint
