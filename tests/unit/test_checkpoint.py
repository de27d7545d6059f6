"""Saved learners load unchanged or are refused with a reason; a save that fails leaves nothing behind."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import morecl
import tiny
from morecl import checkpoint
from morecl.catalogue import SHIPPED
from morecl.digest import file_sha256
from morecl.errors import InputError
from morecl.files import sealed
from morecl.methods import Learner
from morecl.methods.more import More
from morecl.nn.families import plain

TEST = tiny.pictures(0, 4, draw=1)


@pytest.fixture(scope="module")
def learner() -> Learner:
    learner = tiny.create("more", backbone=SHIPPED)
    learner.learn_task(*tiny.task([0, 1], ["a", ("b", 2)], 4))
    learner.learn_task(*tiny.task([2], [3], 3))
    return learner


@pytest.fixture
def folder(learner: Learner, tmp_path: Path) -> Path:
    learner.save(tmp_path / "saved")
    return tmp_path / "saved"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], *, seal: bool = True) -> None:
    """Change ``learner.json``; with ``seal``, update its sha256."""
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
    assert value["classes"] == ["a", {"tuple": ["b", 2]}, 3]
    assert value["task_sizes"] == [2, 1]
    keys = load_file(folder / "state.safetensors").keys()
    assert {"memory.images", "memory.columns", "model.adapters.w1", "model.tasks.1.covariance"} <= keys


def test_identical_after_loading(learner: Learner, folder: Path) -> None:
    loaded = morecl.load(folder)
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(loaded))
    assert np.array_equal(loaded.scores(TEST), learner.scores(TEST))
    assert loaded.classes == ["a", ("b", 2), 3]


def test_the_folder_can_be_moved_and_saved_over(learner: Learner, folder: Path) -> None:
    moved = folder.parent / "elsewhere"
    folder.rename(moved)
    again = morecl.load(moved)
    again.learn_task(*tiny.task([3], ["new"], 3))
    again.save(moved)
    assert morecl.load(moved).classes == ["a", ("b", 2), 3, "new"]
    assert names(moved.parent) == ["elsewhere"]


def truncate(folder: Path) -> None:
    file = folder / "state.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def flip_a_bit(folder: Path) -> None:
    file = folder / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def forge_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors and update every sha256, as a forger would."""
    state = load_file(folder / "state.safetensors")
    change(state)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "state.safetensors")
    reseal(folder)


def reseal(folder: Path) -> None:
    edit(folder, lambda v: v.update(state_sha256=file_sha256(folder / "state.safetensors")))


