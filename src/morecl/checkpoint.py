"""A learner as a folder: ``learner.json`` (what it is), ``state.safetensors`` (what it learned), and the backbone.

No pickle anywhere. The folder is written beside its place and renamed, and ``learner.json`` holds the sha256 of the
state and its own, so a damaged folder does not load.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import morecl
from morecl.catalogue import SHIPPED
from morecl.errors import InputError
from morecl.files import atomic_folder, sealed, write_json
from morecl.labels import decode, encode
from morecl.methods import Learner, method_class
from morecl.nn.backbone import load_backbone

FORMAT = "morecl.learner/2"
DESCRIPTION, STATE, BACKBONE = "learner.json", "state.safetensors", "backbone.safetensors"


def save(learner: Learner, folder: str | os.PathLike[str], *, include_backbone: bool = True) -> None:
    """Write ``learner`` to ``folder``, replacing a learner that is there; any other folder with content is refused.

    Args:
        include_backbone: put the backbone's weights into the folder, so that it can be used where they are not at
            hand. The shipped backbone is never written.
    """
    target = Path(folder)
    if target.is_file():
        raise InputError(f"{target} is a file; a learner is saved as a folder")
    if target.exists() and any(target.iterdir()) and not (target / DESCRIPTION).is_file():
        raise InputError(f"{target} holds something that is not a saved learner; choose another folder")
    with atomic_folder(target) as temporary:
        write(learner, temporary, include_backbone=include_backbone)


def write(learner: Learner, folder: Path, *, include_backbone: bool) -> None:
    """Write the files of ``learner`` into an existing folder."""
    classes = [encode(label) for label in learner.classes]
    state = {key: value.detach().cpu().contiguous() for key, value in learner.state().items()}
    _save_tensors(state, folder / STATE)
    included = include_backbone and learner.backbone.name != SHIPPED
    if included:
        weights = {key: value.detach().cpu().contiguous() for key, value in learner.backbone.state.items()}
        _save_tensors(weights, folder / BACKBONE)
    description = {
        "format": FORMAT,
        "morecl": morecl.__version__,
        "method": learner.name,
        "config": learner.config.model_dump(mode="json"),
        "backbone": {
            "name": learner.backbone.name,
            "architecture": learner.backbone.architecture,
            "sha256": learner.backbone.sha256,
            "included": included,
        },
        "classes": classes,
        "task_sizes": learner.task_sizes,
        "seconds": learner.seconds,
        "state_sha256": _sha256(folder / STATE),
    }
    write_json(folder / DESCRIPTION, sealed(description))


def load(folder: str | os.PathLike[str], *, device: str | None = None, backbone: str | None = None) -> Learner:
    """Rebuild a saved learner.

    Args:
        device: where to put it; where it was trained ("auto" stays "auto") if not given.
        backbone: where the backbone's weights are now, if they are not in the folder and have moved.
    """
    path = Path(folder)
    description = _read_description(path)
    try:
        cls = method_class(description["method"])
        settings = description["config"] | ({"device": device} if device else {})
        config = cls.Config.parse(settings)
        info = description["backbone"]
        classes = [decode(value) for value in description["classes"]]
        sizes = [int(size) for size in description["task_sizes"]]
        seconds = {str(key): float(value) for key, value in description["seconds"].items()}
        expected = description["state_sha256"]
        if len(classes) != sum(sizes) or len(set(classes)) != len(classes):
            raise ValueError(f"{len(classes)} classes, {len(set(classes))} of them different, for tasks of {sizes}")
        spec = f"{info['architecture']}@{path / BACKBONE}" if info["architecture"] else str(path / BACKBONE)
        spec = backbone or (spec if info["included"] else info["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path / DESCRIPTION} is damaged: {type(error).__name__} {error}") from error
    if description != sealed(description):
        raise InputError(f"{path} is damaged: {DESCRIPTION} is not as it was saved (its sha256 differs)")
    state_file = path / STATE
    if not state_file.is_file():
        raise InputError(f"{path} is damaged: {STATE} is missing")
    if _sha256(state_file) != expected:
        raise InputError(f"{path} is damaged: {STATE} is not the file that was saved (its sha256 differs)")
    try:
        loaded = load_backbone(spec, image_size=config.image_size, pretrained=config.pretrained, seed=config.seed)
    except InputError as error:
        raise InputError(
            f"{error} (give the weights that {path} was trained on: load(folder, backbone=...))"
        ) from error
    if loaded.sha256 != info["sha256"]:
        raise InputError(f"the weights of backbone {spec} are not those that {path} was trained on (sha256 differs)")
    learner = cls(config, loaded)
    try:
        learner.restore(classes, sizes, load_file(state_file))
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    learner.seconds = seconds
    return learner


def _read_description(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION
    if not file.is_file():
        raise InputError(f"{path} is not a saved learner: it has no {DESCRIPTION}")
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else type(description).__name__
        raise InputError(f"{file}: expected format {FORMAT}, found {found}")
    return description


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # what the disk says, which has no type of its own there
        raise OSError(f"cannot write {path.name}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
