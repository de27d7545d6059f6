"""Starting and resuming runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import morecl
import tiny
from morecl.data import build_stream, load_recipe
from morecl.errors import InputError, RanksError
from morecl.locking import LOCK, claimed
from morecl.run import RunRequest, Watcher, launch, measurements, resume, start
from morecl.suite.plan import Suite, plan
from morecl.tune import tune


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_a_folder_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    request = RunRequest(method="ncm", benchmark="digits-5t", train_per_class=2, test_per_class=1)
    folder = tmp_path / "run"
    with claimed(folder), pytest.raises(InputError, match="another process is at work in"):
        start(request, folder)
    assert not folder.exists()
    start(request, folder)
    assert (folder / "result.json").is_file()


RECIPE = 'dataset = "digits"\ntasks = {}\ntrain_per_class = {}\ntest_per_class = 4\n'


def begun(tmp_path: Path) -> tuple[Path, Path]:
    """A run that was stopped in its second task, and its recipe."""

    def stop(index: int, *_: object) -> None:
        if index:
            raise KeyboardInterrupt

    recipe, folder = tmp_path / "own.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(5, 4))
    with pytest.raises(KeyboardInterrupt):
        start(RunRequest(method="ncm", benchmark=str(recipe)), folder, watcher=Watcher(task=stop))
    assert (folder / "checkpoint-1").is_dir()
    return folder, recipe


def test_a_record_names_the_code_and_the_size_of_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "source_fingerprint", lambda _: "before")
    folder, _ = begun(tmp_path)
    monkeypatch.setattr(measurements, "source_fingerprint", lambda _: "after")
    record = resume(folder)
    assert record.versions["source"] == "before after"
    assert record.backbone.image_size == 32


def test_a_run_that_shared_its_card_for_a_while_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORECL_SHARED", "1")
    folder, recipe = begun(tmp_path)
    monkeypatch.delenv("MORECL_SHARED")
    assert resume(folder).shared is True
    monkeypatch.setenv("MORECL_SHARED", "0")
    assert start(RunRequest(method="ncm", benchmark=str(recipe)), tmp_path / "alone").shared is False


@pytest.mark.parametrize(("values", "other"), [((2, 4), "recipe, tasks"), ((5, 3), "recipe, data")])
def test_a_run_is_not_resumed_with_a_changed_recipe(tmp_path: Path, values: tuple[int, int], other: str) -> None:
    folder, recipe = begun(tmp_path)
    recipe.write_text(RECIPE.format(*values))
    with pytest.raises(InputError, match=f"own.toml is not what it began with, {other} changed. Undo"):
        resume(folder)
    recipe.write_text(RECIPE.format(5, 4))
    whole = start(RunRequest(method="ncm", benchmark=str(recipe)), tmp_path / "whole")
    assert resume(folder).accuracy_matrix == whole.accuracy_matrix


@pytest.mark.parametrize(("older", "changed"), [(False, "recipe"), (True, "settings")])
def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path, older: bool, changed: str) -> None:
    folder, recipe = begun(tmp_path)
    if older:  # a version that did not write down what the recipe said
        request = json.loads((folder / "run.json").read_text())
        del request["plan"]["settings"]
        (folder / "run.json").write_text(json.dumps(request))
    recipe.write_text(RECIPE.format(5, 4) + "[included.settings]\nimage_size = 32\n")
    with pytest.raises(InputError, match=f"own.toml is not what it began with, {changed} changed. Undo"):
        resume(folder)


@pytest.mark.parametrize(("key", "value"), [("method", '"csc"'), ("seed", "7")])
def test_a_run_is_not_resumed_as_a_different_one(tmp_path: Path, key: str, value: str) -> None:
    folder, _ = begun(tmp_path)
    text = (folder / "run.json").read_text()
    was = {"method": '"ncm"', "seed": "0"}[key]
    assert text.count(f'"{key}": {was}') == 1
    (folder / "run.json").write_text(text.replace(f'"{key}": {was}', f'"{key}": {value}'))
    with pytest.raises(InputError, match=f"began with, {key} changed"):
        resume(folder)


def test_the_file_of_a_recipes_backbone_is_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipes" / "own.toml"
    recipe.parent.mkdir()
    shutil.copy(tiny.BACKBONE, recipe.with_name("net.safetensors"))
    recipe.write_text(RECIPE.format(5, 4) + '[settings]\nbackbone = "net.safetensors"\nimage_size = 8\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def stop(index: int, *_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(RunRequest(method="ncm", benchmark="../recipes/own.toml"), Path("run"), watcher=Watcher(task=stop))
    monkeypatch.chdir(tmp_path)
    assert resume(elsewhere / "run").config["backbone"] == "net.safetensors"
    recipe.with_name("net.safetensors").unlink()
    with pytest.raises(InputError, match=r"backbone file .*/recipes/net\.safetensors does not exist$"):
        start(RunRequest(method="ncm", benchmark=str(recipe)), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_ranks_that_lose_each_other_say_how_to_continue(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "run.json").touch()
    message = f"lost the others. `morecl resume '{folder}'` continues after the last finished task"
    with pytest.raises(RanksError, match=message), launch._together(folder):
        raise RanksError("lost the others")


def test_what_a_method_cannot_learn_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    request = RunRequest(method="icarl", benchmark="digits-5t", settings={"memory_size": 9, "epochs": 1})
    with pytest.raises(InputError, match="memory_size=9 cannot hold an exemplar of each of 10 classes"):
        start(request, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["state.safetensors", "progress.json"])
def test_a_damaged_checkpoint_says_how_to_go_on(tmp_path: Path, name: str) -> None:
    folder, _ = begun(tmp_path)
    saved = folder / "checkpoint-1"
    (saved / name).unlink()
    with pytest.raises(
        InputError, match=r"is (damaged|missing).*Delete .*checkpoint-1, and `morecl resume .*` goes on from"
    ) as e:
        resume(folder)
    assert "Errno" not in str(e.value)
    shutil.rmtree(saved)
    assert resume(folder).metrics.aca > 0


def test_changed_measurements_are_refused(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    file = folder / "checkpoint-1" / "progress.json"
    value = json.loads(file.read_text())
    value["steps"][0]["aca"] = 12.3
    file.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"progress\.json is damaged: it was changed after it was saved"):
        resume(folder)


def test_half_written_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    request = RunRequest(method="ncm", benchmark="digits-5t", train_per_class=2, test_per_class=1)
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / ".run.json.x1.tmp").write_text("{")  # killed while the first file was being written
    start(request, folder)
    assert names(folder) == ["model", "result.json", "run.json"]
    with pytest.raises(InputError, match="killed holds a finished run: --overwrite replaces it"):
        start(request, folder)
    folder, _ = begun(tmp_path)
    for name in (".model.x2.tmp", ".checkpoint-2.x3.tmp"):
        (folder / name).mkdir()
    (folder / ".result.json.x4.tmp").touch()
    resume(folder)
    assert names(folder) == ["model", "result.json", "run.json"]
    for name in ("checkpoint-5", ".checkpoint-6.x5.tmp"):  # killed just after the record was written
        (folder / name).mkdir()
    with pytest.raises(InputError, match="is finished"):
        resume(folder)
    assert names(folder) == ["model", "result.json", "run.json"]


def test_checkpoints_of_all_tasks_stay_if_asked_for(tmp_path: Path) -> None:
    request = RunRequest(
        method="ncm", benchmark="digits-5t", train_per_class=2, test_per_class=1, tasks=3, keep_checkpoints=True
    )
    folder = tmp_path / "run"

    def stop(index: int, *_: object) -> None:
        if index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(request, folder, watcher=Watcher(task=stop))
    kept = ["checkpoint-1", "checkpoint-2"]
    assert names(folder) == [*kept, "run.json"]
    resume(folder)
    kept.append("checkpoint-3")
    assert names(folder) == [*kept, "model", "result.json", "run.json"]
    with pytest.raises(InputError, match="is finished"):
        resume(folder)
    assert [len(morecl.load(folder / name).task_sizes) for name in kept] == [1, 2, 3]
    start(request.model_copy(update={"keep_checkpoints": False}), folder, overwrite=True)
    assert names(folder) == ["model", "result.json", "run.json"]


@pytest.mark.parametrize("split", [True, False])
def test_a_watcher_can_tell_how_many_photos_are_held_out_and_how_far_they_are_shrunk(
    tmp_path: Path, split: bool
) -> None:
    photos = tmp_path / "photos"
    for part in ("train", "test") if split else (".",):
        for name in ("kiwi", "apple"):
            (photos / part / name).mkdir(parents=True)
            for i in range(10):
                Image.new("RGB", (300, 200), (20 * i, 90, 40)).save(photos / part / name / f"{i}.png")
    seen: list[tuple[int, int, int]] = []

    def started(learner: morecl.Learner, stream: morecl.data.TaskStream, done: int) -> None:
        data = stream.dataset
        seen.append((len(data.y_train), len(data.y_test), data.side))

    record = start(
        RunRequest(method="ncm", benchmark=f"folder:{photos}"), tmp_path / "run", watcher=Watcher(started=started)
    )
    assert seen == [(record.data.train_images, record.data.test_images, 32)]
    assert (sum(seen[0][:2]), seen[0][1] < 10) == ((40, False) if split else (20, True))


@pytest.mark.parametrize("inside", [".", "runs/1", "../photos/runs"])
def test_a_run_among_its_own_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    """Its folder would be a class from then on, for this run when it is resumed and for every later one."""
    for name in ("kiwi", "apple"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (30, 20), (20 * i, 90, 40)).save(tmp_path / "photos" / name / f"{i}.png")
    monkeypatch.chdir(tmp_path / "photos")
    request = RunRequest(method="ncm", benchmark="folder:.")
    suite = Suite.model_validate(
        {"name": "mine", "description": "", "runs": [{"methods": ["ncm"], "benchmarks": ["folder:."]}]}
    )
    begun: tuple[Callable[[], object], ...] = (
        lambda: start(request, Path(inside)),
        lambda: plan(suite, Path(inside)),
        lambda: tune(
            request.model_copy(update={"validation": 0.2, "method": "more"}),
            lrs=[0.1], epochs=[1], seeds=[0], out=Path(inside), watch=lambda title: nullcontext(Watcher()),
        ),
    )  # fmt: skip
    for begin in begun:
        with pytest.raises(InputError, match=r"whose folders are the classes of the data set.*--out"):
            begin()
    assert names(tmp_path / "photos") == ["apple", "kiwi"]
    start(request, Path(".runs/1"))
    start(request, tmp_path / "runs")
    assert load_recipe("folder:.").dataset and names(tmp_path / "photos") == [".runs", "apple", "kiwi"]


def test_the_model_of_a_folder_predicts_class_names_and_scores_files_as_the_run_did(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for name, colour in {
        "kiwi": (90, 140, 40),
        "apple": (200, 30, 30),
        "plum": (90, 30, 120),
        "fig": (60, 40, 80),
    }.items():
        for split, count in (("train", 6), ("test", 3)):
            (photos / split / name).mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(-25, 25, (30 + i, 55, 3))
                pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(photos / split / name / f"{i}.png")
    record = start(RunRequest(method="ncm", benchmark=f"folder:{photos}"), tmp_path / "run")
    assert record.data.classes == ["apple", "fig", "kiwi", "plum"]
    learner = morecl.load(tmp_path / "run" / "model")
    files = sorted(photos.glob("test/*/*.png"))
    predicted = learner.predict(files)
    right = [label == file.parent.name for label, file in zip(predicted.labels, files, strict=True)]
    assert 100 * np.mean(right) == pytest.approx(record.metrics.aca)
    side = learner.backbone.input.resize
    recipe = load_recipe(f"folder:{photos}")
    dataset = build_stream(recipe, folder_size=side).dataset
    assert record.data.fingerprint == dataset.fingerprint  # the run's images
    np.testing.assert_array_equal(learner.predict(dataset.x_test).ood_score, predicted.ood_score)
    with pytest.raises(InputError, match="at least 1 pixel, not 0"):
        build_stream(recipe, folder_size=0)


def test_joint_resumes_with_images_that_are_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's file is bit for bit that of a run that was never stopped."""
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", 0)
    rng = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "photos" / f"{i % 8}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)).save(path)
    settings = tiny.settings_for("joint", image_size=8)
    request = RunRequest(method="joint", benchmark=f"folder:{tmp_path / 'photos'}", tasks=4, settings=settings)

    def stop(index: int, *_: object) -> None:
        if index == 2:
            raise KeyboardInterrupt

    whole = start(request, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        start(request, tmp_path / "stopped", watcher=Watcher(task=stop))
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "stopped", watcher=Watcher(task=stop))
    resumed = resume(tmp_path / "stopped")
    assert resumed.accuracy_matrix == whole.accuracy_matrix and resumed.entries == whole.entries
    files = [tmp_path / name / "model" / "state.safetensors" for name in ("whole", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()
    learner = morecl.load(tmp_path / "stopped" / "model")
    assert learner.memory.unread is not None and len(learner.memory) == whole.data.train_images