def nan_weight(state: dict[str, torch.Tensor]) -> None:
    state["model.adapters.w1"].view(-1)[3] = float("nan")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated state": (truncate, "damaged: state.safetensors.*sha256"),
    "one bit of the state": (flip_a_bit, "damaged: state.safetensors.*sha256"),
    "empty state": (lambda f: (f / "state.safetensors").write_bytes(b""), "damaged: state.safetensors"),
    "state missing": (lambda f: (f / "state.safetensors").unlink(), "damaged: state.safetensors is missing"),
    "no description": (lambda f: (f / "learner.json").unlink(), "damaged: learner.json is missing"),
    "description cut": (lambda f: os.truncate(f / "learner.json", 200), "damaged: learner.json cannot be read"),
    "description is a list": (lambda f: (f / "learner.json").write_text("[]"), "expected format.*found list"),
    "description is nested": (
        lambda f: (f / "learner.json").write_text("[" * 200_000 + "]" * 200_000),
        "damaged: learner.json is nested too deeply",
    ),
    "description is not UTF-8": (lambda f: (f / "learner.json").write_bytes(b'{"\xff": 1}'), "damaged.*cannot be read"),
    "a name misspelt": (
        lambda f: edit(f, lambda v: v["config"].update(boutleneck=v["config"].pop("bottleneck")), seal=False),
        "damaged: learner.json is not as it was saved",
    ),
    "classes in another order": (
        lambda f: edit(f, lambda v: v["classes"].reverse(), seal=False),
        "damaged: learner.json is not as it was saved",
    ),
    "a setting changed": (
        lambda f: edit(f, lambda v: v["config"].update(temperature=50.0), seal=False),
        "damaged: learner.json is not as it was saved",
    ),
    "a number that is not JSON": (
        lambda f: edit(f, lambda v: v["seconds"].update(train=float("nan")), seal=False),
        "damaged: learner.json cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_with_its_place(folder: Path, damage: str) -> None:
    apply, message = DAMAGE[damage]
    apply(folder)
    with pytest.raises(InputError, match=message):
        morecl.load(folder)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer format": (lambda v: v.update(format="morecl.learner/9"), "the format morecl.learner/9.*a newer morecl"),
    "older format": (lambda v: v.update(format="morecl.learner/1"), "found morecl.learner/1.*another version"),
    "no format": (lambda v: v.pop("format"), "found None"),
    "no classes": (lambda v: v.pop("classes"), "damaged: learner.json, classes"),
    "a class missing": (lambda v: v["classes"].pop(), "damaged: 2 classes in tasks of 3"),
    "a class twice": (lambda v: v.update(classes=["a", "a", "b"]), "damaged: two classes have the same label"),
    "a class that is no label": (lambda v: v.update(classes=[1, 2, [3]]), "damaged.*label"),
    "a class nested deeply": (lambda v: v["classes"].__setitem__(0, nested(60)), "damaged.*label"),
    "other tasks": (lambda v: v.update(task_sizes=[1, 2]), "damaged: model.tasks"),
    "fewer tasks": (lambda v: v.update(task_sizes=[3]), "damaged: model.tasks"),
    "more tasks": (lambda v: v.update(task_sizes=[1, 1, 1]), "damaged: model.tasks.2.* is missing"),
    "tasks are text": (lambda v: v.update(task_sizes=["2", "1"]), "damaged: learner.json, task_sizes.0"),
    "tasks are fractions": (lambda v: v.update(task_sizes=[1.5, 1.5]), "damaged: learner.json, task_sizes.0"),
    "negative task": (lambda v: v.update(task_sizes=[4, -1]), "damaged: learner.json, task_sizes.1"),
    "empty task": (lambda v: v.update(task_sizes=[2, 0, 1]), "damaged: learner.json, task_sizes.1"),
    "huge task": (lambda v: v.update(task_sizes=[10**100, 1]), "damaged"),
    "other bottleneck": (lambda v: v["config"].update(bottleneck=8), "damaged"),
    "huge bottleneck": (lambda v: v["config"].update(bottleneck=2**16), "damaged: state.safetensors is too small"),
    "unknown setting": (lambda v: v["config"].update(epoch=8), "unknown setting 'epoch'"),
    "a class forgotten": (
        lambda v: v["classes"].__setitem__(0, {"forgotten": 0}),
        "damaged: rule.forgotten does not fit",
    ),
    "a class forgotten elsewhere": (lambda v: v["classes"].__setitem__(0, {"forgotten": -1}), "damaged.*not a label"),
    "forgotten within a tuple": (
        lambda v: v["classes"].__setitem__(0, {"tuple": [{"forgotten": 0}]}),
        "damaged.*not a label",
    ),
    "bad setting": (lambda v: v["config"].update(epochs=-8), "epochs=-8"),
    "settings are a list": (lambda v: v.update(config=[]), "damaged: learner.json, config"),
    "unknown method": (
        lambda v: v.update(method="mroe"),
        "a method that this morecl does not have: unknown method 'mroe'; did you mean 'more'",
    ),
    "method is a list": (lambda v: v.update(method=["more"]), "damaged: learner.json, method"),
    "no backbone": (lambda v: v.pop("backbone"), "damaged: learner.json, backbone"),
    "backbone is text": (lambda v: v.update(backbone="x"), "damaged: learner.json, backbone"),
    "backbone has a number for a name": (lambda v: v["backbone"].update(name=3), "learner.json, backbone.name"),
    "backbone left out": (lambda v: v["backbone"].update(included=True), "damaged: backbone.safetensors is missing"),
    "other backbone": (
        lambda v: v["backbone"].update(sha256="0" * 64, source_sha256="1" * 64),
        "weights of backbone .* are not those",
    ),
    "unknown backbone": (lambda v: v["backbone"].update(name="vit_mini_patch4_3"), "unknown backbone.*did you mean"),
    "seconds are text": (lambda v: v.update(seconds="x"), "damaged: learner.json, seconds"),
    "negative seconds": (lambda v: v["seconds"].update(train=-1.0), "damaged: learner.json, seconds.train"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_description_is_refused(folder: Path, forgery: str) -> None:
    apply, message = FORGED[forgery]
    edit(folder, apply)
    with pytest.raises(InputError, match=message):
        morecl.load(folder)


def nested(depth: int) -> Any:
    return {"tuple": [nested(depth - 1)]} if depth else 1


FORGED_STATE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "NaN": (nan_weight, "damaged: model.adapters.w1 holds NaN or infinite numbers"),
    "infinite": (lambda s: s["model.tasks.1.head.bias"].fill_(float("inf")), "damaged: model.tasks.1.head.bias holds"),
    "a tensor missing": (lambda s: s.pop("model.tasks.1.head.bias"), "damaged: model.tasks.1.head.bias is missing"),
    "a tensor too many": (lambda s: s.update({"model.x": torch.zeros(3)}), "damaged: model.x is not part of"),
    "no memory": (lambda s: s.pop("memory.columns"), "damaged: the replay memory is missing"),
    "nothing but memory": (
        lambda s: [s.pop(key) for key in list(s) if key.startswith("model.")],
        "damaged: state.safetensors is too small for 3 classes",
    ),
    "a weight of another type": (
        lambda s: s.update({"model.adapters.w1": s["model.adapters.w1"].half()}),
        "damaged: model.adapters.w1 is float16 .* instead of float32",
    ),
    "a weight of another shape": (
        lambda s: s.update({"model.adapters.w1": s["model.adapters.w1"].flatten()}),
        r"damaged: model.adapters.w1 is float32 \(9216,\) instead of float32",
    ),
    "flat images": (
        lambda s: s.update({"memory.images": s["memory.images"].flatten(1)}),
        "damaged: memory.images is uint8",
    ),
    "grey images": (
        lambda s: s.update({"memory.images": s["memory.images"][..., 0]}),
        "damaged: memory.images is uint8",
    ),
    "images without pixels": (
        lambda s: s.update({"memory.images": s["memory.images"][:, :, :0]}),
        "damaged: memory.images is uint8",
    ),
    "images of another type": (
        lambda s: s.update({"memory.images": s["memory.images"].float()}),
        "damaged: memory.images is float32",
    ),
    "fewer images than columns": (
        lambda s: s.update({"memory.images": s["memory.images"][1:]}),
        "damaged: memory.images is uint8",
    ),
    "a table of columns": (
        lambda s: s.update({"memory.columns": s["memory.columns"][:, None]}),
        "damaged: memory.columns is int64",
    ),
    "columns of another type": (
        lambda s: s.update({"memory.columns": s["memory.columns"].float()}),
        "damaged: memory.columns is float32",
    ),
    "a class that does not exist": (lambda s: s["memory.columns"].fill_(3), "damaged: memory.columns names classes"),
    "a negative class": (lambda s: s["memory.columns"].fill_(-1), "damaged: memory.columns names classes"),
    "more images than allowed": (
        lambda s: s.update({key: s[key].repeat_interleave(9, 0) for key in ("memory.images", "memory.columns")}),
        "damaged: the replay memory holds .* images; its limit is 12",
    ),
    "forgotten in the rule alone": (lambda s: s["rule.forgotten"].fill_(True), "damaged: rule.forgotten does not fit"),
    "forgotten as numbers": (
        lambda s: s.update({"rule.forgotten": torch.zeros(3)}),
        "damaged",
    ),
    "forgotten for more classes": (
        lambda s: s.update({"rule.forgotten": torch.zeros(4, dtype=torch.bool)}),
        "damaged: rule.forgotten does not fit",
    ),
    "negative images": (lambda s: s["model.tasks.0.counts"].fill_(-3), "damaged: model.tasks.0.counts holds numbers"),
    "more images than there can be": (
        lambda s: s["model.tasks.0.counts"].fill_(2**62),
        "damaged: model.tasks.0.counts",
    ),
    "a single count": (
        lambda s: s.update({"model.tasks.0.counts": torch.tensor(3)}),
        "mismatch for tasks.0.counts",
    ),
    "counts of no class": (
        lambda s: s.update({"model.tasks.0.counts": torch.ones(0).long()}),
        "mismatch for tasks.0.counts",
    ),
    "no spread": (lambda s: s.pop("model.tasks.0.spread"), "damaged: model.tasks.0.spread is missing"),
    "a head kept in part": (
        lambda s: s.update({"model.tasks.0.trained_head": s["model.tasks.0.trained_head"].new_zeros(1, 193)}),
        "mismatch for tasks.0.trained_head",
    ),
    "counts of other classes": (lambda s: s.update({"model.tasks.0.counts": torch.ones(5).long()}), "damaged"),
    "spread of other classes": (
        lambda s: s.update({"model.tasks.0.spread": s["model.tasks.0.spread"].repeat(2, 1)}),
        "damaged",
    ),
    "spread of another shape": (
        lambda s: s.update({"model.tasks.0.spread": s["model.tasks.0.spread"][:, :7]}),
        "damaged",
    ),
    "precision of another shape": (
        lambda s: s.update({"model.tasks.0.precision": s["model.tasks.0.precision"][:7]}),
        "damaged",
    ),
    "several counts": (lambda s: s.update({"memory.seen": torch.zeros(2).long()}), "damaged: memory.seen is int64"),
    "a negative count": (lambda s: s["memory.seen"].fill_(-1), "damaged: memory.seen is negative"),
    "notes of other images": (
        lambda s: s.update({"memory.extras.logits": torch.zeros(1, 3)}),
        "damaged: memory.extras.logits is float32",
    ),
}


def forge_forgotten(folder: Path, *columns: int, places: tuple[int, ...] | None = None) -> None:
    """Mark ``columns`` as forgotten, in the state and, with the columns ``places``, in the description."""
    forge_state(folder, lambda s: s["rule.forgotten"].__setitem__(list(columns), True))
    for column, place in zip(columns, places or columns, strict=True):
        edit(folder, lambda v, c=column, p=place: v["classes"].__setitem__(c, {"forgotten": p}))  # type: ignore[misc]


def test_forged_forgetting_is_refused(learner: Learner, folder: Path) -> None:
    forge_forgotten(folder, 1)
    with pytest.raises(InputError, match=r"damaged: memory.columns names classes that are forgotten"):
        morecl.load(folder)
    learner.save(folder)
    forge_forgotten(folder, 1, 2, places=(2, 1))
    with pytest.raises(InputError, match=r"damaged: a forgotten class is in another place"):
        morecl.load(folder)
    learner.save(folder)
    forge_forgotten(folder, 0, 1, 2)
    with pytest.raises(InputError, match=r"damaged: all classes are forgotten"):
        morecl.load(folder)


@pytest.mark.parametrize("forgery", FORGED_STATE)
def test_a_forged_state_is_refused(folder: Path, forgery: str) -> None:
    apply, message = FORGED_STATE[forgery]
    forge_state(folder, apply)
    with pytest.raises(InputError, match=message):
        morecl.load(folder)


def test_forged_classes_take_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before the learner makes room: 3 million heads of 192 numbers took 7.6 GB."""
    count = 100_000
    edit(folder, lambda v: v.update(classes=list(range(count)), task_sizes=[count]))
    monkeypatch.setattr(More, "_grow", lambda self, classes: pytest.fail("made room"))
    with pytest.raises(InputError, match=r"damaged: state.safetensors is too small for 100000 classes"):
        morecl.load(folder)


def test_forged_tasks_take_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has room for the classes, but not for norms, masks and statistics of as many tasks."""
    count = 2_000
    edit(folder, lambda v: v.update(classes=list(range(count)), task_sizes=[1] * count))
    forge_state(folder, lambda s: s.update({"model.x": torch.zeros(count + 4, 192)}))
    grown = []
    grow = More._grow
    monkeypatch.setattr(More, "_grow", lambda self, classes: grown.append(grow(self, classes)))
    with pytest.raises(InputError, match=r"damaged: model.tasks.* is missing"):
        morecl.load(folder)
    assert len(grown) < 20


def flipped(content: bytes, rng: np.random.Generator) -> bytes:
    """``content`` with one to three random bits changed."""
    changed = bytearray(content)
    for place in rng.integers(0, len(changed), rng.integers(1, 4)):
        changed[place] ^= 1 << int(rng.integers(8))
    return bytes(changed)


@pytest.mark.parametrize("name", ["learner.json", "state.safetensors"])
def test_flipped_bits_change_nothing_or_are_refused(learner: Learner, folder: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    original = (folder / name).read_bytes()
    refused = 0
    for _ in range(100):
        (folder / name).write_bytes(flipped(original, rng))
        try:
            loaded = morecl.load(folder)
        except InputError:
            refused += 1
        else:
            tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(loaded))
    assert refused > 80


def test_flipped_bits_under_a_forged_seal_never_crash(folder: Path) -> None:
    """As above, with every sha256 updated, so only the checks of the content are left. Most flips hit the header."""
    rng = np.random.default_rng(1)
    file = folder / "state.safetensors"
    original = file.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    refused = 0
    for index in range(100):
        end = header if index % 4 else len(original)
        file.write_bytes(flipped(original[:end], rng) + original[end:])
        reseal(folder)
        try:
            morecl.load(folder)
        except InputError:
            refused += 1
    assert refused > 60


def forgeries(value: Any, rng: np.random.Generator) -> Any:
    """``value`` with one of its parts replaced by something else."""
    replacements: list[Any] = [None, True, -1, 0, 10**30, 1e308, "", "x", [], {}, [[]], {"tuple": 1}]
    if not value or not isinstance(value, dict | list) or rng.random() < 0.2:
        return replacements[rng.integers(len(replacements))]
    changed = copy.copy(value)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key: Any = keys[int(rng.integers(len(keys)))]
    changed[key] = forgeries(value[key], rng)
    return changed


def test_forged_values_in_the_description_never_crash(folder: Path) -> None:
    rng = np.random.default_rng(2)
    file = folder / "learner.json"
    original = json.loads(file.read_text())
    refused = 0
    for _ in range(200):
        changed = forgeries(original, rng)
        file.write_text(json.dumps(sealed(changed) if isinstance(changed, dict) else changed))
        try:
            morecl.load(folder)
        except InputError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("path", ["nowhere", "empty", "file"])
def test_what_is_no_learner_at_all(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a saved learner"):
        morecl.load(tmp_path / path)


def test_the_folder_of_a_run_points_to_its_model(learner: Learner, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(InputError, match=f"has not finished, and `morecl resume '{run}'` completes it"):
        morecl.load(run)
    learner.save(run / "model")
    with pytest.raises(InputError, match=f"it has no learner.json; did you mean {run / 'model'}?"):
        morecl.load(run)


def test_a_model_of_ones_own_images_is_opened_otherwise(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(InputError, match=rf"morecl\.Classifier\.open\('{tmp_path}'\) opens"):
        morecl.load(tmp_path)


def test_a_learner_that_has_learned_nothing_can_be_saved(tmp_path: Path) -> None:
    for method in ("more", "single", "ncm"):
        tiny.create(method, backbone=SHIPPED).save(tmp_path / method)
        assert morecl.load(tmp_path / method).classes == []


@pytest.mark.parametrize("label", [frozenset({1}), b"bytes", 1j, ("a", b"b")])
def test_a_label_that_cannot_be_saved(label: Any, tmp_path: Path) -> None:
    learner = tiny.create("ncm", backbone=SHIPPED)
    learner.learn_task(tiny.pictures(0, 2), ["a", "a"])
    learner.classes[0] = label
    with pytest.raises(TypeError, match="cannot save the label"):
        learner.save(tmp_path / "saved")
    assert names(tmp_path) == []


def test_every_kind_of_label_comes_back_as_it_was(tmp_path: Path) -> None:
    labels: list[Any] = ["text", "", 0, -7, 10**30, 2.5, True, (), ("a", (1, None, 2.5)), "ünïcode"]
    learner = tiny.create("ncm", backbone=SHIPPED)
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
    with pytest.raises(InputError, match="Permission denied"):
        learner.save(tmp_path / "locked" / "saved")
    assert names(tmp_path / "locked") == []


def test_what_is_already_there_is_not_harmed(learner: Learner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        learner.save(tmp_path / "file")
    with pytest.raises(InputError, match=r"below cannot be written .*file: File exists"):
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
    """As above with weights from a file that is deleted before the learner is loaded."""
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
    learner = tiny.create("ncm", backbone=SHIPPED)
    weights = {key: value.detach() for key, value in morecl.create("ncm").backbone.state.items()}
    save_file(weights, tmp_path / "here.safetensors")
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 2))
    learner.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved", backbone=f"{SHIPPED}@{tmp_path / 'here.safetensors'}")
    assert np.array_equal(loaded.scores(TEST), learner.scores(TEST))
    save_file({key: value + 1 for key, value in weights.items()}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="are not those"):
        morecl.load(tmp_path / "saved", backbone=f"{SHIPPED}@{tmp_path / 'other.safetensors'}")


def test_a_learner_can_move_to_another_kind_of_cpu(
    learner: Learner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs round differently when the position embedding is resampled; the weights in the file are the same."""
    resample = plain.checkpoint_filter_fn

    def elsewhere(state: Any, vit: Any) -> Any:
        resampled = resample(state, vit)
        return resampled | {"pos_embed": resampled["pos_embed"] * (1 + 1e-6)}

    monkeypatch.setattr(plain, "checkpoint_filter_fn", elsewhere)
    loaded = morecl.load(folder)
    assert loaded.backbone.sha256 != learner.backbone.sha256
    assert np.allclose(loaded.scores(TEST), learner.scores(TEST), atol=1e-3)
    edit(folder, lambda v: v["backbone"].pop("source_sha256"))  # as older versions wrote it
    with pytest.raises(InputError, match="are not those"):
        morecl.load(folder)
    monkeypatch.undo()
    assert np.array_equal(morecl.load(folder).scores(TEST), learner.scores(TEST))


def test_a_full_disk_is_an_oserror_and_leaves_nothing(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors wraps errors of the disk in its own type; the command line handles OSError only."""

    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        learner.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_of_the_system_cannot_be_written_to(learner: Learner) -> None:
    with pytest.raises(InputError, match=r"^/proc/x cannot be written \(/proc/x: No .* directory\); choose another"):
        learner.save("/proc/x")


def test_a_learner_saved_before_a_setting_existed_answers_as_it_did(tmp_path: Path) -> None:
    """iCaRL scored by its head then."""
    learner = tiny.create("icarl", memory_size=8, epochs=1, backbone=SHIPPED)
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 4))
    learner.save(tmp_path / "saved")
    edit(tmp_path / "saved", lambda value: value["config"].pop("ood_score"))
    assert morecl.load(tmp_path / "saved").config.ood_score == "head"  # type: ignore[attr-defined]
    assert learner.config.ood_score == "softmax"  # type: ignore[attr-defined]


@pytest.mark.parametrize("unsketched", [False, True])
def test_a_learner_whose_sums_all_have_sketches_may_say_so_as_older_ones_did(tmp_path: Path, unsketched: bool) -> None:
    learner = tiny.create("morerp", projection=10, memory_size=8, epochs=1, backbone=SHIPPED)
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 4))
    learner.save(tmp_path / "saved")
    forge_state(
        tmp_path / "saved", lambda state: state.update({"rule.ridge.unsketched": torch.tensor([False, unsketched])})
    )
    if unsketched:
        with pytest.raises(InputError, match=r"ridge\.sketches are missing; an older morecl"):
            morecl.load(tmp_path / "saved")
    else:
        assert np.array_equal(morecl.load(tmp_path / "saved").scores(TEST), learner.scores(TEST))
