"""Whether images and weights are still those that a finished run had."""

from __future__ import annotations

from typing import Any

from morecl.catalogue import SHIPPED
from morecl.data import build_stream
from morecl.data.datasets import data_key
from morecl.records import Record
from morecl.run.request import ResolvedRun

IMAGES = "images"  # in the plan of a run, if they are in files


def images_key(run: ResolvedRun) -> str:
    """See :func:`morecl.data.datasets.data_key`."""
    return data_key(run.recipe.dataset, run.data_root)


def noted(key: str, side: int) -> dict[str, Any]:
    """What a run's plan keeps of its images, stored at ``side`` pixels; nothing without a ``key``."""
    return {IMAGES: {"files": key, "side": side}} if key else {}


class InputsNow:
    """The images and weights that runs would have now: looked at once, however many runs ask."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._fingerprints: dict[str, str] = {}
        self._weights: dict[str, str] = {}

    def other_images(self, there: ResolvedRun, here: ResolvedRun, record: Record) -> bool:
        """Whether the run ``here`` would have other images than the one ``there``, which left ``record``.

        Only if files differ in size or time, the images are looked at: they may be copies. False where it cannot be
        told: for runs that noted nothing, and for data that are not on this machine.
        """
        before = there.plan.get(IMAGES)
        if before is None:
            return False
        place = repr((here.recipe.dataset, here.data_root))
        if place not in self._keys:
            self._keys[place] = images_key(here)
        if self._keys[place] in ("", before["files"]):
            return False
        options = here.stream_options(before["side"])
        asked = repr((place, here.recipe, options))
        if asked not in self._fingerprints:
            self._fingerprints[asked] = build_stream(here.recipe, **options, download=False).dataset.fingerprint
        return self._fingerprints[asked] != record.data.fingerprint

    def other_weights(self, here: ResolvedRun, record: Record) -> bool:
        """Whether the file of weights that the run ``here`` names has other weights than those of ``record``.

        False where it cannot be told: for weights that are in no file, and for records without a hash of them.
        """
        spec = here.config.backbone
        if not record.backbone.source_sha256 or spec == SHIPPED:
            return False
        if spec not in self._weights:
            from morecl.nn.backbone import weights_in_file  # imports timm, which takes seconds

            self._weights[spec] = weights_in_file(spec)
        return self._weights[spec] not in ("", record.backbone.source_sha256)
