"""A model's folder: versions, going back, damage, and that nothing is ever half-written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from safetensors import SafetensorError

import morecl
import tiny
from morecl import checkpoint
from morecl import export as exporting
from morecl.catalogue import SHIPPED
from morecl.classifier import Classifier, ModelFolder, changes, version_files
from morecl.classifier.store import MODEL, VERSIONS
from morecl.classifier.version_files import DETAILS, HELD
from morecl.errors import InputError
from morecl.files import sealed


def classifier(*kinds: int) -> Classifier:
    made = Classifier(tiny.create("morerp", memory_size=20, backbone=SHIPPED))
    for kind in kinds:
        made.learn(list(tiny.pictures(kind, 12)), [f"k{kind}"] * 12)
    return made


@pytest.fixture(scope="module")
def first() -> Classifier:
    return classifier(0, 1)


@pytest.fixture
def model(first: Classifier, tmp_path: Path) -> ModelFolder:
    folder = ModelFolder(tmp_path / "model")
    with folder.changing():
        folder.commit(first, "learn", "k0, k1")
    return folder


def test_a_model_comes_back_as_it_was(first: Classifier, model: ModelFolder) -> None:
    again = Classifier.open(model.path)
    x = list(tiny.pictures(0, 5, draw=3))
    assert again.predict(x) == first.predict(x)
    assert again.info() == first.info() and again.curve == first.curve
    assert np.array_equal(again.held.images, first.held.images) and np.array_equal(again.seen.prints, first.seen.prints)
    again.learn(list(tiny.pictures(5, 10)), ["k5"] * 10)
    assert first.classes == ["k0", "k1"]


def test_a_tilde_is_the_home_folder(first: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    first.save("~/model")
    assert Classifier.open(Path("~/model")).classes == first.classes
    first.learner.save("~/learner")
    assert morecl.load("~/learner").classes == first.learner.classes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learner", "model"]
    for missing in (lambda: morecl.read_record("~/r.json"), lambda: ModelFolder("~/none").versions()):
        with pytest.raises(InputError, match=re.escape(str(tmp_path))):
            missing()
    for export in (first.export, lambda path: exporting.export(first.learner, path)):
        with pytest.raises(InputError, match=re.escape(f"{tmp_path} is a folder")):
            export("~")
    with pytest.raises(InputError, match="there is no model in ~no-such-user/m"):
        Classifier.open("~no-such-user/m")


def test_a_folder_that_is_not_utf8_is_to_be_renamed(
    first: Classifier, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = model.path.rename(model.path.with_name(os.fsdecode(b"caf\xe9")))
    for call in (
        lambda: Classifier.open(moved),
        lambda: Classifier.open(moved, version=1),
        lambda: morecl.load(moved / VERSIONS / "1"),
        lambda: first.save(moved),
        lambda: first.save(moved / "new"),
    ):
        with pytest.raises(InputError, match=r"is not UTF-8, and no model .*: rename the folder$"):
            call()
    assert not (moved / "new").exists() and [version.number for version in ModelFolder(moved).versions()] == [1]
    monkeypatch.chdir(moved)
    assert Classifier.open(".").classes == first.classes  # the path that is opened is UTF-8


def test_versions_and_undo(first: Classifier, model: ModelFolder) -> None:
    grown = Classifier.open(model.path)
    grown.learn(list(tiny.pictures(2, 12)), ["k2"] * 12)
    assert grown.save(model.path, "learn", "k2") == 2
    assert [(v.number, v.action, v.classes) for v in model.versions()] == [(1, "learn", 2), (2, "learn", 3)]
    assert Classifier.open(model.path).classes == ["k0", "k1", "k2"]
    assert Classifier.open(model.path, version=1).classes == ["k0", "k1"]
    assert model.undo().number == 1
    assert Classifier.open(model.path).classes == ["k0", "k1"]
    assert [p.name for p in (model.path / VERSIONS).iterdir()] == ["1"]
    with pytest.raises(InputError, match="no earlier version"):
        model.undo()
    with pytest.raises(InputError, match="has no version 2; it has 1"):
        model.load(2)


def test_no_number_is_given_twice(first: Classifier, model: ModelFolder) -> None:
    assert [model.commit(first, "again"), model.commit(first, "again")] == [2, 3]
    model.undo()
    model.undo()
    assert model.commit(first, "again") == 4  # whoever knew a version 2 or 3 does not take this for it
    assert [v.number for v in model.versions()] == [1, 4]


def test_a_damaged_version_names_the_way_back(first: Classifier, model: ModelFolder) -> None:
    for _ in range(2):
        model.commit(first, "again")
    folder = model.path / VERSIONS
    (folder / "3" / "learner.json").unlink()
    for number in (None, 3):
        with pytest.raises(
            InputError, match=r"is missing\. `morecl undo \S+model` removes it and goes back to version 2$"
        ):
            model.load(number)
    (folder / "2" / HELD).write_bytes(b"")
    with pytest.raises(
        InputError, match=r"`morecl undo \S+model`, given 2 times, removes it and goes back to version 1$"
    ):
        model.load()
    with pytest.raises(InputError, match=r"the file that was saved [^.]*$"):  # it was asked for by its number
        model.load(2)
    assert [model.undo().number, model.undo().number] == [2, 1]
    assert model.load().classes == ["k0", "k1"]


def test_a_version_that_is_not_damaged_is_not_to_be_removed(
    first: Classifier, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.commit(first, "again")
    folder = model.path / VERSIONS / "2"
    whole = (folder / DETAILS).read_text()
    (folder / DETAILS).write_text(whole.replace("morecl.model/1", "morecl.model/7"))
    assert (folder / DETAILS).read_text() != whole
    with pytest.raises(InputError, match=r"classifier\.json has the format morecl.model/7") as caught:
        model.load()
    assert "undo" not in str(caught.value)
    (folder / DETAILS).write_text(whole)

    def denied(path: Path, *_: object, **__: object) -> str:
        if path == folder / DETAILS:
            raise PermissionError(13, "Permission denied", str(path))
        return path.read_bytes().decode()

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(InputError, match="Permission denied") as caught:
        model.load()
    assert "undo" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "known", "newer"),
    [
        (MODEL, "morecl.model/1", "morecl.model/2"),
        (f"{VERSIONS}/1/{DETAILS}", "morecl.model/1", "morecl.model/10"),
        (f"{VERSIONS}/1/learner.json", "morecl.learner/2", "morecl.learner/3"),
    ],
)
def test_a_newer_format_needs_a_newer_morecl(file: str, known: str, newer: str, model: ModelFolder) -> None:
    text = (model.path / file).read_text()
    (model.path / file).write_text(text.replace(known, newer))  # the seal is broken, too
    with pytest.raises(InputError) as caught:
        model.load()
    assert str(caught.value) == (
        f"{model.path / file} has the format {newer}, which this morecl ({morecl.__version__}) does not read; "
        "a newer morecl is needed"
    )
    (model.path / file).write_text(text.replace(known, known[:-1] + "0"))
    with pytest.raises(InputError, match="is damaged, or was written by another version of morecl"):
        model.load()


def test_without_a_whole_version_nobody_is_sent_back(first: Classifier, model: ModelFolder) -> None:
    model.commit(first, "again")
    with pytest.raises(InputError) as caught:
        model.load(device="no-such-device")  # the version is whole
    assert "undo" not in str(caught.value)
    for number in "12":
        (model.path / VERSIONS / number / DETAILS).unlink()
    with pytest.raises(InputError, match=r"versions/2/classifier\.json") as caught:
        model.load()
    assert "undo" not in str(caught.value)


@pytest.mark.parametrize("error", [FileNotFoundError, InputError])
def test_a_version_that_is_removed_while_it_is_read_is_no_error(
    error: type[Exception], first: Classifier, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process undoes it: the one before is read, and nobody is told to undo once more."""
    model.commit(first, "rename", "k0 to k0")
    read, tried = version_files.read, []

    def reading(folder: Path, device: str | None) -> Classifier:
        tried.append(folder.name)
        if folder.name == "2":
            model.undo()
            raise error("gone")
        return read(folder, device)

    monkeypatch.setattr(version_files, "read", reading)
    versions, opened = model.load_newest()
    assert tried == ["2", "1"] and [version.number for version in versions] == [1]
    assert opened.classes == first.classes
    model.commit(first, "rename", "k0 to k0")
    assert model.load().classes == first.classes  # version 3
    with pytest.raises(InputError, match="has no version 2; it has 1, 3"):
        model.load(2)


