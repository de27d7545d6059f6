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


class ImagesNow:
    """The images that are in users' folders now: looked at once, however many runs ask."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._fingerprints: dict[str, str] = {}

    def are_others(self, run: ResolvedRun, record: Record) -> bool:
        """Whether the images of ``run``, which left ``record``, have changed since.

        Only if a file was written since, the images are looked at: it may be a copy. Of runs that noted nothing,
        nobody knows.
        """
        before = run.plan.get(IMAGES)
        if before is None:
            return False
        place = run.recipe.dataset
        if place not in self._keys:
            self._keys[place] = images_key(run)
        if before["files"] == self._keys[place]:
            return False
        options = run.stream_options(before["side"])
        asked = repr((place, options))
        if asked not in self._fingerprints:
            self._fingerprints[asked] = build_stream(run.recipe, **options).dataset.fingerprint
        return self._fingerprints[asked] != record.data.fingerprint
