"""A learner as a folder: ``learner.json`` (what it is), ``state.safetensors`` (what it learned), and the backbone.

Nothing is pickled. The folder is written under a temporary name and renamed. ``learner.json`` holds the sha256 of the
state and of itself, so damage is noticed. Since anyone can compute a sha256, :func:`load` trusts none of the content:
it checks names, shapes and types in the state's header before it makes room for them, and all values afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import morecl
from morecl.catalogue import SHIPPED
from morecl.digest import file_sha256
from morecl.errors import DamagedError, InputError, first_problem, placed
from morecl.files import atomic_folder, check_utf8, expanded, refuse_newer, sealed, write_json
from morecl.labels import decode, encode
from morecl.methods import Learner, method_class
from morecl.nn.backbone import Backbone, load_backbone
from morecl.nn.device import is_out_of_memory
from morecl.pictures import Pictures
from morecl.statefile import StateFile, write_with_images

LEARNER_FORMAT = "morecl.learner/2"
DESCRIPTION, STATE, BACKBONE = "learner.json", "state.safetensors", "backbone.safetensors"


class BackboneEntry(BaseModel):
    """Which backbone a learner was trained on."""

    model_config = ConfigDict(strict=True)

    name: str
    architecture: str
    sha256: str
    source_sha256: str = ""  # empty in older files
    included: bool  # whether the folder holds its weights

    def matches(self, backbone: Backbone) -> bool:
        """Whether ``backbone`` has these weights, or the same before they were resampled on another kind of CPU."""
        return backbone.sha256 == self.sha256 or backbone.source_sha256 == self.source_sha256 != ""


class Description(BaseModel):
    """``learner.json``. Keys that are not listed here are ignored."""

    model_config = ConfigDict(strict=True)

    method: str
    config: dict[str, Any]
    backbone: BackboneEntry
    classes: list[Any]  # encoded labels
    task_sizes: list[Annotated[int, Field(ge=1)]]
    seconds: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    state_sha256: str


def save(learner: Learner, folder: str | os.PathLike[str], *, include_backbone: bool = True) -> None:
    """Write ``learner`` to ``folder``. A learner that is already there is replaced; other content is refused.

    Args:
        include_backbone: write the backbone's weights too, so that the folder can be used where they are not available.
            The shipped backbone is never written.

    Raises:
        InputError: no learner can be saved there.
    """
    target = expanded(folder)
    if target.is_file():
        raise InputError(f"{target} is a file; a learner is saved as a folder")
    if target.exists() and any(target.iterdir()) and not (target / DESCRIPTION).is_file():
        raise InputError(f"{target} holds something that is not a saved learner; choose another folder")
    try:
        with atomic_folder(target) as temporary:
            write(learner, temporary, include_backbone=include_backbone)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        reason = f"{error.filename}: {error.strerror}"
        raise InputError(f"{target} cannot be written ({reason}); choose another folder") from error


def write(learner: Learner, folder: Path, *, include_backbone: bool) -> None:
    """Write the files of ``learner`` into an existing folder."""
    classes = [encode(label) for label in learner.classes]
    save_tensors(learner.state(), folder / STATE, learner.memory.unread)
    included = include_backbone and learner.backbone.name != SHIPPED
    if included:
        save_tensors(dict(learner.backbone.state), folder / BACKBONE)
    description = {
        "format": LEARNER_FORMAT,
        "morecl": morecl.__version__,
        "method": learner.name,
        "config": learner.config.model_dump(mode="json"),
        "backbone": {
            "name": learner.backbone.name,
            "architecture": learner.backbone.architecture,
            "sha256": learner.backbone.sha256,
            "source_sha256": learner.backbone.source_sha256,
            "included": included,
        },
        "classes": classes,
        "task_sizes": learner.task_sizes,
        "seconds": learner.seconds,
        "state_sha256": file_sha256(folder / STATE),
    }
    write_json(folder / DESCRIPTION, sealed(description))


def load(folder: str | os.PathLike[str], *, device: str | None = None, backbone: str | None = None) -> Learner:
    """Rebuild a saved learner.

    Args:
        device: where to put it. If not given, the device it was trained on ("auto" stays "auto").
        backbone: where the backbone's weights are now, if they are not in the folder and have moved.

    Raises:
        InputError: the folder is not a saved learner, is damaged, or its content does not fit together.
    """
    path = expanded(folder)
    description = _read_description(path)
    check_utf8(path)
    with placed(f"{path} holds a learner of a method that this morecl does not have"):
        cls = method_class(description.method)
    state = _open_state(path, description, cls.keeps_all)
    config = cls.Config.parse({**cls.Config.older, **description.config} | ({"device": device} if device else {}))
    loaded = _load_backbone(path, description.backbone, backbone, config)
    try:
        state.check_room(len(description.classes), loaded.vit.embed_dim, getattr(config, "bottleneck", 0))
        classes = [decode(value) for value in description.classes]
        if len(set(classes)) != len(classes):
            raise ValueError("two classes have the same label")
        learner = cls(config, loaded)
        state.check_fits(learner, classes, description.task_sizes)
        unread = state.unread()
        learner.restore(classes, description.task_sizes, state.read(classes, unread is None), unread)
    except InputError:
        raise
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise _damaged(path, str(error)) from error
    learner.seconds.update(description.seconds)
    return learner


def _read_description(path: Path) -> Description:
    """``learner.json``, after checks of its format, its seal and its types, in this order."""
    _check_is_learner(path)
    try:
        value = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        refuse_newer(path / DESCRIPTION, found, LEARNER_FORMAT)
        if found != LEARNER_FORMAT:
            raise InputError(
                f"{path / DESCRIPTION}: expected format {LEARNER_FORMAT}, found {found!s:.60}; "
                "it is damaged, or was written by another version of morecl"
            )
        intact = value == sealed(value)
    except InputError:
        raise
    except RecursionError as error:
        raise _damaged(path, f"{DESCRIPTION} is nested too deeply") from error
    except OSError as error:
        raise InputError(f"{path / DESCRIPTION} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise _damaged(path, f"{DESCRIPTION} cannot be read ({error})") from error
    if not intact:
        raise _damaged(path, f"{DESCRIPTION} is not as it was saved (its sha256 differs)")
    try:
        description = Description.model_validate(value)
    except ValidationError as error:
        raise _damaged(path, f"{DESCRIPTION}, {first_problem(error)}") from error
    if len(description.classes) != sum(description.task_sizes):
        raise _damaged(path, f"{len(description.classes)} classes in tasks of {sum(description.task_sizes)}")
    return description


def _check_is_learner(path: Path) -> None:
    """Raise if ``path`` has no ``learner.json``; say what it may be instead."""
    if (path / DESCRIPTION).is_file():
        return
    if not path.is_dir():
        reason = "it is a file" if path.exists() else "there is no such folder"
        raise InputError(f"{path} is not a saved learner: {reason}")
    if (path / STATE).is_file():
        raise _damaged(path, f"{DESCRIPTION} is missing")
    hint = ""
    if (path / "model" / DESCRIPTION).is_file():
        hint = f"; did you mean {path / 'model'}?"
    elif (path / "run.json").is_file():
        hint = f"; it is a run that has not finished, and `morecl resume {shlex.quote(str(path))}` completes it"
    elif (path / "model.json").is_file():
        hint = f"; it is a model of `morecl learn`, which morecl.Classifier.open({str(path)!r}) opens"
    raise InputError(f"{path} is not a saved learner: it has no {DESCRIPTION}{hint}")


def _open_state(path: Path, description: Description, leave_images: bool) -> StateFile:
    file = path / STATE
    if not file.is_file():
        raise _damaged(path, f"{STATE} is missing")
    try:
        if file_sha256(file) != description.state_sha256:
            raise _damaged(path, f"{STATE} is not the file that was saved (its sha256 differs)")
        return StateFile(file, leave_images)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, f"{STATE} cannot be read ({error})") from error


def _load_backbone(path: Path, saved: BackboneEntry, moved: str | None, config: Any) -> Backbone:
    """The backbone that the learner in ``path`` was trained on: from ``moved``, from the folder, or by its name."""
    own = path / BACKBONE
    way_out = f"give the weights that {path} was trained on: load(folder, backbone=...)"
    if moved is None and saved.included and not own.is_file():
        raise _damaged(path, f"{BACKBONE} is missing; {way_out}")
    included = f"{saved.architecture}@{own}" if saved.architecture else str(own)
    spec = moved or (included if saved.included else saved.name)
    try:
        loaded = load_backbone(spec, image_size=config.image_size, pretrained=config.pretrained, seed=config.seed)
    except InputError as error:
        raise InputError(f"{error} ({way_out})") from error
    if not saved.matches(loaded):
        raise InputError(f"the weights of backbone {spec} are not those that {path} was trained on (sha256 differs)")
    return loaded


def _damaged(path: Path, reason: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: {reason}")


def save_tensors(tensors: dict[str, Tensor], path: Path, unread: Pictures | None = None) -> None:
    """Write a safetensors file; an error of the disk is an ``OSError``."""
    found = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    try:
        save_file(found, path) if unread is None else write_with_images(path, found, unread)
    except SafetensorError as error:  # also wraps errors of the disk
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise OSError(f"cannot write {path.name}: {error}") from error