def test_a_first_version_that_cannot_be_saved_leaves_nothing(
    first: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(version_files, "write", full)
    folder = ModelFolder(tmp_path / "deep" / "model")
    with pytest.raises(OSError, match="No space left"), folder.changing():
        folder.commit(first, "learn")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_be_read_is_not_called_damaged(model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    for module in (checkpoint, version_files):
        with monkeypatch.context() as patch:
            patch.setattr(module, "file_sha256", locked)
            with pytest.raises(InputError, match=r"safetensors cannot be read \(Permission denied\)$"):
                model.load()


def test_commands_that_are_named_can_be_typed_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`morecl learn '.*/my model' FOLDER` makes one"):
        ModelFolder(tmp_path / "my model").versions()


def test_old_versions_go(first: Classifier, model: ModelFolder) -> None:
    for _ in range(3):
        model.commit(first, "again", keep=2)
    assert [v.number for v in model.versions()] == [3, 4]
    model.commit(first, "forget", purge=True)
    assert [v.number for v in model.versions()] == [5] and [p.name for p in (model.path / VERSIONS).iterdir()] == ["5"]


def test_how_many_versions_are_kept_stays_with_the_model(first: Classifier, model: ModelFolder) -> None:
    """Whoever changes it next need not know."""
    for _ in range(8):
        model.commit(first, "again", keep=7)
    changes.rename(model, model.load(), "k0", "k7")
    assert [v.number for v in model.versions()] == [4, 5, 6, 7, 8, 9, 10]
    Classifier.open(model.path).save(model.path)
    model.undo()
    model.commit(first, "again")
    assert [v.number for v in model.versions()] == [5, 6, 7, 8, 9, 10, 12]
    model.commit(first, "again")
    model.commit(first, "again")
    assert len(model.versions()) == 7
    Classifier.open(model.path).save(model.path, keep=2)
    model.commit(first, "again")
    assert [v.number for v in model.versions()] == [15, 16]
    model.commit(first, "forget", purge=True)
    for _ in range(3):
        model.commit(first, "again")
    assert [v.number for v in model.versions()] == [19, 20]


def test_saving_does_not_drop_what_others_have_changed(first: Classifier, model: ModelFolder, tmp_path: Path) -> None:
    mine, other = Classifier.open(model.path), Classifier.open(model.path)
    other.learn(list(tiny.pictures(2, 12)), ["k2"] * 12)
    assert [other.save(model.path), other.save(model.path)] == [2, 3]  # its own versions are no surprise
    mine.rename("k0", "mine")
    before = (model.path / MODEL).read_bytes()
    (tmp_path / "link").symlink_to(model.path)
    changed = r"version 3 is in use, not 1, .* Open it again and repeat your changes, or"
    for path in (model.path, str(tmp_path / "link"), model.path / ".." / "model"):
        with pytest.raises(InputError, match=changed):
            mine.save(path)
    assert (model.path / MODEL).read_bytes() == before
    assert mine.save(tmp_path / "another") == 1
    assert Classifier.open(model.path, version=2).save(model.path) == 4  # on purpose: it knew of version 3
    back = Classifier.open(model.path)
    model.undo()
    with pytest.raises(InputError, match="version 3 is in use, not 4"):
        back.save(model.path)
    with pytest.raises(InputError, match="version 3 is in use, not 1"):
        first.save(model.path)
    assert classifier(5).save(model.path) == 5  # was never opened there


@pytest.mark.parametrize("version", ["1", 1.0, True, 0])
def test_a_version_is_a_number(version: Any, model: ModelFolder) -> None:
    assert Classifier.open(model.path, version=np.int64(1)).classes == ["k0", "k1"]  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"version must be a whole number, 1 or more, not {version!r}"):
        Classifier.open(model.path, version=version)


def test_what_was_forgotten_but_cannot_be_removed_is_named(
    first: Classifier, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(InputError, match=r"versions/1 could not be removed .* Version 2, without it, is in use"):
            model.commit(first, "forget", purge=True)
    assert [v.number for v in model.versions()] == [2]
    model.commit(first, "again")  # the next change removes it
    assert sorted(p.name for p in (model.path / VERSIONS).iterdir()) == ["2", "3"]


def test_a_backbone_is_kept_once(first: Classifier, model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("morecl.checkpoint.SHIPPED", "another")
    model.commit(first, "a")
    model.commit(first, "b")
    one, two = (model.path / VERSIONS / n / "backbone.safetensors" for n in "23")
    assert one.samefile(two)
    model.undo()
    assert one.is_file()


def test_what_a_killed_process_left_is_removed(first: Classifier, model: ModelFolder) -> None:
    (model.path / VERSIONS / ".2.abc.tmp").mkdir()
    (model.path / VERSIONS / ".3.old").mkdir()
    (model.path / VERSIONS / "2").mkdir()
    (model.path / VERSIONS / "2" / "state.safetensors").write_bytes(b"half")
    (model.path / f".{MODEL}.xyz.tmp").write_text("half")
    assert Classifier.open(model.path).classes == ["k0", "k1"]
    assert model.commit(first, "learn") == 2
    assert sorted(p.name for p in (model.path / VERSIONS).iterdir()) == ["1", "2"]
    assert sorted(p.name for p in model.path.iterdir()) == [".lock", MODEL, VERSIONS]


def test_what_a_user_puts_beside_the_versions_stays(first: Classifier, model: ModelFolder) -> None:
    mine = {"1-backup", "1.old", ".1-backup.abc.tmp", "01", "notes.txt"}
    for name in mine:
        (model.path / VERSIONS / name).write_text("mine")
    model.commit(first, "again", purge=True)
    assert {p.name for p in (model.path / VERSIONS).iterdir()} == mine | {"2"}
    assert Classifier.open(model.path).classes == first.classes


def test_versions_are_not_removed_when_their_list_is_lost(first: Classifier, model: ModelFolder) -> None:
    model.commit(first, "again")
    (model.path / MODEL).unlink()
    for call in (lambda: Classifier.open(model.path), lambda: first.save(model.path), model.exists):
        with pytest.raises(InputError, match=r"model\.json is missing, but .* holds versions of a model"):
            call()
    assert sorted(p.name for p in (model.path / VERSIONS).iterdir()) == ["1", "2"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", None])
def test_the_way_out_of_a_lost_or_damaged_list(content: str | None, first: Classifier, model: ModelFolder) -> None:
    model.commit(first, "again")
    if content is None:
        (model.path / MODEL).unlink()
    else:
        (model.path / MODEL).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="in Python") as caught:
        model.versions()
    new = str(model.path.parent / "new")
    (way,) = re.findall(r"morecl\.Classifier\.open\(.*\)\.save\('NEW'\)", str(caught.value))
    assert eval(way.replace("'NEW'", repr(new)), {"morecl": morecl}) == 1
    assert Classifier.open(new).classes == first.classes
    with pytest.raises(InputError, match=r"Put model\.json back from a backup; or, in Python"):
        Classifier.open(model.path, version=7)
    assert sorted(p.name for p in (model.path / VERSIONS).iterdir()) == ["1", "2"]


def test_a_first_lesson_that_was_killed_can_be_repeated(first: Classifier, model: ModelFolder) -> None:
    (model.path / MODEL).unlink()  # killed between its version and the list
    assert first.save(model.path) == 1


@pytest.mark.parametrize("at", ["versions/2", MODEL])
def test_a_crash_at_the_rename_leaves_the_old_model(
    at: str, first: Classifier, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def crash(source: Path, target: Path) -> None:
        if Path(target) == model.path / at:
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        model.commit(classifier(3), "learn")
    monkeypatch.undo()
    assert Classifier.open(model.path).classes == ["k0", "k1"]
    assert model.commit(first, "learn") == 2


def test_a_full_disk_names_the_version(first: Classifier, model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save = safetensors.torch.save_file

    def full(tensors: dict[str, Any], file: Path) -> None:
        if file.name == HELD:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(tensors, file)

    monkeypatch.setattr("morecl.checkpoint.save_file", full)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        model.commit(first, "again")
    assert (caught.value.errno, caught.value.filename) == (28, str(model.path / VERSIONS / "2"))
    assert [p.name for p in (model.path / VERSIONS).iterdir()] == ["1"]


def test_one_process_at_a_time(model: ModelFolder) -> None:
    with model.changing(), pytest.raises(InputError, match="another process"), ModelFolder(model.path).changing():
        pass


def test_other_content_is_refused(tmp_path: Path, first: Classifier) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for call in (lambda: ModelFolder(tmp_path).exists(), lambda: first.save(tmp_path)):
        with pytest.raises(InputError, match="holds no model"):
            call()
    with pytest.raises(InputError, match="is a file"):
        ModelFolder(tmp_path / "notes.txt").exists()
    first.learner.save(tmp_path / "learner")
    with pytest.raises(InputError, match=r"learner saved by `learner.save`"):
        Classifier.open(tmp_path / "learner")
    assert not ModelFolder(tmp_path / "new").exists()
    with pytest.raises(InputError, match="there is no model in"):
        Classifier.open(tmp_path / "new")
    with pytest.raises(InputError, match="nothing has been learned"):
        classifier().save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", [MODEL, f"{VERSIONS}/1/{DETAILS}", f"{VERSIONS}/1/{HELD}", f"{VERSIONS}/1/learner.json"]
)
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_damage_is_noticed(name: str, harm: str, model: ModelFolder) -> None:
    file = model.path / name
    content = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes({"flip": content, "cut": content[: len(content) // 3], "empty": b""}[harm])
    with pytest.raises(InputError):
        Classifier.open(model.path)


FORGED = {
    "number": lambda value: value["versions"][0].update(number="../../etc"),
    "no versions": lambda value: value.update(versions=[]),
    "type": lambda value: value.update(versions=3),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_history_is_refused(case: str, model: ModelFolder) -> None:
    value = json.loads((model.path / MODEL).read_text())
    FORGED[case](value)
    (model.path / MODEL).write_text(json.dumps(sealed(value)))
    with pytest.raises(InputError, match="is damaged"):
        Classifier.open(model.path)
