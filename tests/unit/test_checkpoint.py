"""Saved learners: whole, or refused with the reason; a save that fails leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import morecl
import tiny
from morecl import checkpoint
from morecl.catalogue import SHIPPED
from morecl.errors import InputError
from morecl.files import sealed
from morecl.methods import Learner

TEST = tiny.pictures(0, 4, draw=1)


@pytest.fixture(scope="module")
def learner() -> Learner:
    learner = tiny.create("more")
    learner.learn_task(*tiny.task([0, 1], ["a", ("b", 2)], 4))
    learner.learn_task(*tiny.task([2], [None], 3))
    return learner


@pytest.fixture
def folder(learner: Learner, tmp_path: Path) -> Path:
    learner.save(tmp_path / "saved")
    return tmp_path / "saved"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], *, seal: bool = True) -> None:
    """Change ``learner.json``; with ``seal`` so that it agrees with its own sha256 again."""
    file = folder / "learner.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(sealed(value) if seal else value))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_in_the_folder(folder: Path) -> None:
    assert names(folder) == ["learner.json", "state.safetensors"]  # the shipped backbone is not written
    value = json.loads((folder / "learner.json").read_text())
    assert value["format"] == "morecl.learner/2"
    assert value["method"] == "more"
    assert value["classes"] == ["a", {"tuple": ["b", 2]}, None]
    assert value["task_sizes"] == [2, 1]
    keys = load_file(folder / "state.safetensors").keys()
    assert {"memory.images", "memory.columns", "model.adapters.w1", "model.tasks.1.covariance"} <= keys


def test_identical_after_loading(learner: Learner, folder: Path) -> None:
    loaded = morecl.load(folder)
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(loaded))
    assert np.array_equal(loaded.scores(TEST), learner.scores(TEST))
    assert loaded.classes == ["a", ("b", 2), None]


def test_the_folder_can_be_moved_and_saved_over(learner: Learner, folder: Path) -> None:
    moved = folder.parent / "elsewhere"
    folder.rename(moved)
    again = morecl.load(moved)
    again.learn_task(*tiny.task([3], ["new"], 3))
    again.save(moved)
    assert morecl.load(moved).classes == ["a", ("b", 2), None, "new"]
    assert names(moved.parent) == ["elsewhere"]


def truncate(folder: Path) -> None:
    file = folder / "state.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def flip_a_bit(folder: Path) -> None:
    file = folder / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def other_tensors(folder: Path) -> None:
    """Consistent with itself, but not a learner's state."""
    save_file({"x": load_file(folder / "state.safetensors")["memory.columns"]}, folder / "state.safetensors")
    edit(folder, lambda v: v.update(state_sha256=checkpoint._sha256(folder / "state.safetensors")))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated state": (truncate, "damaged: state.safetensors.*sha256"),
    "one bit of the state": (flip_a_bit, "damaged: state.safetensors.*sha256"),
    "empty state": (lambda f: (f / "state.safetensors").write_bytes(b""), "damaged: state.safetensors"),
    "state missing": (lambda f: (f / "state.safetensors").unlink(), "state.safetensors is missing"),
    "other tensors": (other_tensors, "damaged"),
    "no description": (lambda f: (f / "learner.json").unlink(), "not a saved learner: it has no learner.json"),
    "description cut": (lambda f: os.truncate(f / "learner.json", 200), "learner.json cannot be read"),
    "description is a list": (lambda f: (f / "learner.json").write_text("[]"), "expected format.*found list"),
    "wrong format": (lambda f: edit(f, lambda v: v.update(format="morecl.learner/9")), "found morecl.learner/9"),
    "no format": (lambda f: edit(f, lambda v: v.pop("format")), "found None"),
    "no classes": (lambda f: edit(f, lambda v: v.pop("classes")), "learner.json is damaged.*classes"),
    "a class missing": (lambda f: edit(f, lambda v: v["classes"].pop()), "damaged.*2 classes"),
    "a class twice": (lambda f: edit(f, lambda v: v.update(classes=["a", "a", "b"])), "damaged.*classes"),
    "a class that is no label": (lambda f: edit(f, lambda v: v.update(classes=[1, 2, [3]])), "damaged.*label"),
    "other tasks": (lambda f: edit(f, lambda v: v.update(task_sizes=[1, 2])), "damaged"),
    "fewer tasks": (lambda f: edit(f, lambda v: v.update(task_sizes=[3])), "damaged"),
    "tasks are text": (lambda f: edit(f, lambda v: v.update(task_sizes=["x"])), "learner.json is damaged"),
    "negative task": (lambda f: edit(f, lambda v: v.update(task_sizes=[4, -1])), "damaged"),
    "other bottleneck": (lambda f: edit(f, lambda v: v["config"].update(bottleneck=8)), "damaged"),
    "unknown setting": (lambda f: edit(f, lambda v: v["config"].update(epoch=8)), "unknown setting 'epoch'"),
    "bad setting": (lambda f: edit(f, lambda v: v["config"].update(epochs=-8)), "epochs=-8"),
    "unknown method": (lambda f: edit(f, lambda v: v.update(method="mroe")), "did you mean 'more'"),
    "no backbone": (lambda f: edit(f, lambda v: v.pop("backbone")), "learner.json is damaged.*backbone"),
    "backbone is text": (lambda f: edit(f, lambda v: v.update(backbone="x")), "learner.json is damaged"),
    "seconds are text": (lambda f: edit(f, lambda v: v.update(seconds="x")), "learner.json is damaged"),
    "other backbone": (
        lambda f: edit(f, lambda v: v["backbone"].update(sha256="0" * 64)),
        "weights of backbone .* are not those",
    ),
    "unknown backbone": (
        lambda f: edit(f, lambda v: v["backbone"].update(name="vit_mini_patch4_3")),
        "unknown backbone.*did you mean",
    ),
    "classes in another order": (
        lambda f: edit(f, lambda v: v["classes"].reverse(), seal=False),
        "learner.json is not as it was saved",
    ),
    "a setting changed": (
        lambda f: edit(f, lambda v: v["config"].update(temperature=50.0), seal=False),
        "learner.json is not as it was saved",
    ),
    "backbone left out": (lambda f: edit(f, lambda v: v["backbone"].update(included=True)), "backbone.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_said(folder: Path, damage: str) -> None:
    apply, message = DAMAGE[damage]
    apply(folder)
    with pytest.raises(InputError, match=message):
        morecl.load(folder)


@pytest.mark.parametrize("path", ["nowhere", "empty", "file"])
def test_what_is_no_learner_at_all(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a saved learner"):
        morecl.load(tmp_path / path)


@pytest.mark.parametrize("label", [frozenset({1}), b"bytes", 1j, ("a", b"b")])
def test_a_label_that_cannot_be_saved(label: Any, tmp_path: Path) -> None:
    learner = tiny.create("ncm")
    learner.learn_task(tiny.pictures(0, 2), ["a", "a"])
    learner.classes[0] = label  # which learn_task refuses
    with pytest.raises(TypeError, match="cannot save the label"):
        learner.save(tmp_path / "saved")
    assert names(tmp_path) == []


def test_every_kind_of_label_comes_back_as_it_was(tmp_path: Path) -> None:
    labels: list[Any] = ["text", "", 0, -7, 10**30, 2.5, True, None, (), ("a", (1, None, 2.5)), "ünïcode"]
    learner = tiny.create("ncm")
    learner.learn_task(np.concatenate([tiny.pictures(k, 1) for k in range(len(labels))]), labels)
    learner.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved").classes
    assert loaded == labels
    assert [type(label) for label in loaded] == [type(label) for label in labels]


def test_a_save_that_fails_keeps_the_old_one(learner: Learner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match="no space left"):
        learner.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert names(folder.parent) == ["saved"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_to(learner: Learner, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        learner.save(tmp_path / "locked" / "saved")
    assert names(tmp_path / "locked") == []


def test_what_is_already_there_is_not_harmed(learner: Learner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        learner.save(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        learner.save(tmp_path / "file" / "below")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").write_text("mine")
    with pytest.raises(InputError, match="not a saved learner"):
        learner.save(tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    learner.save(tmp_path / "empty")
    assert names(tmp_path) == ["empty", "file", "mine"]
    assert names(tmp_path / "mine") == ["photo.png"]


def test_other_backbones_travel_with_the_folder(tmp_path: Path) -> None:
    learner = tiny.create("ncm", backbone="test_vit", pretrained=False, image_size=32)
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 2))
    learner.save(tmp_path / "with")
    learner.save(tmp_path / "without", include_backbone=False)
    assert names(tmp_path / "with") == ["backbone.safetensors", "learner.json", "state.safetensors"]
    assert names(tmp_path / "without") == ["learner.json", "state.safetensors"]
    for name in ("with", "without"):  # random weights come back from the seed
        loaded = morecl.load(tmp_path / name)
        assert np.array_equal(loaded.scores(TEST), learner.scores(TEST))
        assert loaded.backbone.sha256 == learner.backbone.sha256
    again = tmp_path / "again"
    morecl.load(tmp_path / "with").save(again)
    assert np.array_equal(morecl.load(again).scores(TEST), learner.scores(TEST))


def test_a_trained_checkpoint_travels_too(tmp_path: Path) -> None:
    """As above with weights from a file, which is gone when the learner is loaded."""
    weights = tmp_path / "weights.safetensors"
    state = {key: value.detach() + 0.01 for key, value in morecl.create("ncm").backbone.state.items()}
    save_file(state, weights)
    learner = tiny.create("more", backbone=f"{SHIPPED}@{weights}", image_size=16)
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 3))
    learner.save(tmp_path / "saved")
    weights.unlink()
    loaded = morecl.load(tmp_path / "saved")
    assert np.array_equal(loaded.scores(TEST), learner.scores(TEST))


def test_weights_that_have_moved_can_be_named(tmp_path: Path) -> None:
    learner = tiny.create("ncm")
    weights = {key: value.detach() for key, value in morecl.create("ncm").backbone.state.items()}
    save_file(weights, tmp_path / "here.safetensors")
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 2))
    learner.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved", backbone=f"{SHIPPED}@{tmp_path / 'here.safetensors'}")
    assert np.array_equal(loaded.scores(TEST), learner.scores(TEST))
    save_file({key: value + 1 for key, value in weights.items()}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="are not those"):
        morecl.load(tmp_path / "saved", backbone=f"{SHIPPED}@{tmp_path / 'other.safetensors'}")


def test_a_full_disk_is_an_oserror_and_leaves_nothing(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an error of its own for what the disk says; the command line knows only OSError."""

    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        learner.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
