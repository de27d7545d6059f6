"""The files of one version of a model: written, read, and checked.

learner.json, state.safetensors, ...    the learner (see morecl.checkpoint)
classifier.json                         images per class, curve, temperature; sealed
held.safetensors                        the held-back images, and what they say about the learner
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from morecl.digest import file_sha256
from morecl.errors import InputError, first_problem
from morecl.files import SEAL, refuse_newer, sealed, write_json

if TYPE_CHECKING:  # these import torch
    from morecl.classifier.core import Classifier

FORMAT = "morecl.model/1"
DETAILS, HELD = "classifier.json", "held.safetensors"

T = TypeVar("T", bound=BaseModel)


class Details(BaseModel):
    """``classifier.json``: what a classifier has beside its learner."""

    model_config = ConfigDict(strict=True)

    images: list[Annotated[int, Field(ge=0)]]
    curve: list[dict[str, Any]]
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    held_sha256: str


def write(classifier: Classifier, folder: Path, before: Path | None) -> None:
    import torch

    from morecl import checkpoint

    checkpoint.write(classifier.learner, folder, include_backbone=True)
    _share(folder / checkpoint.BACKBONE, before / checkpoint.BACKBONE if before else None)
    tensors = {
        "images": torch.from_numpy(classifier.held.images),
        "columns": torch.from_numpy(classifier.held.columns),
        "ood_scores": torch.from_numpy(classifier.measured.ood_scores),
        "right": torch.from_numpy(classifier.measured.right),
        "seen": torch.from_numpy(classifier.seen.prints.view("int64")),
        "seen_columns": torch.from_numpy(classifier.seen.columns),
    }
    checkpoint.save_tensors(tensors, folder / HELD)
    details = {
        "format": FORMAT,
        "images": classifier.images,
        "curve": classifier.curve,
        "temperature": classifier.temperature,
        "held_sha256": file_sha256(folder / HELD),
    }
    write_json(folder / DETAILS, sealed(details))


def _share(file: Path, other: Path | None) -> None:
    """Replace ``file`` by a hard link to ``other`` if they are the same and the file system can."""
    if other is None or not file.is_file() or not other.is_file() or file.stat().st_size != other.stat().st_size:
        return
    if file_sha256(file) != file_sha256(other):
        return
    link = file.with_name(f"{file.name}.link")
    with suppress(OSError):
        os.link(other, link)
        os.replace(link, file)


def has_other_format(folder: Path) -> bool:
    """Whether a version is whole as far as can be seen, but of a format that is not this morecl's."""
    from morecl.checkpoint import LEARNER_FORMAT

    for name, expected in ((DETAILS, FORMAT), ("learner.json", LEARNER_FORMAT)):
        with suppress(OSError, ValueError, RecursionError):
            value = json.loads((folder / name).read_text(encoding="utf-8"))
            if isinstance(value, dict) and value.get("format", expected) != expected:
                return True
    return False


def read(folder: Path, device: str | None) -> Classifier:
    import numpy as np

    from morecl import checkpoint
    from morecl.classifier.core import Classifier, Measured
    from morecl.classifier.holding import HeldBack, Seen

    learner = checkpoint.load(folder, device=device)
    details = read_sealed(folder / DETAILS, Details)
    held = _read_held(folder / HELD, details.held_sha256)
    count, classes, side = len(held["columns"]), len(learner.classes), learner.backbone.input.resize
    expected = {
        "images": ((count, side, side, 3), np.uint8),
        "columns": ((count,), np.int64),
        "ood_scores": ((count,), np.float64),
        "right": ((count,), np.bool_),
        "seen": (held["seen"].shape[:1], np.int64),
        "seen_columns": (held["seen"].shape[:1], np.int64),
    }
    for key, (shape, kind) in expected.items():
        if held[key].shape != shape or held[key].dtype != kind:
            raise InputError(f"{folder} is damaged: {HELD}, {key} is {held[key].dtype} {held[key].shape}")
    columns = np.concatenate([held["columns"], held["seen_columns"]])
    if len(details.images) != classes or (len(columns) and not 0 <= columns.min() <= columns.max() < classes):
        raise InputError(f"{folder} is damaged: {DETAILS} and {HELD} do not fit its learner")
    if not np.isfinite(held["ood_scores"]).all():
        raise InputError(f"{folder} is damaged: {HELD} holds scores that are not finite")
    return Classifier(
        learner,
        held=HeldBack(held["images"], held["columns"]),
        seen=Seen(held["seen"].view(np.uint64), held["seen_columns"]),
        images=details.images,
        curve=details.curve,
        measured=Measured(held["ood_scores"], held["right"], details.temperature),
    )


def _read_held(file: Path, sha256: str) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        if file_sha256(file) != sha256:
            raise InputError(f"{file} is damaged: it is not the file that was saved (its sha256 differs)")
        held = load_file(file)
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} is damaged: {error}") from error
    if missing := {"images", "columns", "ood_scores", "right", "seen", "seen_columns"} - held.keys():
        raise InputError(f"{file} is damaged: it has no {', '.join(sorted(missing))}")
    return held


def read_sealed(file: Path, kind: type[T]) -> T:
    """A JSON file of this format, checked against its seal."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            refuse_newer(file, value.get("format"), FORMAT)
        if not isinstance(value, dict) or value.get("format") != FORMAT or value != sealed(value):
            raise InputError(f"{file} is damaged, or was written by another version of morecl (expected {FORMAT})")
        return kind.model_validate({key: part for key, part in value.items() if key not in ("format", SEAL)})
    except InputError:
        raise
    except ValidationError as error:
        raise InputError(f"{file} is damaged: {first_problem(error)}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read ({error})") from error
